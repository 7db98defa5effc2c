// hasten: prints help, checks everything that needs no LibTorch, and starts hasten-worker, as one
// process or as the ranks of a world.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <system_error>
#include <type_traits>

#include "checks.h"
#include "commands.h"
#include "compare.h"
#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/log.h"
#include "hasten/base/store_channel.h"
#include "hasten/base/text.h"
#include "hasten/base/world.h"
#include "hasten/hub/download.h"
#include "hasten/launch/launch.h"

namespace hasten::detail {

/// Path of hasten-worker in this program's folder.
std::string worker_program() {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  const auto worker = self.parent_path() / "hasten-worker";
  if (error || ::access(worker.c_str(), X_OK) != 0) {
    throw Error("cli::hasten", "hasten-worker is missing: " + worker.string(),
                "both programs in one folder", "build or install hasten-worker, too");
  }
  return worker.string();
}

/// Replaces this process by hasten-worker, so that signals reach it directly.
[[noreturn]] void become_worker(const std::vector<std::string>& arguments) {
  const std::string worker = worker_program();
  std::vector<char*> argv{const_cast<char*>(worker.c_str())};
  for (const std::string& argument : arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);
  ::execv(worker.c_str(), argv.data());
  throw Error("cli::hasten", "cannot start " + worker + ": " + std::strerror(errno));
}

/// Prints once why the ranks failed. hasten's own (`ours`) may have said all.
int report(const LaunchResult& result, bool ours) {
  if (result.exit_code == kExitOk) {
    return kExitOk;
  }
  if (result.exit_code == 128 + SIGINT && result.first_failed_rank < 0) {
    log_info("Stopped by Ctrl-C; all ranks have ended.");
    return result.exit_code;
  }
  if (!ours || !result.shown) {
    const bool more = !result.shown && !result.message.empty();
    log_error(result.reason + (more ? ": " + result.message : ""));
    if (!result.consequences.empty()) {
      log_info("after it: " + joined(result.consequences));
    }
  }
  return result.exit_code;
}

/// The options, with torchrun's variable for the prefix of teed lines.
LaunchOptions with_prefix(LaunchOptions options) {
  if (const char* text = std::getenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")) {
    options.logs.log_line_prefix_template = text;
  }
  return options;
}

/// True if this rank prints an error that all ranks of its launcher get: one rank per host.
bool reports_common_errors() {
  try {
    return world_from_environment().local_rank == 0;
  } catch (const InputError&) {
    const char* local_rank = std::getenv("LOCAL_RANK");
    return local_rank == nullptr || std::string(local_rank) == "0";
  }
}

/// Passes the file to the worker and the ranks by the environment.
void use_secret_file(const std::string& file) {
  if (!file.empty()) {
    ::setenv("HASTEN_SECRET_FILE", file.c_str(), 1);
    ::unsetenv("HASTEN_SECRET");
    store_key_from_environment(); // throws for a bad file
  }
}

/// Fetches the model and the tokenizer that are given by a name which the cache lacks, after all
/// checks that need neither.
template <typename C>
void fetch_names(const C& command) {
  if constexpr (requires { command.offline; }) {
    const auto check = [&] {
      if constexpr (requires { check_inputs(command, false); }) {
        check_inputs(command, false);
      }
    };
    const auto fetch = [&](const std::string& name, HubFiles files, const char* flag) {
      // A name near that of a shape is more likely a slip.
      if (!command.offline && !name.empty() && nearest_name(name, model_shapes()).empty()) {
        download_missing(name, {.files = files, .given_as = flag}, check);
      }
    };
    if constexpr (requires { command.model; }) {
      constexpr bool kOnlyConfig = std::is_same_v<C, EstimateMemoryCommand>;
      fetch(command.model, kOnlyConfig ? HubFiles::config : HubFiles::model, "--model");
    }
    if constexpr (requires { command.tokenizer; }) {
      fetch(command.tokenizer, HubFiles::tokenizer, "--tokenizer");
    }
  }
}

class Hasten {
 public:
  /// `arguments`: unchanged, because the worker parses them again.
  explicit Hasten(const std::vector<std::string>& arguments) : arguments_(arguments) {}

