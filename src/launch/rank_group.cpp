#include "rank_group.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <system_error>

#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "hasten/base/world.h"

namespace hasten::detail {

constexpr unsigned long kLaunchSignalTag = ~0UL;
// Time between two checks of ranks without a pidfd. Milliseconds.
constexpr int kLaunchPollMs = 10;

[[noreturn]] void throw_launch_error(const char* what) {
  throw Error("launch::launch", std::string(what) + ": " + std::generic_category().message(errno));
}

sigset_t launch_signals(const std::vector<int>& handled) {
  const auto ignored = [](int signal) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    return action.sa_handler == SIG_IGN;
  };
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : handled) {
    if (signal != SIGHUP || !ignored(SIGHUP)) { // nohup: the ranks outlive the terminal
      sigaddset(&set, signal);
    }
  }
  if (!ignored(SIGTSTP)) {
    sigaddset(&set, SIGTSTP);
  }
  return set;
}

/// The variables of one rank, with torchrun's names.
std::vector<std::pair<std::string, std::string>> rank_environment(const LaunchOptions& options,
                                                                  const LaunchWorld& world,
                                                                  int local_rank,
                                                                  const std::string& error_file) {
  const std::string rank = std::to_string(world.first_rank + local_rank);
  const std::string size = std::to_string(world.world_size);
  std::vector<std::pair<std::string, std::string>> environment = {
      {"RANK", rank},
      {"WORLD_SIZE", size},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"LOCAL_WORLD_SIZE", std::to_string(options.nproc)},
      {"GROUP_RANK", std::to_string(world.node)},
      {"GROUP_WORLD_SIZE", std::to_string(world.nodes)},
      {"ROLE_NAME", "default"},
      {"ROLE_RANK", rank},
      {"ROLE_WORLD_SIZE", size},
      {"MASTER_ADDR", world.master_addr},
      {"MASTER_PORT", std::to_string(world.master_port)},
      {"TORCHELASTIC_RUN_ID", world.rdzv_id},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
      {"TORCHELASTIC_MAX_RESTARTS", "0"},
      // Values of an outer world of one would be wrong here. An empty variable counts as not set.
      {"TORCHELASTIC_USE_AGENT_STORE", ""},
      {"TORCHELASTIC_ERROR_FILE", error_file},
      {"HASTEN_LAUNCHER", "1"}, // the launcher prints the errors that ranks record
      {"HASTEN_STORE_SOCKET",
       world.world_size > 1 ? launcher_socket_text(world.master_port, world.store) : ""},
      {"OMP_NUM_THREADS", std::to_string(threads_per_rank(options.nproc))}};
  environment.insert(environment.end(), options.environment.begin(), options.environment.end());
  return environment;
}

RankGroup::RankGroup(const LaunchOptions& options, const LaunchWorld& world, RankOutput& output) {
  const sigset_t signals = launch_signals(options.signals_to_handle);
  ::pthread_sigmask(SIG_BLOCK, &signals, &old_mask_);
  // If it is ignored, the kernel does not keep how children ended.
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &standard, &old_child_action_);
  try {
    epoll_fd_ = FileDescriptor(::epoll_create1(EPOLL_CLOEXEC));
    signal_fd_ = FileDescriptor(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!epoll_fd_ || !signal_fd_) {
      throw_launch_error("no descriptor to wait on");
    }
    watch(signal_fd_.get(), kLaunchSignalTag);
    start(options, world, output);
    output.start();
  } catch (...) {
    close_all();
    throw;
  }
}

RankGroup::~RankGroup() { close_all(); }

