// Decides when units of a FullyShard are unsharded, resharded and reduced, in one order on all
// ranks.
//
// Note [Order]
// Autograd runs the nodes of a graph in the reverse order of their creation. When a call's first
// output gets its gradient, all nodes created after the call have run, and none of the call or
// before it. Forward records the calls. A backward processes them from the last to the first, each
// in the same steps (advance): units entered later are complete and are reduced, others are
// resharded, the call's unit is unsharded, and the gather of the one before it is started. A call
// that this rank's loss does not use is processed together with the next one that it uses, or at
// the end, with zero gradients. So the messages are the same on every rank, whatever each rank's
// loss depends on. Gathers, reductions and sums over replicas have separate groups. They start in
// one order on all ranks, because groups of a GPU could otherwise wait for each other.
//
// A backward processes a forward's calls if it reaches any of them (if it reaches none, those of
// the latest forward). If a unit has earlier calls in a forward that no backward has reached, it
// is reduced at the end of the backward, because its gradient may still grow. Calls of processed
// forwards are kept as long as their graph lives, because it may have been retained.
//
// A recomputation (activation checkpointing) finds its unit unsharded, unless one region spans
// several units. The units before the last one are then unsharded for it and resharded.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "hasten/comm/communicator.h"
#include "shard_unit.h"

namespace hasten::detail {

struct ShardSettings {
  std::shared_ptr<Communicator> gathers{};
  std::shared_ptr<Communicator> reductions{};
  std::shared_ptr<Communicator> replicas{}; // null: none
  bool reshard_after_forward = true;
  bool sync_each_batch = true;
  int prefetch = 1;
};

class ShardSchedule : public std::enable_shared_from_this<ShardSchedule> {
 public:
  /// `units`: the root is last.
  ShardSchedule(std::vector<std::unique_ptr<ShardUnit>> units, ShardSettings settings);

  const std::vector<std::unique_ptr<ShardUnit>>& units() const { return units_; }

  // Forward.

  /// Begins a forward and returns its number.
  int64_t open_forward();
  /// Does nothing if forward `number` is already closed.
  void close_forward(int64_t number, bool failed);
  /// Neither in a forward nor in a backward.
  bool idle() const { return !open_ && !in_backward_; }
  /// Runs a call of a block, in a forward or a recomputation.
  std::vector<at::Tensor> call(size_t unit, std::vector<at::Tensor> inputs, const Forward& forward);
  void enter_recompute(size_t unit);
  void exit_recompute(size_t unit);

  // A sum.

  /// Call it between sums.
  void set_replicas(std::shared_ptr<Communicator> replicas) {
    settings_.replicas = std::move(replicas);
  }
  /// Waits for operations that a failed forward left in flight, and reshards all parameters.
  void settle();
  /// Only while a window is open, units stay unsharded for backward (see keeps()).
  void open_window() { window_ = true; }
  void close_window();
  /// Unshards, or reshards, all units until the next forward or backward.
  void unshard();
  void reshard();
  void open_backward(bool last);
  void close_backward();
  bool in_backward() const { return in_backward_; }
  bool is_last() const { return last_; }
  /// Waits for all reductions.
  void wait();
  void cancel() noexcept;
  void close() noexcept { settings_.gathers->close(); }
  /// Hash of the operations sent since the window began; equal on all ranks.
  uint64_t fingerprint() const { return fingerprint_; }

 private:
  struct Call {
    size_t unit = 0;
    int64_t forward = 0;
    int64_t entered = 0; // on clock_
    int64_t left = 0; // on clock_; identifies the call
    bool reached = false; // by this backward
    bool spent = false; // by an earlier backward
    std::weak_ptr<void> graph{};
  };
  // A call that has been entered and not left.
  struct Entered {
    size_t unit = 0;
    int64_t time = 0;
    bool was_whole = false;
  };

  size_t root() const { return units_.size() - 1; }
  void enter(size_t unit);
  void leave(const std::shared_ptr<void>& graph);
  void end_stay(std::optional<size_t> unless = {});
  void give_up(size_t entered);
  std::shared_ptr<void> watch(const std::vector<at::Tensor>& outputs, uint64_t first_node);
  void reach(int64_t left);
  void advance(Call& call);
  void reshard_others(const Call& call);
  void complete_after(int64_t time);
  void complete(size_t unit);
  void forget_dead_calls();
  bool touched(int64_t forward) const { return touched_.count(forward) > 0; }
  void note(char operation, size_t unit);
  void prefetch(size_t unit);
  void unshard(size_t unit);
  void end_reduction();
  bool keeps(size_t unit) const;

  // Set at construction.
  std::vector<std::unique_ptr<ShardUnit>> units_;
  ShardSettings settings_;

  int64_t clock_ = 0;
  uint64_t fingerprint_ = 0;
  bool window_ = false;

  // Forward.
  bool open_ = false;
  int64_t forward_ = 0; // its number
  std::vector<Entered> entered_{};
  std::vector<size_t> forward_entered_{}; // units entered in the current forward
  std::vector<size_t> last_entered_[2]{}; // the same for the previous forward; [with gradients]
  size_t next_entered_ = 0; // position of the current forward in last_entered_
  // The unit that was left last. It stays unsharded until another one is entered or left: backward
  // begins with the last one of a forward.
  std::optional<size_t> staying_{};
  std::vector<Call> calls_{}; // in the order in which they ended

  // Backward.
  bool in_backward_ = false;
  bool last_ = false;
  std::set<int64_t> touched_{}; // forwards
  std::vector<char> complete_{}; // [unit]
  std::vector<char> recomputing_{}; // [unit] unsharded only for a recomputation
  std::optional<size_t> reducing_{}; // the unit whose reduction is in flight
  std::vector<Work> replica_sums_{};
};

} // namespace hasten::detail
