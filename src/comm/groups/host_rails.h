// Moves the tensors of a group that has several ranks on each of several hosts: inside a host through
// shared memory, between hosts through Gloo.
//
// Note [Rails]
// The ranks with the same index on their hosts have connections to each other: a rail. A collective is
// a sequence of steps, and a step has up to three parts: transfers of the host that leave each rank
// with a slice of the data ("down"), one operation of Gloo on that slice, and transfers of the host
// that put the slices together ("up"). So an all_reduce is a reduce_scatter, an all_reduce of each
// slice, and an all_gather. While Gloo has one step's slice, the host's ranks move the next one's.
// The order of a queue is the same on all ranks of a host, and the order of a rail's operations on all
// its ranks, whatever is fast and slow: the down queue and the rails have the order of the starts, and
// a step goes up when all before it have.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "group_core.h"
#include "shm/transfer_queue.h"

namespace hasten::detail {

/// The host of a rank, and its index there.
std::pair<int, int> place_in(const Hosts& hosts, int rank);

class HostRails : public std::enable_shared_from_this<HostRails> {
 public:
  using Rail = c10::intrusive_ptr<c10d::Backend>;

  /// `down` and `up`: queues of this rank's host, whose ranks are its indices. `rail`: its ranks are the
  /// hosts.
  HostRails(Hosts hosts, int rank, std::shared_ptr<TransferQueue> down,
            std::shared_ptr<TransferQueue> up, Rail rail);

  /// Where the ranks of the host start transfers in the order of their operations.
  const std::shared_ptr<TransferQueue>& queue() const { return down_; }

  /// Starts a collective on tensors of the CPU, which completes `state`. All ranks have compared it.
  /// `text`: what the ranks of a host compare each time.
  void start(const Collective& what, const std::string& text,
             const std::shared_ptr<GroupCore::Started>& state);
  /// From now on operations that have started end without anybody who waits.
  void progress_in_thread();
  /// Ends every operation that has not ended or starts later with an exception. Blocks until those of
  /// Gloo have ended.
  void stop() noexcept;

 private:
  struct Operation;
  struct Step;
  using Steps = std::vector<Step>;
  using Tensors = std::vector<at::Tensor>;

  Steps steps_of(const Collective& what) const;
  Steps reduction(const Collective& what) const;
  Steps broadcast(const Collective& what) const;
  Steps all_gather(const Collective& what) const;
  Step gather(const Collective& what) const;
  Step scatter(const Collective& what) const;
  Step all_to_all(const Collective& what) const;
  Steps reduce_scatter(const Collective& what) const;
  /// [index] The rows of the ranks of a host.
  Tensors rows_of_host(const at::Tensor& all, size_t host) const;
  /// The transfers of a step are over: its operation of Gloo begins.
  void cross(const std::shared_ptr<Step>& step, const std::exception_ptr& error);
  void crossed(const std::shared_ptr<Step>& step, const std::exception_ptr& error);
  void go_up(Step& step);

  const Hosts hosts_;
  const int world_size_;
  size_t host_ = 0; // set at construction
  size_t index_ = 0;
  const std::shared_ptr<TransferQueue> down_;
  const std::shared_ptr<TransferQueue> up_;

  std::mutex mutex_; // guards the members below
  Rail rail_;
  std::deque<std::shared_ptr<Step>> crossing_; // in the order of their starts
  bool going_up_ = false; // whether a thread moves steps up
  std::exception_ptr error_; // for all steps from now on
};

} // namespace hasten::detail
