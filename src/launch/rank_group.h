// The processes of a launch: starts, monitors and ends them. Internal to launch.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <vector>

#include "hasten/launch/launch.h"
#include "node_plan.h"
#include "rank_output.h"

namespace hasten::detail {

/// An event: the end of a rank, or a signal to this process.
struct RankEvent {
  int rank = -1; // -1: a signal
  int signal = 0;
};

/// The ranks of this host, numbered from 0. The constructor starts all. The destructor kills those that
/// are left. While it lives, the signals to forward are blocked in this thread.
class RankGroup {
 public:
  RankGroup(const LaunchOptions& options, const LaunchWorld& world, RankOutput& output);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  /// Returns events in the order in which they happened; empty after `timeout`.
  std::vector<RankEvent> wait(std::chrono::milliseconds timeout);
  /// Sends a signal to the process group of every rank that has not ended.
  void send(int signal);
  void kill_rank(int rank);
  /// True if a signal has stopped the rank.
  bool stopped(int rank) const;
  int pid(int rank) const { return ranks_[static_cast<size_t>(rank)].pid; }
  bool all_ended() const { return living_ == 0; }
  bool ended(int rank) const { return ranks_[static_cast<size_t>(rank)].ended; }
  const ProcessEnd& end(int rank) const { return ranks_[static_cast<size_t>(rank)].end; }
  int size() const { return static_cast<int>(ranks_.size()); }

 private:
  struct Member {
    pid_t pid = -1;
    FileDescriptor pid_fd{}; // none: the kernel has none; poll with waitpid
    bool ended = false;
    ProcessEnd end{};
  };

  void start(const LaunchOptions& options, const LaunchWorld& world, RankOutput& output);
  void watch(int fd, unsigned long tag);
  /// Reaps the rank if it has ended, and kills the rest of its process group.
  bool reap(Member& member);
  void close_all() noexcept;

  std::vector<Member> ranks_;
  int living_ = 0;
  FileDescriptor epoll_fd_{};
  FileDescriptor signal_fd_{};
  sigset_t old_mask_{};
  struct sigaction old_child_action_ {};
};

} // namespace hasten::detail
