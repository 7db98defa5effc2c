// Where the output of ranks goes, and which failure is reported as the first.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <set>
#include <sstream>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/world.h"
#include "hasten/launch/launch.h"
#include "support/captured_stderr.h"
#include "support/environment.h"
#include "support/temporary_folder.h"

namespace hasten {

using testing_support::CapturedStderr;
using testing_support::EnvironmentValues;
using testing_support::ScopedEnvironment;
using testing_support::TemporaryFolder;

struct LaunchedOutput {
  LaunchResult result{};
  std::string out{};
  std::string error{};
};

// Runs `script` on every rank and captures this process's own streams.
static LaunchedOutput launch_and_read(int nproc, const TemporaryFolder& folder,
                                      const std::string& script, const LogsSpecs& logs = {}) {
  LaunchOptions options;
  options.nproc = nproc;
  options.argv = {"sh", "-c", script};
  options.environment = {{"DIR", folder.path().string()}};
  options.settle = std::chrono::milliseconds(2000);
  options.grace = std::chrono::milliseconds(500);
  options.logs = logs;
  const auto file = folder / "console";
  const int saved = ::dup(1);
  const int console = ::open(file.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_APPEND, 0600);
  ::dup2(console, 1);
  LaunchedOutput output;
  {
    CapturedStderr captured;
    output.result = launch(options);
    output.error = captured.take();
  }
  ::dup2(saved, 1);
  ::close(saved);
  ::close(console);
  output.out = read_file(file);
  return output;
}

static int lines_that_start(const std::string& text, const std::string& start) {
  std::istringstream lines(text);
  int count = 0;
  for (std::string line; std::getline(lines, line);) {
    count += line.rfind(start, 0) == 0;
  }
  return count;
}

TEST(LaunchOutput, TeedLinesCarryTheirRankAndTheFilesDoNot) {
  const TemporaryFolder folder;
  LogsSpecs logs;
  logs.log_dir = folder / "logs";
  logs.tee = parse_rank_streams("3");
  const auto run = launch_and_read(2, folder, "echo one; echo oops >&2; printf 'no end'", logs);
  EXPECT_EQ(run.result.exit_code, 0);
  for (const char* rank : {"0", "1"}) {
    const std::string prefix = "[rank" + std::string(rank) + "]: ";
    EXPECT_EQ(lines_that_start(run.out, prefix + "one"), 1) << run.out;
    EXPECT_EQ(lines_that_start(run.out, prefix + "no end"), 1) << run.out;
    EXPECT_EQ(lines_that_start(run.error, prefix + "oops"), 1) << run.error;
    EXPECT_EQ(read_file(folder / "logs" / rank / "stdout.log"), "one\nno end");
    EXPECT_EQ(read_file(folder / "logs" / rank / "stderr.log"), "oops\n");
  }
  EXPECT_EQ(lines_that_start(run.out, ""), 4);
}

TEST(LaunchOutput, NoLineIsLostOrTornHoweverManyThereAre) {
  const TemporaryFolder folder;
  LogsSpecs logs;
  logs.tee = parse_rank_streams("1");
  logs.log_line_prefix_template = "<${role_name}$local_rank $$ $other ${rank> ";
  const auto run = launch_and_read(3, folder, "seq -f 'line %.0f of this rank' 1 20000", logs);
  for (const char* rank : {"0", "1", "2"}) {
    const std::string prefix = "<default" + std::string(rank) + " $ $other ${rank> line ";
    EXPECT_EQ(lines_that_start(run.out, prefix), 20000);
    EXPECT_EQ(lines_that_start(run.out, prefix + "20000 of this rank"), 1);
  }
  EXPECT_EQ(lines_that_start(run.out, ""), 60000);
}

TEST(LaunchOutput, RedirectedStreamsGoToTheirFilesAlone) {
  const TemporaryFolder folder;
  LogsSpecs logs;
  logs.log_dir = folder / "logs";
  logs.redirects = parse_rank_streams("1:3,0:2");
  const char* script = "echo out$RANK; echo err$RANK >&2";
  for (const char* twice : {"", "again"}) { // files are appended to
    const auto run = launch_and_read(2, folder, script, logs);
    EXPECT_EQ(run.out, "out0\n") << twice;
    EXPECT_EQ(run.error, "") << twice;
  }
  EXPECT_EQ(read_file(folder / "logs/0/stderr.log"), "err0\nerr0\n");
  EXPECT_EQ(read_file(folder / "logs/1/stdout.log"), "out1\nout1\n");
  EXPECT_EQ(read_file(folder / "logs/1/stderr.log"), "err1\nerr1\n");
  EXPECT_FALSE(std::filesystem::exists(folder / "logs/0/stdout.log"));
}

TEST(LaunchOutput, RanksOutsideTheFilterReachOnlyTheirFiles) {
  const TemporaryFolder folder;
  const char* script = "echo out$RANK; echo err$RANK >&2";
  LogsSpecs logs;
  logs.local_ranks_filter = {0, 2};
  auto run = launch_and_read(3, folder, script, logs);
  EXPECT_EQ(lines_that_start(run.out, ""), 2) << run.out;
  EXPECT_EQ(lines_that_start(run.out, "out0") + lines_that_start(run.out, "out2"), 2) << run.out;
  EXPECT_EQ(run.error.find("err1"), std::string::npos) << run.error;
  logs.log_dir = folder / "logs"; // tees everything
  run = launch_and_read(3, folder, script, logs);
  EXPECT_EQ(lines_that_start(run.out, ""), 2) << run.out;
  EXPECT_EQ(lines_that_start(run.out, "[rank1]: "), 0) << run.out;
  EXPECT_EQ(lines_that_start(run.error, "[rank2]: err2"), 1) << run.error;
  for (const char* rank : {"0", "1", "2"}) {
    EXPECT_EQ(read_file(folder / "logs" / rank / "stdout.log"), std::string("out") + rank + "\n");
    EXPECT_EQ(read_file(folder / "logs" / rank / "stderr.log"), std::string("err") + rank + "\n");
  }
}

TEST(LaunchOutput, AFolderAloneTeesEverything) {
  const TemporaryFolder folder;
  LogsSpecs logs;
  logs.log_dir = folder / "logs";
  const auto run = launch_and_read(1, folder, "echo one; echo two >&2", logs);
  EXPECT_EQ(run.out, "[rank0]: one\n");
  EXPECT_EQ(read_file(folder / "logs/0/stderr.log"), "two\n");
}

TEST(LaunchOutput, AProcessThatKeepsAPipeOpenDoesNotHoldUpTheLaunch) {
  const TemporaryFolder folder;
  LogsSpecs logs;
  logs.tee = parse_rank_streams("3");
  const auto start = std::chrono::steady_clock::now();
  const auto run = launch_and_read(1, folder,
                                   "setsid sh -c 'echo $$ > $DIR/pid; exec sleep 60' & "
                                   "while [ ! -s $DIR/pid ]; do sleep 0.01; done; printf last",
                                   logs);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  EXPECT_EQ(run.out, "[rank0]: last\n");
  ::kill(std::stoi(read_file(folder / "pid")), SIGKILL);
}

TEST(LaunchOutput, WhereNobodyReadsARankEndsAsItWouldWithoutUs) {
  const TemporaryFolder folder;
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  ::close(ends[0]);
  LaunchOptions options;
  options.nproc = 1;
  options.argv = {"sh", "-c", "exec yes"};
  options.logs.tee = parse_rank_streams("1");
  const int saved = ::dup(1);
  ::dup2(ends[1], 1);
  const auto result = launch(options);
  ::dup2(saved, 1);
  ::close(saved);
  ::close(ends[1]);
  EXPECT_EQ(result.exit_code, 128 + SIGPIPE);
}

// Records `message` with the time `microseconds` since 1970.
static const std::string kRecord =
    "record() { printf '{\"message\": {\"message\": \"%s\", \"extraInfo\": "
    "{\"timestamp\": \"1\", \"microseconds\": %s, \"of_a_peer\": %s}}}' "
    "\"$1\" $2 $3 > $TORCHELASTIC_ERROR_FILE; }; ";

TEST(LaunchCause, ARankThatEndsAfterThoseItTookDownIsStillTheFirst) {
  const TemporaryFolder folder;
  const auto run =
      launch_and_read(3, folder,
                      kRecord +
                          "if [ $RANK = 1 ]; then record 'no memory' $(date +%s%6N) false; "
                          "touch $DIR/failed; sleep 0.5; exit 3; fi; "
                          "while [ ! -e $DIR/failed ]; do sleep 0.01; done; "
                          "record 'rank 1 failed' $(date +%s%6N) true; exit 1");
  EXPECT_EQ(run.result.first_failed_rank, 1);
  EXPECT_EQ(run.result.exit_code, 3);
  EXPECT_EQ(run.result.reason, "rank 1 exited with code 3 first");
  EXPECT_EQ(run.result.message, "no memory");
  ASSERT_EQ(run.result.consequences.size(), 2u);
  EXPECT_EQ(run.result.consequences[0].substr(6), " exited with code 1");
  // A failure that follows from another is never reported as the first.
  EXPECT_EQ(run.error.find("exited"), std::string::npos) << run.error;
}

TEST(LaunchCause, APeersErrorIsNeverFirstWhereAnotherRankHasItsOwn) {
  const TemporaryFolder folder;
  const auto run =
      launch_and_read(2, folder,
                      kRecord +
                          "if [ $RANK = 1 ]; then record 'a clock behind' 5 true; exit 1; fi; "
                          "record own $(date +%s%6N) false; sleep 0.3; exit 4");
  EXPECT_EQ(run.result.first_failed_rank, 0);
  EXPECT_EQ(run.result.message, "own");
}

// The first ranks end before the last are started. Until exec these have copies of the launcher's
// descriptors.
TEST(LaunchCause, EachEndIsNamedOnce) {
  const TemporaryFolder folder;
  for (int time = 0; time < 5; ++time) {
    const auto run = launch_and_read(12, folder, "exit 3");
    std::set<std::string> named(run.result.consequences.begin(), run.result.consequences.end());
    EXPECT_EQ(named.size(), 11u);
    EXPECT_EQ(run.result.consequences.size(), 11u);
  }
}

TEST(LaunchCause, RanksThatTheLauncherEndedFollow) {
  const TemporaryFolder folder;
  const auto run = launch_and_read(2, folder, "[ $RANK = 0 ] && exit 3; exec sleep 60");
  EXPECT_EQ(run.result.first_failed_rank, 0);
  ASSERT_EQ(run.result.consequences.size(), 1u);
  EXPECT_EQ(run.result.consequences[0], "rank 1 was killed by signal 15 (Terminated)");
}

// Records "rank r/2 MESSAGE" of this rank, shown by it or not.
static const std::string kRecordOwn =
    "own() { printf '{\"message\": {\"message\": \"rank %s/2 %s\", \"extraInfo\": "
    "{\"timestamp\": \"1\", \"microseconds\": %s, \"shown\": %s}}}' "
    "$RANK \"$1\" $2 $3 > $TORCHELASTIC_ERROR_FILE; }; ";

TEST(LaunchCause, AnErrorInCommonIsShownIfOneRankPrintedItToTheConsole) {
  const TemporaryFolder folder;
  const std::string script =
      kRecordOwn + "[ $RANK = 0 ] && own '[f] no' 7 true || own '[f] no' 5 false; exit 2";
  const auto run = launch_and_read(2, folder, script);
  EXPECT_EQ(run.result.message, "rank 1/2 [f] no"); // the first by time
  EXPECT_TRUE(run.result.shown);
  EXPECT_EQ(run.result.consequences, std::vector<std::string>{"rank 0 exited with code 2"});
  EXPECT_FALSE(launch_and_read(2, folder, script, {.local_ranks_filter = {1}}).result.shown);
}

TEST(LaunchCause, AnErrorThatNobodyPrintedIsNeverLost) {
  const TemporaryFolder folder;
  const auto run = launch_and_read(
      2, folder, kRecordOwn + "[ $RANK = 0 ] && own '[f] a' 5 true || own '[f] b' 7 false; exit 2");
  EXPECT_FALSE(run.result.shown);
  EXPECT_EQ(run.result.message, "rank 0/2 [f] a");
  EXPECT_EQ(run.result.consequences,
            std::vector<std::string>{"rank 1 exited with code 2: rank 1/2 [f] b"});
  // The program may end well all the same.
  const auto good = launch_and_read(1, folder, kRecordOwn + "own '[f] a' 5 false; exit 0");
  EXPECT_EQ(good.result.exit_code, 0);
  EXPECT_EQ(good.error, "warning: rank 0 exited with code 0: rank 0/2 [f] a\n");
}

TEST(LaunchCause, TheEndOfARedirectedStderrIsShown) {
  const TemporaryFolder folder;
  LogsSpecs logs;
  logs.log_dir = folder / "logs";
  logs.redirects = parse_rank_streams("3");
  const auto run = launch_and_read(1, folder, "seq 1 100 >&2; echo 'no luck' >&2; exit 3", logs);
  const std::string& message = run.result.message;
  EXPECT_NE(message.find("logs/0/stderr.log"), std::string::npos) << message;
  EXPECT_NE(message.find("\n92\n"), std::string::npos) << message;
  EXPECT_EQ(message.find("\n91\n"), std::string::npos) << message;
  EXPECT_EQ(message.substr(message.size() - 7), "no luck");
}

TEST(LaunchCause, TheEndOfAFilteredStderrIsShown) {
  const TemporaryFolder folder;
  LogsSpecs logs;
  logs.local_ranks_filter = {0};
  const char* script = "[ $RANK = 0 ] && exec sleep 60; echo 'no luck' >&2; exit 3";
  EXPECT_EQ(launch_and_read(2, folder, script, logs).result.message, ""); // it has no file
  logs.log_dir = folder / "logs";
  const auto run = launch_and_read(2, folder, script, logs);
  EXPECT_EQ(run.result.first_failed_rank, 1);
  EXPECT_NE(run.result.message.find("logs/1/stderr.log:\nno luck"), std::string::npos)
      << run.result.message;
}

TEST(LaunchCause, ErrorFilesLeaveNothingBehind) {
  const TemporaryFolder folder;
  const ScopedEnvironment environment(EnvironmentValues{{"TMPDIR", (folder / "tmp").string()}});
  std::filesystem::create_directories(folder / "tmp");
  launch_and_read(
      2, folder,
      "echo $TORCHELASTIC_ERROR_FILE > $DIR/file$RANK; echo x > $TORCHELASTIC_ERROR_FILE");
  EXPECT_NE(read_file(folder / "file0"), read_file(folder / "file1"));
  EXPECT_EQ(read_file(folder / "file0").rfind((folder / "tmp").string(), 0), 0u);
  EXPECT_TRUE(std::filesystem::is_empty(folder / "tmp"));
}

TEST(LaunchCause, TheFolderOfAKilledLauncherGoesWithTheNextStart) {
  const TemporaryFolder folder;
  const auto tmp = folder / "tmp";
  const ScopedEnvironment environment(EnvironmentValues{{"TMPDIR", tmp.string()}});
  std::filesystem::create_directories(tmp);
  LaunchOptions options;
  options.nproc = 1;
  options.argv = {"sh", "-c",
                  "echo $PPID > $DIR/started.new; mv $DIR/started.new $DIR/started; "
                  "while kill -0 $PPID; do sleep 0.02; done"};
  options.environment = {{"DIR", folder.path().string()}};
  const pid_t launcher = ::fork();
  if (launcher == 0) {
    launch(options);
    ::_exit(0);
  }
  while (!std::filesystem::exists(folder / "started")) {
    ::usleep(5000);
  }
  const auto folders = [&] { return std::distance(std::filesystem::directory_iterator(tmp), {}); };
  options.argv = {"true"};
  launch(options);
  EXPECT_EQ(folders(), 1); // the folder of a launcher that is alive
  ::kill(launcher, SIGKILL);
  ::waitpid(launcher, nullptr, 0);
  EXPECT_EQ(folders(), 1);
  launch(options);
  EXPECT_EQ(folders(), 0);
}

TEST(LaunchThreads, OversubscriptionIsWarnedOfAndAFitIsNot) {
  const TemporaryFolder folder;
  {
    const ScopedEnvironment environment(
        EnvironmentValues{{"OMP_NUM_THREADS", std::to_string(1 << 12)}});
    const auto run = launch_and_read(1, folder, "exit 0");
    EXPECT_EQ(run.error, "warning: " + oversubscription(1, 1 << 12) + "\n");
  }
  const ScopedEnvironment environment(EnvironmentValues{{"OMP_NUM_THREADS", std::nullopt}});
  EXPECT_EQ(launch_and_read(1, folder, "exit 0").error, "");
}

TEST(LaunchOutput, LogsThatCannotBeAreRefused) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "file", "");
  LaunchOptions options;
  options.nproc = 2;
  options.argv = {"true"};
  options.logs.redirects = parse_rank_streams("3");
  EXPECT_THROW(launch(options), InputError); // without a folder
  options.logs.log_dir = folder / "file/logs";
  EXPECT_THROW(launch(options), InputError);
  options.logs.log_dir = folder / "logs";
  options.logs.tee = parse_rank_streams("2:1");
  EXPECT_THROW(launch(options), InputError); // of rank 2
  options.logs.tee = {};
  options.logs.local_ranks_filter = {0, 2};
  EXPECT_THROW(launch(options), InputError); // of rank 2
  for (const char* bad : {"", "4", "x", "0:4", "0:", ":1", "0:1,", "-1", "3,3"}) {
    EXPECT_THROW(parse_rank_streams(bad), InputError) << bad;
  }
}

} // namespace hasten
