#include "train_run.h"

#include "agreement.h"
#include "checks.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/log.h"

namespace hasten::detail {

static int dry_run(const TrainCommand& command, const ReadInputs& read) {
  const World world = world_from_environment();
  const int ranks = world.world_size > 1 ? world.world_size : command.nproc;
  if (world.rank > 0) {
    return kExitOk; // only rank 0 prints it
  }
  const TrainingInputs in = read(ranks, true);
  for (const std::string& warning : in.warnings) {
    log_warning(warning);
  }
  print_dry_run(command, in, ranks);
  return kExitOk;
}

// Returns false if the run was already finished.
static bool train(const TrainCommand& command, const TrainingInputs& in,
                  const std::shared_ptr<Accelerator>& accelerator) {
  TrainingArguments arguments = command.arguments;
  arguments.max_length = in.max_length; // predict and eval truncate to this, too
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
    communicator.abort(error);
    throw;
  }
  if (accelerator->is_main_process()) {
    log_info((trained ? std::string() : finished_line(command) + " ") + "Model in " +
             command.arguments.output_dir + "." + inputs.hint);
  }
  accelerator->end_training();
  return kExitOk;
}

} // namespace hasten::detail
