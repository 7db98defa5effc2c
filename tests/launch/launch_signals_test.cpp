// Signals to the launcher, including those that stop or kill it.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/launch/launch.h"
#include "support/captured_stderr.h"
#include "support/temporary_folder.h"

namespace hasten {

using testing_support::TemporaryFolder;

// A launcher in a child process. The script reports that it is ready by `touch $DIR/ready$RANK`.
// The constructor waits for ranks 0 and 1.
class LauncherProcess {
 public:
  explicit LauncherProcess(const std::string& script, void (*prepare)() = nullptr, int nproc = 2,
                           const char* signals = "SIGINT,SIGTERM,SIGHUP") {
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(::open("/dev/null", O_WRONLY | O_CLOEXEC), STDERR_FILENO);
      if (prepare != nullptr) {
        prepare();
      }
      LaunchOptions options;
      options.nproc = nproc;
      options.argv = {"sh", "-c", script};
      options.signals_to_handle = parse_signals(signals);
      options.environment = {{"DIR", folder_.path().string()}};
      options.interrupt_grace = std::chrono::seconds(20);
      options.heartbeat_timeout = std::chrono::milliseconds(300);
      ::_exit(launch(options).exit_code);
    }
    for (const char* file : {"ready0", "ready1"}) {
      for (int i = 0; i < 1000 && !exists(file); ++i) {
        ::usleep(10'000);
      }
      EXPECT_TRUE(exists(file));
    }
  }
  LauncherProcess(const LauncherProcess&) = delete;
  LauncherProcess& operator=(const LauncherProcess&) = delete;

  bool exists(const char* file) const { return std::filesystem::exists(folder_ / file); }
  std::string read(const char* file) const { return read_file(folder_ / file); }
  void send(int signal) const { ::kill(pid_, signal); }
  void touch(const char* file) const { write_file_atomically(folder_ / file, ""); }
  void wait_until_stopped() const {
    int status = 0;
    EXPECT_EQ(::waitpid(pid_, &status, WUNTRACED), pid_);
    EXPECT_TRUE(WIFSTOPPED(status));
  }
  ProcessEnd wait() const {
    int status = 0;
    EXPECT_EQ(::waitpid(pid_, &status, 0), pid_);
    return process_end(status);
  }

