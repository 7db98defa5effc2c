#include "hasten/base/process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <set>
#include <thread>

#include "hasten/base/error.h"
#include "support/environment.h"

namespace hasten {

static ProcessEnd wait_for_child(pid_t pid) {
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  return process_end(status);
}

// The output of `sh -c script`.
static std::string shell_output(const std::string& script, SpawnOptions options = {}) {
  int ends[2];
  EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  options.stdout_fd = ends[1];
  const pid_t pid = spawn_process({"sh", "-c", script}, options);
  ::close(ends[1]);
  std::string text;
  char block[1024];
  for (ssize_t got; (got = ::read(ends[0], block, sizeof block)) > 0;) {
    text.append(block, static_cast<size_t>(got));
  }
  ::close(ends[0]);
  EXPECT_EQ(wait_for_child(pid).code, 0);
  return text;
}

static std::set<int> open_descriptors() {
  std::set<int> fds;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    fds.insert(std::stoi(entry.path().filename().string()));
  }
  return fds;
}

TEST(Process, ChildGetsArgumentsEnvironmentAndItsOwnGroup) {
  const testing_support::ScopedEnvironment environment(
      {{"HASTEN_TEST_A", "old"}, {"HASTEN_TEST_B", "kept"}});
  SpawnOptions options;
  options.environment = {
      {"HASTEN_TEST_A", "first"}, {"HASTEN_TEST_A", "n e w"}, {"HASTEN_TEST_C", "1"}};
  EXPECT_EQ(shell_output("echo \"$HASTEN_TEST_A,$HASTEN_TEST_B,$HASTEN_TEST_C\"", options),
            "n e w,kept,1\n");
  // Field 5 of stat is the process group.
  const std::string own = "set -- $(cat /proc/$$/stat); echo $(($5 == $$))";
  EXPECT_EQ(shell_output(own), "1\n");
  options.new_process_group = false;
  EXPECT_EQ(shell_output(own, options), "0\n");
}

TEST(Process, ChildKeepsOnlyTheDescriptorsItIsGiven) {
  // Not close-on-exec: the library must close it.
  const int kept = ::open("/dev/null", O_RDONLY);
  const int lost = ::open("/dev/null", O_RDONLY);
  SpawnOptions options;
  options.keep_fds = {kept};
  const auto seen = [&](int fd) {
    return shell_output("test -e /proc/$$/fd/" + std::to_string(fd) + " && echo yes || echo no",
                        options);
  };
  EXPECT_EQ(seen(kept), "yes\n");
  EXPECT_EQ(seen(lost), "no\n");
  ::close(kept);
  ::close(lost);
}

TEST(Process, StandardDescriptorsMayBeExchanged) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  SpawnOptions options;
  options.stderr_fd = ends[1];
  options.stdout_fd = 2; // the child's stdout is stderr of this process
  const pid_t pid = spawn_process({"sh", "-c", "printf e >&2"}, options);
  ::close(ends[1]);
  char byte = 0;
  EXPECT_EQ(::read(ends[0], &byte, 1), 1);
  EXPECT_EQ(byte, 'e');
  ::close(ends[0]);
  EXPECT_EQ(wait_for_child(pid).code, 0);
}

