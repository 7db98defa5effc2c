// hasten-worker: one rank of a command that needs LibTorch. `hasten` starts it with its own
// arguments. It is not meant to be started by hand.
#include "commands.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/log.h"
#include "run.h"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const auto run = [](const auto& command) {
    if constexpr (requires { hasten::run_command(command); }) {
      return hasten::run_command(command);
    } else {
      hasten::log_error(
          "hasten-worker takes train, predict, generate, eval, plan, "
          "estimate-memory, compare, state, tokenizer, synth or env; see hasten --help");
      return hasten::kExitBadInput;
    }
  };
  return hasten::record([&] { return std::visit(run, hasten::parse_command_line(arguments)); });
}
