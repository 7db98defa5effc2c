// Ranks that a signal has stopped. The launcher detects it in /proc.
#include <gtest/gtest.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>

#include "hasten/launch/launch.h"

namespace hasten {

static LaunchOptions frozen_options(const std::string& script) {
  LaunchOptions options;
  options.nproc = 2;
  options.argv = {"sh", "-c", script};
  options.heartbeat_timeout = std::chrono::milliseconds(500);
  options.settle = std::chrono::milliseconds(200);
  return options;
}

TEST(LaunchFrozen, ARankThatASignalStopsIsNamedAndTheWorldEnds) {
  for (const int frozen : {0, 1}) {
    const std::string rank = std::to_string(frozen);
    const LaunchResult result =
        launch(frozen_options("trap 'exit 0' TERM; if [ $RANK = " + rank +
                              " ]; then kill -STOP $$; fi; while :; do sleep 0.05; done"));
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_EQ(result.first_failed_rank, frozen);
    EXPECT_EQ(result.reason, "rank " + rank + " froze first");
    EXPECT_NE(result.message.find("has been stopped by a signal (SIGSTOP) for"), std::string::npos)
        << result.message;
    EXPECT_FALSE(result.shown);
    EXPECT_EQ(result.ends[frozen].signal, SIGKILL);
    EXPECT_EQ(result.ends[1 - frozen].code, 0);
  }
}

TEST(LaunchFrozen, ARankThatIsLetGoOnInTimeIsNot) {
  LaunchOptions options = frozen_options(
      "if [ $RANK = 0 ]; then (sleep 0.3; kill -CONT $$) & kill -STOP $$; wait; fi; exit 0");
  options.heartbeat_timeout = std::chrono::seconds(60);
  EXPECT_EQ(launch(options).exit_code, 0);
}

TEST(LaunchFrozen, WhereTheOthersMayGoOnOnlyTheFrozenOneEnds) {
  LaunchOptions options =
      frozen_options("if [ $RANK = 1 ]; then kill -STOP $$; fi; sleep 2; exit 0");
  options.keep_going = true;
  const LaunchResult result = launch(options);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.ends[0].code, 0);
  EXPECT_EQ(result.ends[1].signal, SIGKILL);
}

TEST(ProcessState, DistinguishesRunningStoppedDebuggedAndEndedProcesses) {
  const pid_t child = ::fork();
  if (child == 0) {
    const bool traced = ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) == 0;
    std::raise(SIGSTOP); // state 't' if traced
    std::raise(SIGSTOP);
    ::_exit(traced ? 0 : 1);
  }
  const uint64_t started = process_start_time(child);
  EXPECT_GT(started, 0u);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  const ProcessState held = process_state(child, started);
  const bool debugged = ::ptrace(PTRACE_DETACH, child, nullptr, nullptr) == 0;
  if (debugged) {
    EXPECT_EQ(held, ProcessState::running);
    ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  }
  EXPECT_EQ(process_state(child, started), ProcessState::stopped);
  // If the start time differs, another process has this pid now.
  EXPECT_EQ(process_state(child, started + 1), ProcessState::ended);
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  EXPECT_EQ(process_state(child, started), ProcessState::ended);
  EXPECT_EQ(process_state(::getpid(), 0), ProcessState::running);
  if (!debugged) {
    GTEST_SKIP() << "no process may be debugged here";
  }
}

} // namespace hasten