TEST(Process, FailuresToStartAreErrorsAndLeaveNothingBehind) {
  const auto before = open_descriptors();
  EXPECT_THROW(spawn_process({}), InputError);
  EXPECT_THROW(spawn_process({"hasten-no-such-program"}), InputError);
  EXPECT_THROW(spawn_process({"/etc/hostname"}), InputError);
  SpawnOptions options;
  options.keep_fds = {12345};
  EXPECT_THROW(spawn_process({"true"}, options), Error);
  EXPECT_EQ(open_descriptors(), before);
  errno = 0;
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(Process, ChildStartsWithUnblockedDefaultSignals) {
  sigset_t set;
  sigset_t before;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  ASSERT_EQ(::pthread_sigmask(SIG_BLOCK, &set, &before), 0);
  const auto old = std::signal(SIGTERM, [](int) {});
  const pid_t pid = spawn_process({"sleep", "60"});
  ::kill(pid, SIGTERM);
  const ProcessEnd end = wait_for_child(pid);
  std::signal(SIGTERM, old);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  EXPECT_EQ(end.signal, SIGTERM);
  EXPECT_EQ(end.code, 128 + SIGTERM);
}

TEST(Process, EndsAreDescribedInWords) {
  EXPECT_EQ(describe(wait_for_child(spawn_process({"sh", "-c", "exit 3"}))), "exited with code 3");
  EXPECT_EQ(describe(wait_for_child(spawn_process({"sh", "-c", "kill -9 $$"}))),
            "was killed by signal 9 (Killed)");
  EXPECT_EQ(describe({.code = 153, .signal = SIGXFSZ}),
            "was killed by signal 25 (File size limit exceeded; raise ulimit -f)");
}

TEST(Process, OneThatHasEndedOrWasKilledIsEnding) {
  EXPECT_FALSE(is_ending(::getpid()));
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
  }
  EXPECT_FALSE(is_ending(child));
  ::kill(child, SIGKILL);
  EXPECT_TRUE(is_ending(child)); // whether or not it has ended
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(is_ending(child));
}

TEST(Process, ChildDiesWithItsParent) {
  // This process becomes the parent of orphans, so that it sees their end.
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const pid_t parent = ::fork();
  if (parent == 0) {
    const pid_t child = spawn_process({"sleep", "60"});
    [[maybe_unused]] const auto n = ::write(ends[1], &child, sizeof child);
    ::pause();
    ::_exit(0);
  }
  pid_t child = 0;
  ASSERT_EQ(::read(ends[0], &child, sizeof child), ssize_t{sizeof child});
  ::kill(parent, SIGKILL);
  EXPECT_EQ(wait_for_child(parent).signal, SIGKILL);
  EXPECT_EQ(wait_for_child(child).signal, SIGKILL);
  ::prctl(PR_SET_CHILD_SUBREAPER, 0);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(Process, LoopbackSocketListens) {
  const auto [fd, port] = listen_on_loopback();
  EXPECT_GT(port, 0);
  EXPECT_EQ(::fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  ::close(fd);
}

TEST(Process, CountsTheBytesThatItsConnectionsHaveSent) {
  const auto [listener, port] = listen_on_loopback();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  const int sender = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(::connect(sender, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  const int receiver = ::accept(listener, nullptr, nullptr);
  const int64_t before = tcp_bytes_sent();
  const std::string data(1000, 'x');
  ASSERT_EQ(::write(sender, data.data(), data.size()), 1000);
  EXPECT_EQ(tcp_bytes_sent() - before, 1000);
  ASSERT_EQ(::write(receiver, data.data(), 10), 10);
  EXPECT_EQ(tcp_bytes_sent() - before, 1010);
  for (const int fd : {sender, receiver, listener}) {
    ::close(fd);
  }
}

TEST(ProcessDeathTest, FirstInterruptIsRememberedTheSecondEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        install_interrupt_handlers();
        throw_if_interrupted();
        ::raise(SIGINT);
        if (interrupt_signal() != SIGINT) {
          ::_exit(1);
        }
        try {
          throw_if_interrupted();
          ::_exit(2);
        } catch (const Interrupted& interrupted) {
          if (interrupted.signal() != SIGINT) {
            ::_exit(3);
          }
        }
        ::raise(SIGTERM); // SIGTERM after SIGINT is remembered, too
        if (interrupt_signal() != SIGTERM) {
          ::_exit(4);
        }
        ::raise(SIGTERM);
        ::_exit(5);
      },
      testing::ExitedWithCode(128 + SIGTERM), "");
}

TEST(Process, AShellReadsAQuotedWordBack) {
  for (const std::string word : {"plain/word-1.0", "two words", "", "it's", "$HOME", "'", "a\nb"}) {
    EXPECT_EQ(shell_output("printf %s " + shell_quoted(word)), word);
  }
  EXPECT_EQ(shell_quoted("--lr=5e-5"), "--lr=5e-5");
}

} // namespace hasten
