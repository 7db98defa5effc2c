// A process dies or freezes. Each launcher reports the first cause once; without launchers each
// remaining host does. Two network namespaces act as two hosts, if the machine permits them.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>

#include "cli/small_reviews.h"

namespace hasten {

using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::small_reviews;
using testing_support::TemporaryFolder;
using testing_support::train_arguments;

namespace detail {

/// The pid of rank `rank` that trains in `folder`; 0 if there is none yet.
pid_t pid_of_rank(const std::filesystem::path& folder, int rank) {
  const auto bytes = [](const std::filesystem::path& file) {
    std::ifstream stream(file, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(stream), {});
  };
  const std::string variable = std::string("\0RANK=", 6) + std::to_string(rank) + '\0';
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    if (bytes(entry.path() / "cmdline").find(folder.string()) != std::string::npos &&
        bytes(entry.path() / "environ").find(variable) != std::string::npos) {
      return std::atoi(entry.path().filename().c_str());
    }
  }
  return 0;
}

const std::vector<std::string> kEndless{"--max-steps", "1000000", "--save-strategy", "no"};

/// Runs `command`. Its rank `rank` gets `signal` after training has begun.
ProgramRun run_with_fault(const TemporaryFolder& folder, const std::vector<std::string>& command,
                          int rank, int signal,
                          std::vector<std::pair<std::string, std::string>> environment = {}) {
  write_file_atomically(folder / "train.csv", small_reviews(40));
  environment.emplace_back("DIR", folder.path().string());
  bool sent = false;
  ProgramRun run =
      run_program(command, {.environment = std::move(environment),
                            .deadline = std::chrono::seconds(120),
                            .watch = [&](pid_t, const std::string& said) {
                              if (!sent && said.find("metrics.jsonl") != std::string::npos) {
                                const pid_t pid = pid_of_rank(folder.path(), rank);
                                sent = pid > 0 && ::kill(pid, signal) == 0;
                              }
                            }});
  EXPECT_TRUE(sent) << run.error;
  EXPECT_FALSE(run.timed_out) << run.error;
  return run;
}

std::vector<std::string> endless_training(const TemporaryFolder& folder,
                                          std::vector<std::string> more = {}) {
  more.insert(more.end(), kEndless.begin(), kEndless.end());
  auto words = train_arguments(folder.path(), more);
  const auto bin = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  words[0] = (bin / "hasten").string();
  return words;
}

} // namespace detail

TEST(FaultPrograms, AFrozenRankIsNamedOnceByTrain) {
  for (const int rank : {0, 1}) {
    const TemporaryFolder folder;
    const ProgramRun run = detail::run_with_fault(
        folder, detail::endless_training(folder, {"--nproc", "2", "--heartbeat-timeout", "1"}),
        rank, SIGSTOP);
    EXPECT_EQ(run.code, 1);
    EXPECT_EQ(run.times("error:"), 1u) << run.error;
    EXPECT_TRUE(run.said("error: rank " + std::to_string(rank) + " froze first: process "))
        << run.error;
  }
}

TEST(FaultPrograms, AFrozenRankIsNamedOnceByLaunch) {
  const TemporaryFolder folder;
  std::vector<std::string> command{"hasten", "launch", "--nproc", "2"};
  const auto training = detail::endless_training(folder);
  command.insert(command.end(), training.begin(), training.end());
  const ProgramRun run =
      detail::run_with_fault(folder, command, 0, SIGSTOP, {{"HASTEN_HEARTBEAT_TIMEOUT", "1"}});
  EXPECT_EQ(run.code, 1);
  EXPECT_EQ(run.times("error:"), 1u) << run.error;
  EXPECT_TRUE(run.said("error: rank 0 froze first: ")) << run.error;
}

TEST(FaultPrograms, AKilledRankZeroIsNamedOnceByTrain) {
  const TemporaryFolder folder;
  const ProgramRun run = detail::run_with_fault(
      folder, detail::endless_training(folder, {"--nproc", "2"}), 0, SIGKILL);
  EXPECT_EQ(run.code, 137);
  EXPECT_EQ(run.times("error:"), 1u) << run.error;
  EXPECT_TRUE(run.said("rank 0 was killed by signal 9")) << run.error;
}

// Three ranks without a launcher.
TEST(FaultPrograms, WithoutALauncherOneOfTheRanksThatAreLeftSaysTheCause) {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    const TemporaryFolder folder;
    auto command = detail::endless_training(folder);
    const std::vector<std::string> shell{
        "/bin/sh", "-c",
        "run() { n=$1; shift; RANK=$n WORLD_SIZE=3 HASTEN_STORE_FILE=$DIR/store "
        "HASTEN_HEARTBEAT_TIMEOUT=1 \"$@\"; }; "
        "run 0 \"$@\" & run 1 \"$@\" & one=$!; run 2 \"$@\" & two=$!; "
        "wait $one; echo $? > $DIR/code1; wait $two; echo $? > $DIR/code2; exit 0",
        "sh"};
    command.insert(command.begin(), shell.begin(), shell.end());
    const ProgramRun run = detail::run_with_fault(folder, command, 0, signal);
    EXPECT_EQ(read_file(folder / "code1"), "1\n");
    EXPECT_EQ(read_file(folder / "code2"), "1\n");
    EXPECT_EQ(run.times("error:"), 1u) << run.error;
    EXPECT_TRUE(run.said(signal == SIGKILL ? "rank 0 died" : "rank 0 has been stopped by a signal"))
        << run.error;
    const pid_t left = detail::pid_of_rank(folder.path(), 0);
    if (left > 0) { // frozen
      ::kill(left, SIGKILL);
    }
  }
}

TEST(FaultPrograms, TimeoutsOutsideTheirRangeAreRefused) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(8));
  for (const char* flag : {"--ddp-timeout", "--heartbeat-timeout"}) {
    for (const char* value : {"0", "-1", "0.09", "1.1e7", "nan", "1e300"}) {
      const ProgramRun run = run_program(train_arguments(folder.path(), {flag, value}));
      EXPECT_EQ(run.code, 2) << flag << " " << value;
      EXPECT_TRUE(run.said(flag)) << run.error;
    }
  }
  for (const char* name : {"HASTEN_DDP_TIMEOUT", "HASTEN_HEARTBEAT_TIMEOUT"}) {
    for (const char* value : {"0", "5 s", "1e8"}) {
      const ProgramRun run =
          run_program(train_arguments(folder.path()), {.environment = {{name, value}}});
      EXPECT_EQ(run.code, 2) << name << " " << value;
      EXPECT_TRUE(run.said(std::string(name) + "=")) << run.error;
    }
  }
}

} // namespace hasten
