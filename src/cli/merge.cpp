#include "classifier.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/log.h"
#include "hasten/exported/exported_module.h"
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

int run_command(const ExportCommand& command) {
  const std::filesystem::path path = command.describe;
  const ExportedModule module = ExportedModule::load(path, {.weights = false});
  detail::write_answers("cli::export", "", module->describe() + "\n", 1);
  return kExitOk;
}

} // namespace hasten
