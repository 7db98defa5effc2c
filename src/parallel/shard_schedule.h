// When units of a FullyShard are gathered, let go and reduced, in one order on all
// ranks.
//
// Note [Order]
// Autograd runs the nodes of a graph in the reverse order of their making. So while a
// call's first output gets its gradient, all that was made after the call has run, and
// nothing of the call or before it. Calls are written down as forward makes them, and a
// backward goes through them from the last to the first, each by the same few steps
// (advance): what was entered later is complete and reduced, others are let go, the
// call's unit is gathered, the one before it is asked for. A call that this rank's loss
// does not reach is gone through with the next that it does, or at the end, with zeros:
// the messages are the same on every rank, whatever each rank's loss depends on.
// Gathers and reductions go over groups of their own, so only the order of each counts.
//
// A forward's calls are gone through if the backward reaches any of them (the latest
// forward's, if it reaches none). A unit whose earlier calls belong to a forward that
// no backward has reached yet is reduced at the backward's end: its gradient may still
// grow. Calls whose forward a backward has been through are kept while their graph
// lives: it may have been retained.
//
// A recomputation (activation checkpointing) finds its unit whole, except where one
// region spans several units: those before the last are gathered for it and let go.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "hasten/comm/communicator.h"
#include "shard_unit.h"

namespace hasten::detail {

struct ShardSettings {
  std::shared_ptr<Communicator> gathers{};
  std::shared_ptr<Communicator> reductions{};
  std::shared_ptr<Communicator> replicas{}; // null: none
  bool reshard_after_forward = true;
  bool reduce_each = true;
  int prefetch = 1;
};

class ShardSchedule : public std::enable_shared_from_this<ShardSchedule> {
 public:
  /// The root is last.
  ShardSchedule(std::vector<std::unique_ptr<ShardUnit>> units, ShardSettings settings);

  std::vector<std::unique_ptr<ShardUnit>>& units() { return units_; }
  const std::vector<std::unique_ptr<ShardUnit>>& units() const { return units_; }

  // Forward.

  /// The number of the forward that began.
  int64_t open_forward();
  /// Nothing where forward `number` is closed already.
  void close_forward(int64_t number, bool failed);
  bool forward_is_open() const { return open_; }
  int64_t forward() const { return forward_; }
  /// A call of a block, forward or in a recomputation.
  std::vector<at::Tensor> call(size_t unit, std::vector<at::Tensor> inputs, const Forward& forward);
  void enter_recompute(size_t unit);
  void exit_recompute(size_t unit);

  // A sum.

  /// Between sums.
  void set_replicas(std::shared_ptr<Communicator> replicas) {
    settings_.replicas = std::move(replicas);
  }
  /// Waits for what a forward that failed left under way; every parameter is a shard.
  void settle();
  /// While a window is open, what is to be kept whole for backward is.
  void open_window() { window_ = true; }
  void close_window();
  /// Parameters are shards, until the next forward.
  void let_all_go();
  void open_backward(bool last);
  void close_backward();
  bool in_backward() const { return in_backward_; }
  bool is_last() const { return last_; }
  /// Ends all reductions.
  void wait();
  void cancel() noexcept;
  void close() noexcept { settings_.gathers->close(); }
  /// Of what was sent since the window began: equal on all ranks.
  uint64_t fingerprint() const { return fingerprint_; }

 private:
  struct Call {
    int64_t id = 0;
    size_t unit = 0;
    int64_t forward = 0;
    int64_t entered = 0; // times of one clock
    int64_t left = 0;
    bool reached = false; // by this backward
    bool spent = false; // by one before
    std::weak_ptr<void> graph{};
  };
  // An entered call.
  struct Entered {
    size_t unit = 0;
    int64_t time = 0;
    bool was_whole = false;
  };

  size_t root() const { return units_.size() - 1; }
  void enter(size_t unit);
  void leave(const std::shared_ptr<void>& graph);
  void give_up(size_t entered);
  std::shared_ptr<void> watch(const std::vector<at::Tensor>& outputs, uint64_t first_node);
  void reach(int64_t id);
  void advance(Call& call);
  void let_others_go(const Call& call);
  void complete_after(int64_t time);
  void complete(size_t unit);
  void forget_dead_calls();
  bool touched(int64_t forward) const { return touched_.count(forward) > 0; }
  void note(char operation, size_t unit);
  void gather_ahead(size_t unit);
  void gather(size_t unit);
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
  std::vector<size_t> forward_entered_{}; // units, by the forward under way
  std::vector<size_t> last_entered_[2]{}; // the same of the one before; [with gradients]
  size_t next_entered_ = 0; // where the forward is in last_entered_
  std::vector<Call> calls_{}; // in the order in which they ended

  // Backward.
  bool in_backward_ = false;
  bool last_ = false;
  std::set<int64_t> touched_{}; // forwards
  std::vector<char> complete_{}; // [unit]
  std::vector<char> recomputing_{}; // [unit] gathered for it alone
  std::optional<size_t> reducing_{}; // the unit whose reduction is under way
  std::vector<Work> replica_sums_{};
};

} // namespace hasten::detail
