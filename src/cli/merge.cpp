#include "classifier.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/log.h"
#include "hasten/io/commit.h"
#include "run.h"

namespace hasten {

int run_command(const MergeCommand& command) {
  const Task& task = task_of(AutoConfig::from_pretrained(command.model));
  PreTrainedModel model = model_from_pretrained(command.model, task.head);
  Tokenizer tokenizer = detail::tokenizer_of(command.model);
  merge_and_unload(*model);
  FolderCommit commit(command.output_dir);
  detail::classifier_files(model, tokenizer).save(commit.folder());
  commit.commit();
  log_info("wrote " + command.output_dir);
  return kExitOk;
}

} // namespace hasten
