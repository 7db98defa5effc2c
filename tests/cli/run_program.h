// Runs a built program of hasten as a user would and returns how it ended.
#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "hasten/base/files.h"
#include "hasten/base/process.h"
#include "support/temporary_folder.h"

namespace hasten::testing_support {

struct ProgramRun {
  int code = -1;
  std::string out{};
  std::string error{};
  double seconds = 0;
  bool timed_out = false;

  bool said(const std::string& text) const { return error.find(text) != std::string::npos; }
  /// How often stderr has the text.
  size_t times(const std::string& text) const {
    size_t count = 0;
    for (size_t at = error.find(text); at != std::string::npos; at = error.find(text, at + 1)) {
      ++count;
    }
    return count;
  }
};

struct ProgramOptions {
  std::vector<std::pair<std::string, std::string>> environment{};
  std::string input{};
  std::chrono::seconds deadline{60};
  /// Called repeatedly while the program runs, with its pid and its stderr so far.
  std::function<void(pid_t, const std::string&)> watch{};
};

/// `argv` is searched in the folder of this test program (build/<preset>/bin).
inline ProgramRun run_program(std::vector<std::string> argv, const ProgramOptions& options = {}) {
  const TemporaryFolder folder;
  const auto bin = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  if (argv.at(0).find('/') == std::string::npos) {
    argv[0] = (bin / argv[0]).string();
  }
  const auto open_file = [&](const char* name, const std::string& content) {
    std::ofstream(folder / name, std::ios::binary) << content;
    return ::open((folder / name).c_str(), O_RDWR | O_APPEND | O_CLOEXEC);
  };
  SpawnOptions spawn;
  // Other programs must not get the token ids of a test's rows, and no test asks a hub elsewhere.
  spawn.environment = {{"HASTEN_CACHE", folder / "cache"}, {"HF_HUB_OFFLINE", "1"}};
  spawn.environment.insert(spawn.environment.end(), options.environment.begin(),
                           options.environment.end());
  // A tested run uses one thread, and its output is not a terminal.
  spawn.environment.emplace_back("OMP_NUM_THREADS", "1");
  spawn.stdin_fd = open_file("in", options.input);
  spawn.stdout_fd = open_file("out", "");
  spawn.stderr_fd = open_file("error", "");
  const auto start = std::chrono::steady_clock::now();
  const pid_t pid = spawn_process(argv, spawn);
  ProgramRun run;
  int status = 0;
  while (::waitpid(pid, &status, WNOHANG) == 0) {
    if (options.watch) {
      options.watch(pid, read_file(folder / "error"));
    }
    if (std::chrono::steady_clock::now() - start > options.deadline) {
      ::kill(-pid, SIGKILL);
      ::waitpid(pid, &status, 0);
      run.timed_out = true;
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  run.code = process_end(status).code;
  run.out = read_file(folder / "out");
  run.error = read_file(folder / "error");
  for (const int fd : {spawn.stdin_fd, spawn.stdout_fd, spawn.stderr_fd}) {
    ::close(fd);
  }
  return run;
}

} // namespace hasten::testing_support
