// hasten-worker: one rank of a command that needs LibTorch. Started by `hasten`
// with the arguments that `hasten` was given; not meant to be typed.
#include "hasten/base/exit_code.h"
#include "hasten/base/log.h"
#include "hasten/cli/commands.h"
#include "hasten/cli/run.h"

namespace hasten::detail {

struct RunCommand {
  int operator()(const TrainCommand& command) { return run_train(command); }
  int operator()(const PredictCommand& command) { return run_predict(command); }
  int operator()(const EvalCommand& command) { return run_eval(command); }
  int operator()(const PlanCommand& command) { return run_plan(command); }
  int operator()(const EstimateMemoryCommand& command) { return run_estimate_memory(command); }
  int operator()(const CompareCommand& command) { return run_compare(command); }
  int operator()(const StateCommand& command) { return run_state(command); }
  int operator()(const TokenizerCommand& command) { return run_tokenizer(command); }
  int operator()(const SynthCommand& command) { return run_synth(command); }
  int operator()(const EnvCommand& command) { return run_env(command); }
  template <typename T>
  int operator()(const T&) {
    log_error(
        "hasten-worker takes train, predict, eval, plan, estimate-memory, "
        "compare, state, tokenizer, synth or env; see hasten --help");
    return kExitBadInput;
  }
};

} // namespace hasten::detail

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  return hasten::record([&] {
    return std::visit(hasten::detail::RunCommand{}, hasten::parse_command_line(arguments));
  });
}
