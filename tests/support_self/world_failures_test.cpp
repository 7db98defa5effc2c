#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "hasten/base/process.h"

namespace hasten {

struct HarnessOutput {
  int code = 0;
  std::string text{};
};

/// Starts the program of planted failures, with its output to `stdout_fd`. A case may take
/// `seconds`. After a failure the healthy ranks may take half of that to end, at most 3 s.
static pid_t start_planted(const std::string& filter, int stdout_fd,
                           std::vector<std::pair<std::string, std::string>> environment = {},
                           const char* seconds = "2") {
  SpawnOptions options;
  options.stdout_fd = stdout_fd;
  options.stderr_fd = stdout_fd;
  options.environment = std::move(environment);
  options.environment.emplace_back("HASTEN_TEST_CASE_SECONDS", seconds);
  const auto folder = std::filesystem::read_symlink("/proc/self/exe");
  return spawn_process({(folder.parent_path() / "hasten_harness_self").string(), "--world", "2",
                        "--gtest_filter=" + filter},
                       options);
}

static HarnessOutput run_planted(
    const std::string& filter,
    const std::vector<std::pair<std::string, std::string>>& environment = {},
    const char* seconds = "2") {
  int ends[2];
  EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const pid_t pid = start_planted(filter, ends[1], environment, seconds);
  ::close(ends[1]);
  HarnessOutput output;
  char block[4096];
  for (ssize_t got; (got = ::read(ends[0], block, sizeof block)) > 0;) {
    output.text.append(block, static_cast<size_t>(got));
  }
  ::close(ends[0]);
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  output.code = process_end(status).code;
  return output;
}

static void expect_lines(const HarnessOutput& output, std::initializer_list<const char*> lines) {
  for (const char* line : lines) {
    EXPECT_NE(output.text.find(line), std::string::npos) << line << "\nis missing in\n"
                                                         << output.text;
  }
}

TEST(WorldFailures, CasesThatPassOrSkipEverywhereAreNoFailure) {
  const auto output = run_planted("Planted.Passes*:Planted.SkipsEverywhere");
  EXPECT_EQ(output.code, 0);
  expect_lines(output, {"[       OK ] Planted.Passes (",
                        "[  SKIPPED ] Planted.SkipsEverywhere: needs more than there is",
                        "4 cases ran on 2 ranks: 3 passed, 0 failed, 1 skipped."});
}

TEST(WorldFailures, EveryPlantedFailureFailsItsCaseAndNoOther) {
  const auto output =
      run_planted("Planted.*-Planted.Hangs:Planted.IsStopped:Planted.SkipsEverywhere", {}, "6");
  EXPECT_EQ(output.code, 1);
  expect_lines(output,
               {"[rank 0,1/2] Planted.NoOpCollective: planted_failures.cpp:",
                "[rank 1/2] Planted.FailsAlone: planted_failures.cpp:", "only here",
                "[rank 1/2] Planted.FailsWhileTheOtherWaits: planted_failures.cpp:",
                "[rank 1/2] Planted.ThrowsAlone: ", "thrown here",
                "[rank 1/2] Planted.IsKilled: was killed by signal 9 (Killed)",
                "[rank 1/2] Planted.LeavesQuietly: exited with code 0",
                "[rank 1/2] Planted.SkipsAlone: ranks disagree",
                "[rank 1/2] Planted.FailsAtItsEnd: after the case: left something",
                "[       OK ] Planted.PassesAfterAFailure", "[       OK ] Planted.PassesAtLast",
                "11 cases ran on 2 ranks: 3 passed, 8 failed, 0 skipped."});
}

TEST(WorldFailures, HungAndStoppedRanksFailAtTheCasesLimit) {
  const auto output = run_planted("Planted.Hangs:Planted.IsStopped:Planted.PassesAtLast");
  EXPECT_EQ(output.code, 1);
  expect_lines(output, {"[rank 1/2] Planted.Hangs: did not end in time, in the case",
                        "Planted_Hangs_Test", // from the backtrace
                        "[rank 0/2] Planted.Hangs: did not end in time, waiting for the other",
                        "[rank 1/2] Planted.IsStopped: was stopped by a signal",
                        "[       OK ] Planted.PassesAtLast",
                        "3 cases ran on 2 ranks: 1 passed, 2 failed, 0 skipped."});
}

TEST(WorldFailures, RankWithAnotherNumberOfCasesIsAFailure) {
  for (const char* rank : {"0", "1"}) {
    const auto output =
        run_planted("Planted.Passes:Planted.OnlyHere", {{"HASTEN_PLANT_EXTRA_CASE", rank}});
    EXPECT_EQ(output.code, 1);
    expect_lines(output,
                 {*rank == '0' ? "has 1 cases, rank 0 has 2" : "has 2 cases, rank 0 has 1"});
  }
}

TEST(WorldFailures, FilterThatMatchesNothingRunsNothing) {
  const auto output = run_planted("Planted.NoSuchCase");
  EXPECT_EQ(output.code, 0);
  expect_lines(output, {"0 cases ran on 2 ranks"});
}

TEST(WorldFailures, RanksDieWithTheParent) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const pid_t pid = start_planted("Planted.Hangs", ends[1]);
  ::close(ends[1]);
  std::string text;
  char block[4096];
  while (text.find("RUN") == std::string::npos) {
    const ssize_t got = ::read(ends[0], block, sizeof block);
    ASSERT_GT(got, 0) << text;
    text.append(block, static_cast<size_t>(got));
  }
  ::kill(pid, SIGKILL);
  // The ranks have the pipe, too, so it ends when they end.
  while (::read(ends[0], block, sizeof block) > 0) {
  }
  ::close(ends[0]);
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
}

} // namespace hasten