 private:
  TemporaryFolder folder_;
  pid_t pid_ = -1;
};

static std::string trap_script(const char* signal) {
  return std::string("trap 'touch $DIR/got$RANK; exit 0' ") + signal +
         "; touch $DIR/ready$RANK; while :; do sleep 0.02; done";
}

TEST(LaunchSignals, OneSignalReachesEveryRankAndDecidesTheExitCode) {
  const std::pair<int, const char*> signals[] = {
      {SIGINT, "INT"}, {SIGTERM, "TERM"}, {SIGHUP, "HUP"}};
  for (const auto& [signal, name] : signals) {
    // The tests may run under nohup, or in the background.
    const LauncherProcess launcher(trap_script(name), [] {
      std::signal(SIGHUP, SIG_DFL);
      std::signal(SIGINT, SIG_DFL);
    });
    launcher.send(signal);
    EXPECT_EQ(launcher.wait().code, 128 + signal);
    EXPECT_TRUE(launcher.exists("got0"));
    EXPECT_TRUE(launcher.exists("got1"));
  }
}

TEST(LaunchSignals, RanksThatDoNotEndAreNamedInOneLine) {
  LaunchOptions options;
  options.nproc = 12;
  options.argv = {"sh", "-c",
                  "[ $RANK = 11 ] && exit 3; trap '' TERM; while :; do sleep 0.05; done"};
  options.settle = options.grace = std::chrono::milliseconds(300);
  testing_support::CapturedStderr error;
  EXPECT_EQ(launch(options).exit_code, 3);
  const std::string said = error.take();
  EXPECT_NE(
      said.find(
          "warning: ranks 0, 1, 2, 3, 4, 5, 6, 7, and 3 more did not end and must be killed\n"),
      std::string::npos)
      << said;
  EXPECT_EQ(said.find("did not end"), said.rfind("did not end")) << said;
}

// Skipped where this process may not make a control group for memory.
TEST(LaunchSignals, ARankThatTheKernelKillsForWantOfMemoryIsNamedSo) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the launcher takes more memory than the group has";
#endif
  const std::string name = "hasten-test-" + std::to_string(::getpid());
  const std::filesystem::path group = "/sys/fs/cgroup/memory/" + name;
  std::error_code error;
  if (!std::filesystem::create_directory(group, error)) {
    GTEST_SKIP() << "no control group: " << error.message();
  }
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(::open("/dev/null", O_WRONLY | O_CLOEXEC), STDERR_FILENO);
    std::ofstream(group / "memory.limit_in_bytes") << 100'000'000;
    std::ofstream(group / "cgroup.procs") << ::getpid();
    LaunchOptions options;
    options.nproc = 2;
    options.argv = {"sh", "-c", "[ $RANK = 1 ] && exec tail /dev/zero; sleep 30"};
    options.settle = std::chrono::milliseconds(100);
    const std::string message = launch(options).message;
    const ssize_t written = ::write(ends[1], message.data(), message.size());
    ::_exit(written > 0 ? 0 : 1);
  }
  ::close(ends[1]);
  char text[1000]{};
  EXPECT_GT(::read(ends[0], text, sizeof text - 1), 0);
  ::close(ends[0]);
  ::waitpid(child, nullptr, 0);
  EXPECT_NE(std::string(text).find("(memory.max) ran out of memory"), std::string::npos) << text;
  std::filesystem::remove(group, error);
}

TEST(LaunchSignals, OnlyTheSignalsToHandleArePassedOn) {
  const char* signals = "SIGUSR1,SIGINT";
  {
    const LauncherProcess launcher(trap_script("USR1"), nullptr, 2, signals);
    launcher.send(SIGUSR1);
    EXPECT_EQ(launcher.wait().code, 128 + SIGUSR1);
    EXPECT_TRUE(launcher.exists("got0"));
    EXPECT_TRUE(launcher.exists("got1"));
  }
  const LauncherProcess launcher(
      trap_script("TERM"), [] { std::signal(SIGTERM, SIG_DFL); }, 2, signals);
  launcher.send(SIGTERM);
  EXPECT_EQ(launcher.wait().signal, SIGTERM); // the signal also ended the launcher
  EXPECT_FALSE(launcher.exists("got0"));
  EXPECT_FALSE(launcher.exists("got1"));
}

TEST(LaunchSignals, NamesAreThoseOfSignalsThatALauncherCanTake) {
  EXPECT_EQ(LaunchOptions{}.signals_to_handle, parse_signals("SIGINT,SIGTERM,SIGHUP"));
  EXPECT_EQ(signal_names({SIGUSR1, SIGQUIT}), "SIGUSR1,SIGQUIT");
  EXPECT_EQ(parse_signals(""), std::vector<int>{});
  for (const char* bad : {"TERM", "sigterm", "SIGTERM,", "15", "SIGKILL", "SIGSTOP", "SIGTSTP",
                          "SIGCONT", "SIGCHLD", "SIGNONE"}) {
    EXPECT_THROW(parse_signals(bad), InputError) << bad;
  }
  LaunchOptions options;
  options.argv = {"true"};
  options.signals_to_handle = {SIGTERM, SIGKILL};
  EXPECT_THROW(launch(options), InputError);
  options.signals_to_handle = {0};
  EXPECT_THROW(launch(options), InputError);
}

