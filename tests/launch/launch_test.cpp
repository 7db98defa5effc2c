#include "hasten/launch/launch.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <sstream>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/store_channel.h"
#include "hasten/base/world.h"
#include "support/captured_stderr.h"
#include "support/environment.h"
#include "support/temporary_folder.h"

namespace hasten {

using testing_support::CapturedStderr;
using testing_support::EnvironmentValues;
using testing_support::ScopedEnvironment;
using testing_support::TemporaryFolder;

// Every rank runs `script`, with the folder's path in $DIR.
static LaunchOptions shell_ranks(int nproc, const TemporaryFolder& folder,
                                 const std::string& script) {
  LaunchOptions options;
  options.nproc = nproc;
  options.argv = {"sh", "-c", script};
  options.environment = {{"DIR", folder.path().string()}};
  options.settle = std::chrono::milliseconds(500);
  options.grace = std::chrono::milliseconds(500);
  return options;
}

// Launches, and keeps the log out of the test's output.
static LaunchResult quiet_launch(const LaunchOptions& options) {
  const CapturedStderr captured;
  return launch(options);
}

static double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST(Launch, RanksGetTorchrunsVariables) {
  const ScopedEnvironment environment(EnvironmentValues{{"OMP_NUM_THREADS", std::nullopt}});
  const TemporaryFolder folder;
  const auto result =
      launch(shell_ranks(3, folder,
                         "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK "
                         "$GROUP_WORLD_SIZE $MASTER_ADDR $OMP_NUM_THREADS > $DIR/$RANK"));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.reason, "");
  EXPECT_EQ(result.ends.size(), 3u);
  for (const char* rank : {"0", "1", "2"}) {
    EXPECT_EQ(read_file(folder / rank), std::string(rank) + " 3 " + rank + " 3 0 1 127.0.0.1 " +
                                            std::to_string(threads_per_rank(3)) + "\n");
  }
}

TEST(Launch, ThreadsTheUserAskedForStay) {
  const ScopedEnvironment environment(EnvironmentValues{{"OMP_NUM_THREADS", "5"}});
  const TemporaryFolder folder;
  launch(shell_ranks(1, folder, "echo $OMP_NUM_THREADS > $DIR/threads"));
  EXPECT_EQ(read_file(folder / "threads"), "5\n");
}

TEST(Launch, RanksMeetAtASocketOfTheLaunchersAndThePortIsFree) {
  const TemporaryFolder folder;
  const auto result =
      launch(shell_ranks(2, folder,
                         "grep -c \"@$HASTEN_STORE_SOCKET\\$\" /proc/net/unix > $DIR/there$RANK; "
                         "echo $HASTEN_STORE_SOCKET $MASTER_PORT > $DIR/name$RANK; "
                         "awk -v p=$(printf ':%04X' $MASTER_PORT) "
                         "  '$4 == \"0A\" && $2 ~ p' /proc/net/tcp > $DIR/tcp$RANK"));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(read_file(folder / "there0"), "1\n");
  EXPECT_EQ(read_file(folder / "there1"), "1\n");
  EXPECT_EQ(read_file(folder / "name0"), read_file(folder / "name1"));
  EXPECT_EQ(read_file(folder / "tcp0"), "");
  std::istringstream name(read_file(folder / "name0"));
  std::string socket;
  World world;
  name >> socket >> world.master_port;
  // The socket is valid only for the world with that port, and only while the launcher runs.
  const ScopedEnvironment environment(EnvironmentValues{{"HASTEN_STORE_SOCKET", socket}});
  EXPECT_EQ(detail::launcher_store(world).value().socket, socket);
  EXPECT_FALSE(detail::try_connect({.socket = socket}));
  world.master_port += 1;
  EXPECT_FALSE(detail::launcher_store(world));
}

TEST(Launch, FirstFailingRankIsNamedAndTheOthersEnd) {
  const TemporaryFolder folder;
  const auto start = std::chrono::steady_clock::now();
  const auto result =
      quiet_launch(shell_ranks(3, folder, "if [ $RANK = 1 ]; then exit 3; fi; exec sleep 60"));
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.first_failed_rank, 1);
  EXPECT_EQ(result.reason, "rank 1 exited with code 3 first");
  EXPECT_EQ(result.ends[0].signal, SIGTERM);
  EXPECT_EQ(result.ends[2].signal, SIGTERM);
  EXPECT_LT(seconds_since(start), 20);
}

// Rank 1 fails immediately. The others end with 0 half a second later.
TEST(Launch, KeepGoingEndsWithRankZeroAlone) {
  const TemporaryFolder folder;
  auto options =
      shell_ranks(3, folder, "if [ $RANK = 1 ]; then exit 3; fi; sleep 1; touch $DIR/$RANK");
  options.keep_going = true;
  options.settle = options.grace = std::chrono::milliseconds(1);
  CapturedStderr captured;
  const auto result = launch(options);
  const std::string said = captured.take();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.reason, "");
  EXPECT_EQ(result.ends[1].code, 3);
  EXPECT_TRUE(std::filesystem::exists(folder / "2"));
  EXPECT_NE(said.find("rank 1 exited with code 3; the other ranks may continue"), std::string::npos)
      << said;

  options.argv.back() = "if [ $RANK = 0 ]; then exit 4; fi; exec sleep 60";
  const auto failed = launch(options);
  EXPECT_EQ(failed.exit_code, 4);
  EXPECT_EQ(failed.ends[2].signal, SIGTERM);
}