  int operator()(const Answer& answer) {
    std::cout << answer.text << std::flush;
    return kExitOk;
  }
  int operator()(const TrainCommand& command) {
    const World world = outer_world(command.rendezvous);
    use_secret_file(command.secret_file);
    if (command.nproc_given || world.world_size == 1) {
      check_nproc("train", command.nproc, command.oversubscribe || command.dry_run, world);
    }
    check_launch_outside("train", command, world);
    fetch_names(command);
    if (world.world_size > 1) {
      become_worker(arguments_); // a rank of another launcher; the ranks check together
    }
    check_inputs(command);
    if (command.dry_run) {
      become_worker(arguments_); // one process is enough
    }
    const bool several_hosts = command.rendezvous.several();
    // Of several hosts, one may lack what the others have.
    if (!several_hosts && is_finished_already(command, command.nproc)) {
      remove_folders_of_killed_launchers();
      log_info(finished_line(command));
      return kExitOk;
    }
    if (command.nproc == 1 && !command.logs.any() && !several_hosts) {
      become_worker(arguments_);
    }
    LaunchOptions options = with_prefix(command);
    options.rendezvous.same = facts_of_run(command);
    options.heartbeat_timeout = from_seconds(command.arguments.heartbeat_timeout);
    return report(launch_workers(std::move(options)), true);
  }
  int operator()(const EvalCommand& command) {
    const World world = world_from_environment();
    if (world.world_size == 1) {
      check_nproc("eval", command.nproc, command.oversubscribe, world);
    }
    fetch_names(command);
    if (world.world_size > 1) {
      become_worker(arguments_); // a rank of another launcher; the ranks check together
    }
    check_inputs(command);
    if (command.nproc == 1) {
      become_worker(arguments_);
    }
    return report(launch_workers(with_prefix(command)), true);
  }
  int operator()(const CompareCommand& command) {
    check_nproc("compare", command.nproc, command.oversubscribe, world_from_environment());
    fetch_names(command);
    check_inputs(command);
    compare_strategies(command, [&](const std::string& state_file) {
      const LaunchResult result = launch_workers(
          {.nproc = command.nproc, .environment = {{CompareState::kVariable, state_file}}});
      const bool ran_out = std::ranges::any_of(
          result.ends, [](const ProcessEnd& end) { return end.code == kExitOutOfMemory; });
      if (result.exit_code != kExitOk && !ran_out) {
        throw SilentExit(report(result, true));
      }
    });
    return kExitOk;
  }
  int operator()(const EnvCommand& command) {
    if (command.nproc == 1) {
      become_worker(arguments_);
    }
    check_nproc("env", command.nproc, command.oversubscribe, world_from_environment());
    return report(launch_workers({.nproc = command.nproc}), true);
  }
  int operator()(const ExportCommand& command) {
    if (command.describe.empty()) {
      export_model(command);
    }
    become_worker(arguments_);
  }
  int operator()(const DownloadCommand& command) {
    std::cout << download(command.name, command.options).string() << '\n' << std::flush;
    return kExitOk;
  }
  int operator()(const ReportCommand& command) {
    make_report(command);
    return kExitOk;
  }
  int operator()(const LaunchCommand& command) {
    use_secret_file(command.secret_file);
    check_nproc("launch", command.nproc, command.oversubscribe, outer_world(command.rendezvous));
    LaunchOptions options = with_prefix(command);
    options.rendezvous.same = {
        {"program", std::filesystem::path(command.argv[0]).filename().string()}};
    return report(launch(options), false);
  }
  /// Commands that the worker runs in one process.
  template <typename C>
  int operator()(const C& command) {
    fetch_names(command);
    if constexpr (requires { check_inputs(command); }) {
      check_inputs(command);
    }
    become_worker(arguments_);
  }

 private:
  /// Launches hasten's own ranks. They print what happens; only the result is printed here.
  LaunchResult launch_workers(LaunchOptions options) const {
    options.argv = arguments_;
    options.argv.insert(options.argv.begin(), worker_program());
    set_log_levels(LogLevel::warning, LogLevel::warning);
    LaunchResult result = launch(options);
    set_log_levels(LogLevel::info, LogLevel::warning);
    return result;
  }

  const std::vector<std::string>& arguments_;
};

} // namespace hasten::detail

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  // OpenMP threads that spin while they wait take cores from working threads as soon as other
  // programs run: small models became 20 times slower. The OpenMP run time reads the variable when
  // it is loaded. Therefore it is set here, and child processes inherit it.
  ::setenv("OMP_WAIT_POLICY", "passive", /*overwrite=*/0);
  return hasten::exit_code_of(0, 1, [&] {
    try {
      return std::visit(hasten::detail::Hasten(arguments), hasten::parse_command_line(arguments));
    } catch (const hasten::InputError&) {
      if (!hasten::detail::reports_common_errors()) {
        throw hasten::SilentExit(hasten::kExitBadInput);
      }
      throw;
    }
  });
}