TEST(LaunchSignals, HangupsThatAreIgnoredStayIgnored) {
  const LauncherProcess launcher("touch $DIR/ready$RANK; sleep 0.5; touch $DIR/end$RANK",
                                 [] { std::signal(SIGHUP, SIG_IGN); });
  launcher.send(SIGHUP);
  EXPECT_EQ(launcher.wait().code, 0);
  EXPECT_TRUE(launcher.exists("end0"));
}

TEST(LaunchSignals, SecondSignalEndsRanksThatDoNotListen) {
  const auto start = std::chrono::steady_clock::now();
  const LauncherProcess launcher(
      "trap '' INT; touch $DIR/ready$RANK; while :; do sleep 0.05; done");
  launcher.send(SIGINT);
  ::usleep(200'000);
  launcher.send(SIGINT);
  EXPECT_EQ(launcher.wait().code, 128 + SIGINT);
  // Without the second signal it takes the grace of 20 s.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
}

TEST(LaunchSignals, PausedLauncherPausesItsRanksUntilItGoesOn) {
  const LauncherProcess launcher(
      "echo $$ > $DIR/pid$RANK; touch $DIR/ready$RANK; "
      "while [ ! -e $DIR/go ]; do :; done; exit 0",
      [] { std::signal(SIGTSTP, SIG_DFL); });
  launcher.send(SIGTSTP);
  launcher.wait_until_stopped();
  for (const char* file : {"pid0", "pid1"}) {
    const std::string rank = std::to_string(std::stoi(launcher.read(file)));
    bool stopped = false;
    for (int i = 0; i < 200 && !stopped; ++i) {
      stopped = read_file("/proc/" + rank + "/stat").find(") T ") != std::string::npos;
      ::usleep(10'000);
    }
    EXPECT_TRUE(stopped) << file;
  }
  ::usleep(1'000'000); // longer than the heartbeat limit: a pause is not a failure
  launcher.touch("go");
  launcher.send(SIGCONT);
  EXPECT_EQ(launcher.wait().code, 0);
}

TEST(LaunchSignals, FirstFailureIsFoundAlsoWhenTheLauncherLooksLate) {
  const long pid_fd = ::syscall(SYS_pidfd_open, ::getpid(), 0);
  if (pid_fd < 0) {
    GTEST_SKIP() << "this kernel or container has no pidfd_open";
  }
  ::close(static_cast<int>(pid_fd));
  // Rank 2 fails, then rank 0, while the launcher is stopped; rank 1 continues it.
  // They wait half a second, so that the launcher already monitors all three.
  const LauncherProcess launcher(
      "touch $DIR/ready$RANK; stopped() { grep -q stopped /proc/$PPID/status; }; case $RANK in "
      "2) sleep 0.5; kill -STOP $PPID; while ! stopped; do sleep 0.01; done; exit 12;; "
      "0) while ! stopped; do sleep 0.01; done; sleep 0.3; exit 10;; "
      "1) while ! stopped; do sleep 0.01; done; sleep 0.8; kill -CONT $PPID;; esac",
      nullptr, 3);
  EXPECT_EQ(launcher.wait().code, 12);
}

TEST(LaunchSignals, RanksDieWithAKilledLauncher) {
  // This process becomes the parent of orphans, so that it can wait for them.
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
  const LauncherProcess launcher("echo $$ > $DIR/pid$RANK; touch $DIR/ready$RANK; exec sleep 300");
  launcher.send(SIGKILL);
  EXPECT_EQ(launcher.wait().signal, SIGKILL);
  for (const char* file : {"pid0", "pid1"}) {
    const pid_t pid = std::stoi(launcher.read(file));
    int status = 0;
    EXPECT_EQ(::waitpid(pid, &status, 0), pid);
    EXPECT_EQ(process_end(status).signal, SIGKILL);
  }
  while (::waitpid(-1, nullptr, 0) > 0) { // what else the launcher had started ends, too
  }
  ::prctl(PR_SET_CHILD_SUBREAPER, 0);
}

} // namespace hasten