TEST(Launch, PeersOfAFailedRankHaveTimeToSayWhatTheySaw) {
  const TemporaryFolder folder;
  const auto result = quiet_launch(shell_ranks(
      2, folder, "if [ $RANK = 1 ]; then exit 3; fi; sleep 0.2; echo seen > $DIR/peer; exit 1"));
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.ends[0].code, 1);
  EXPECT_EQ(read_file(folder / "peer"), "seen\n");
}

TEST(Launch, KilledRankGives128PlusTheSignal) {
  const TemporaryFolder folder;
  const auto result =
      quiet_launch(shell_ranks(2, folder, "[ $RANK = 0 ] && kill -9 $$; exec sleep 60"));
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_EQ(result.reason, "rank 0 was killed by signal 9 (Killed) first");
}

TEST(Launch, StoppedRankEndsWhenAnotherFails) {
  const TemporaryFolder folder;
  const auto start = std::chrono::steady_clock::now();
  const auto result = quiet_launch(
      shell_ranks(2, folder,
                  "if [ $RANK = 0 ]; then echo $$ > $DIR/pid; kill -STOP $$; fi; "
                  "while ! grep -q stopped /proc/$(cat $DIR/pid)/status; do sleep 0.01; "
                  "done 2> $DIR/errors; exit 4"));
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_EQ(result.first_failed_rank, 1);
  EXPECT_EQ(result.ends[0].signal, SIGTERM);
  EXPECT_LT(seconds_since(start), 20);
}

TEST(Launch, RankThatIgnoresSigtermIsKilledAfterTheGracePeriod) {
  const TemporaryFolder folder;
  const auto result = quiet_launch(shell_ranks(
      2, folder, "trap '' TERM; if [ $RANK = 1 ]; then exit 5; fi; while :; do sleep 0.1; done"));
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_EQ(result.ends[0].signal, SIGKILL);
}

TEST(Launch, RankThatEndsWellDoesNotEndTheOthers) {
  const TemporaryFolder folder;
  const auto result = launch(shell_ranks(2, folder, "[ $RANK = 0 ] && exit 0; sleep 0.3; exit 0"));
  EXPECT_EQ(result.exit_code, 0);
}

TEST(Launch, NothingOfARanksGroupOutlivesIt) {
  const TemporaryFolder folder;
  launch(shell_ranks(1, folder, "sleep 300 & echo $! > $DIR/pid; exit 0"));
  const std::string pid = read_file(folder / "pid");
  const std::string stat = "/proc/" + pid.substr(0, pid.find('\n')) + "/stat";
  // The process has ended, or is a zombie until its new parent reaps it.
  std::string text;
  for (int i = 0; i < 200; ++i) {
    try {
      text = read_file(stat);
    } catch (const InputError&) {
      return;
    }
    if (text.find(") Z ") != std::string::npos) {
      return;
    }
    ::usleep(10'000);
  }
  FAIL() << text;
}

TEST(Launch, LinesOfRanksAreNotTorn) {
  const TemporaryFolder folder;
  const std::string line(300, 'x');
  LaunchOptions options =
      shell_ranks(3, folder, "i=0; while [ $i -lt 100 ]; do echo " + line + "; i=$((i+1)); done");
  const int saved = ::dup(1);
  const int file = ::open((folder / "out").c_str(), O_CREAT | O_WRONLY, 0600);
  ::dup2(file, 1);
  const auto result = launch(options);
  ::dup2(saved, 1);
  ::close(saved);
  ::close(file);
  EXPECT_EQ(result.exit_code, 0);
  std::istringstream lines(read_file(folder / "out"));
  int count = 0;
  for (std::string text; std::getline(lines, text); ++count) {
    EXPECT_EQ(text, line);
  }
  EXPECT_EQ(count, 300);
}

TEST(Launch, InputGoesToRankZeroAlone) {
  const TemporaryFolder folder;
  if (::fcntl(0, F_GETFD) < 0) { // otherwise the pipe would become the standard input
    ASSERT_EQ(::open("/dev/null", O_RDONLY), 0);
  }
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  ASSERT_EQ(::write(ends[1], "hello\n", 6), 6);
  ::close(ends[1]);
  const int saved = ::dup(0);
  ::dup2(ends[0], 0);
  ::close(ends[0]);
  launch(shell_ranks(2, folder, "cat > $DIR/in$RANK"));
  ::dup2(saved, 0);
  ::close(saved);
  EXPECT_EQ(read_file(folder / "in0"), "hello\n");
  EXPECT_EQ(read_file(folder / "in1"), "");
}

TEST(Launch, InsideALargerWorldItNamesBoth) {
  const ScopedEnvironment environment(
      {{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}});
  LaunchOptions options;
  options.nproc = 2;
  options.argv = {"true"};
  try {
    launch(options);
    FAIL();
  } catch (const InputError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("nproc=2"), std::string::npos) << text;
    EXPECT_NE(text.find("WORLD_SIZE=4"), std::string::npos) << text;
  }
}

TEST(Launch, WhatCannotBeStartedIsAnInputError) {
  LaunchOptions options;
  EXPECT_THROW(launch(options), InputError);
  options.argv = {"hasten-no-such-program"};
  EXPECT_THROW(launch(options), InputError);
  options.argv = {"true"};
  options.nproc = 0;
  EXPECT_THROW(launch(options), InputError);
  options.nproc = 1;
  options.max_restarts = 1;
  EXPECT_THROW(launch(options), InputError);
}

} // namespace hasten
