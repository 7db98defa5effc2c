#include "train_run.h"

#include <algorithm>
#include <string_view>

#include "agreement.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/trainer/losses.h"
#include "head.h"

namespace hasten::detail {

void add_model_facts(BannerLines& lines, const TrainCommand& command, const LoadedBert& bert) {
  lines.emplace_back("model", command.model + ": " + std::to_string(bert.config.num_hidden_layers) +
                                  " layers, " + std::to_string(bert.config.hidden_size) + " wide");
  for (const std::string& line : bert.report) {
    lines.emplace_back("model", line);
  }
  if (is_model_shape(command.model)) {
    lines.emplace_back("model", "learning rate " + format_digits(command.arguments.learning_rate) +
                                    " (--learning-rate)");
  }
}

void require_class_weights(const TrainCommand& command, int64_t labels) {
  const auto weights = class_weight_numbers(command.arguments.class_weights);
  if (!weights.empty() && std::ssize(weights) != labels) {
    throw InputError("cli::train", "--class-weights=" + command.arguments.class_weights,
                     std::to_string(labels) + " numbers, one a label");
  }
}

void require_row_each(int64_t rows, int world_size) {
  if (rows < world_size) {
    throw InputError("cli::train",
                     "more processes than rows: processes=" + std::to_string(world_size) +
                         ", training rows=" + std::to_string(rows),
                     "at least one row a process", "lower --nproc");
  }
}

void set_rows(const TrainCommand& command, TextClassificationOptions& options) {
  options.eval_split = command.eval_split;
  options.seed = command.arguments.seed;
  options.max_train_rows = command.max_train_rows;
  options.max_eval_rows = command.max_eval_rows;
}

static int dry_run(const TrainCommand& command, const ReadInputs& read) {
  const World world = world_from_environment();
  const int ranks = world.world_size > 1 ? world.world_size : command.nproc;
  if (world.rank > 0) {
    return kExitOk; // rank 0 says it
  }
  const TrainingInputs in = read(ranks, true);
  for (const std::string& warning : in.warnings) {
    log_warning(warning);
  }
  print_dry_run(command, in, ranks);
  return kExitOk;
}

// False where the run was finished before.
static bool train(const TrainCommand& command, const TrainingInputs& in,
                  const std::shared_ptr<Accelerator>& accelerator) {
  TrainingArguments arguments = command.arguments;
  arguments.max_length = in.max_length; // what predict and eval cut to
  Trainer trainer(in.bert.model.ptr(), in.loss, arguments, in.train, in.eval, in.metrics,
                  accelerator);
  trainer.set_model_files(in.files);
  if (accelerator->is_main_process()) {
    trainer.set_run_facts(described_inputs(command), {{"train_data", in.checksum()}});
    for (const std::string& warning : in.warnings) {
      log_warning(warning);
    }
    if (!arguments.disable_tqdm) {
      trainer.add_callback(std::make_shared<ProgressCallback>(
          "hasten " HASTEN_VERSION ": " + command.model + " learns " + in.learns, in.facts()));
    }
  }
  return !trainer.train().already_finished;
}

int run_training(const TrainCommand& command, const ReadInputs& read) {
  if (command.dry_run) {
    return dry_run(command, read);
  }
  const auto accelerator = std::make_shared<Accelerator>(accelerator_options(command.arguments));
  Communicator& communicator = *accelerator->communicator();
  TrainingInputs inputs;
  agree_on(communicator, "cli: read the input",
           [&] { inputs = read(accelerator->num_processes(), accelerator->is_main_process()); });
  bool trained = false;
  try {
    trained = train(command, inputs, accelerator);
  } catch (const std::exception& error) {
    const std::string_view what = error.what();
    communicator.abandon(what.substr(0, what.find('\n'))); // no stack trace
    throw;
  }
  if (accelerator->is_main_process()) {
    log_info((trained ? std::string() : finished_line(command) + " ") + "Model in " +
             command.arguments.output_dir + "." + inputs.hint);
  }
  accelerator->finish();
  return kExitOk;
}

} // namespace hasten::detail