void RankGroup::close_all() noexcept {
  send(SIGKILL);
  for (Member& member : ranks_) {
    // Gives up on a process that no signal ends (for example because of a dead disk).
    for (int i = 0; !reap(member) && i < 500; ++i) {
      ::usleep(10'000);
    }
  }
  ::sigaction(SIGCHLD, &old_child_action_, nullptr);
  ::pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
}

void RankGroup::start(const LaunchOptions& options, const LaunchWorld& world, RankOutput& output) {
  const FileDescriptor nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  // A rank that reads the terminal from its own process group would be stopped.
  const bool has_input = ::isatty(STDIN_FILENO) == 0;
  for (int rank = 0; rank < options.nproc; ++rank) {
    SpawnOptions spawn;
    spawn.environment = rank_environment(options, world, rank, output.error_file(rank).string());
    spawn.stdin_fd = world.first_rank + rank == 0 && has_input ? -1 : nothing.get();
    spawn.stdout_fd = output.descriptor(rank, 1);
    spawn.stderr_fd = output.descriptor(rank, 2);
    Member& member = ranks_.emplace_back(spawn_process(options.argv, spawn));
    ++living_;
    // Reports the ends of ranks in their order, which waitpid does not. Old kernels and some
    // containers have no pidfd.
    member.pid_fd = FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, member.pid, 0)));
    if (member.pid_fd) {
      ::fcntl(member.pid_fd.get(), F_SETFD, FD_CLOEXEC);
      watch(member.pid_fd.get(), static_cast<unsigned long>(rank));
    }
  }
}

void RankGroup::watch(int fd, unsigned long tag) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = tag;
  if (::epoll_ctl(epoll_fd_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw_launch_error("a descriptor cannot be waited for");
  }
}

bool RankGroup::reap(Member& member) {
  if (member.ended) {
    return true;
  }
  // Do not reap it yet, so that its pid still names its own process group.
  siginfo_t info{};
  const auto id = static_cast<id_t>(member.pid);
  if (::waitid(P_PID, id, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) {
    return false;
  }
  ::kill(-member.pid, SIGKILL);
  int status = 0;
  while (::waitpid(member.pid, &status, 0) < 0 && errno == EINTR) {
  }
  member.end = process_end(status);
  member.ended = true;
  --living_;
  if (member.pid_fd) {
    // Closing it is not enough: a rank that was forked later and has not reached exec holds a copy,
    // and the event would be reported again.
    ::epoll_ctl(epoll_fd_.get(), EPOLL_CTL_DEL, member.pid_fd.get(), nullptr);
    member.pid_fd.close();
  }
  return true;
}

std::vector<RankEvent> RankGroup::wait(std::chrono::milliseconds timeout) {
  const bool must_ask = std::ranges::any_of(
      ranks_, [](const Member& member) { return !member.ended && !member.pid_fd; });
  int milliseconds = static_cast<int>(std::clamp<long long>(timeout.count(), 0, 3'600'000));
  milliseconds = must_ask ? std::min(milliseconds, kLaunchPollMs) : milliseconds;
  epoll_event ready[16];
  const int count = ::epoll_wait(epoll_fd_.get(), ready, 16, milliseconds);
  std::vector<RankEvent> events;
  for (int i = 0; i < count; ++i) { // in the order in which they became ready
    if (ready[i].data.u64 == kLaunchSignalTag) {
      signalfd_siginfo info{};
      while (::read(signal_fd_.get(), &info, sizeof info) == sizeof info) {
        events.push_back({.signal = static_cast<int>(info.ssi_signo)});
      }
    } else if (reap(ranks_[ready[i].data.u64])) {
      events.push_back({.rank = static_cast<int>(ready[i].data.u64)});
    }
  }
  for (int rank = 0; must_ask && rank < size(); ++rank) {
    Member& member = ranks_[static_cast<size_t>(rank)];
    if (!member.ended && !member.pid_fd && reap(member)) {
      events.push_back({.rank = rank});
    }
  }
  return events;
}

void RankGroup::kill_rank(int rank) {
  if (!ended(rank)) {
    ::kill(-pid(rank), SIGKILL);
  }
}

bool RankGroup::stopped(int rank) const {
  return !ended(rank) && process_state(pid(rank), 0) == ProcessState::stopped;
}

void RankGroup::send(int signal) {
  for (const Member& member : ranks_) {
    if (!member.ended) {
      ::kill(-member.pid, signal);
    }
  }
}

} // namespace hasten::detail
