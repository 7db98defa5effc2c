#include "shard_schedule.h"

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>

#include "hasten/base/error.h"
#include "hasten/core/recompute.h"

namespace hasten::detail {

ShardSchedule::ShardSchedule(std::vector<std::unique_ptr<ShardUnit>> units, ShardSettings settings)
    : units_(std::move(units)),
      settings_(std::move(settings)),
      complete_(units_.size(), 0),
      recomputing_(units_.size(), 0) {}

void ShardSchedule::note(char operation, size_t unit) {
  fingerprint_ =
      (fingerprint_ ^ (unit * 4 + static_cast<unsigned char>(operation))) * 0x100000001b3ull;
}

void ShardSchedule::prefetch(size_t unit) {
  if (units_[unit]->state() == ShardUnit::State::sharded) {
    note('g', unit);
    units_[unit]->unshard(*settings_.gathers);
  }
}

void ShardSchedule::unshard(size_t unit) {
  prefetch(unit);
  units_[unit]->wait_for_unshard();
}

// True if the unit stays unsharded from forward to backward. Only in a window, whose end reshards
// all units, so that no optimizer sees an unsharded parameter.
bool ShardSchedule::keeps(size_t unit) const {
  return window_ && (unit == root() || !settings_.reshard_after_forward);
}

// Forward.

int64_t ShardSchedule::open_forward() {
  if (open_) {
    throw InputError("parallel::FullyShard", "a forward scope is already open", "one at a time",
                     "destroy it before the next one");
  }
  forget_dead_calls();
  open_ = true;
  ++forward_;
  forward_entered_.clear();
  next_entered_ = 0;
  enter(root());
  return forward_;
}

void ShardSchedule::close_forward(int64_t number, bool failed) {
  if (!open_ || number != forward_) {
    return;
  }
  if (failed) {
    open_ = false;
    end_stay();
    give_up(0);
    std::erase_if(calls_, [&](const Call& call) { return call.forward == forward_; });
    return;
  }
  // The root is not recorded for backward, because it is unsharded from its beginning to its end.
  leave(nullptr);
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit]->state() == ShardUnit::State::unsharding) {
      units_[unit]->wait_for_unshard(); // a prefetch of a unit that was not called
      units_[unit]->reshard();
    }
  }
  open_ = false;
  last_entered_[at::GradMode::is_enabled()] = std::exchange(forward_entered_, {});
}

void ShardSchedule::end_stay(std::optional<size_t> unless) {
  const auto unit = std::exchange(staying_, std::nullopt);
  if (unit && unit != unless) {
    units_[*unit]->reshard();
  }
}

// Prefetches the unit that was entered next in the previous forward.
void ShardSchedule::enter(size_t unit) {
  const auto& before = last_entered_[at::GradMode::is_enabled()];
  const bool was_whole = unit != staying_ && units_[unit]->state() == ShardUnit::State::unsharded;
  end_stay(unit);
  unshard(unit);
  entered_.push_back({unit, ++clock_, was_whole});
  if (!open_) {
    return;
  }
  forward_entered_.push_back(unit);
  while (next_entered_ < before.size() && before[next_entered_] != unit) {
    ++next_entered_;
  }
  ++next_entered_;
  if (settings_.prefetch > 0 && next_entered_ < before.size()) {
    prefetch(before[next_entered_]);
  }
}

// `graph` is released with the call's graph; null: backward does not reach this call.
void ShardSchedule::leave(const std::shared_ptr<void>& graph) {
  const Entered call = entered_.back();
  entered_.pop_back();
  ++clock_;
  if (graph) {
    calls_.push_back({call.unit, forward_, call.time, clock_, false, false, graph});
    end_stay();
  }
  const bool inside = std::any_of(entered_.begin(), entered_.end(),
                                  [&](const Entered& outer) { return outer.unit == call.unit; });
  const bool waits = graph || (call.unit == root() && at::GradMode::is_enabled());
  if (call.was_whole || inside || (waits && keeps(call.unit))) {
    return;
  }
  if (graph && window_) {
    staying_ = call.unit;
  } else {
    units_[call.unit]->reshard();
  }
}

// Leaves the calls that an exception has ended, until `entered` are left.
void ShardSchedule::give_up(size_t entered) {
  while (entered_.size() > entered) {
    const Entered call = entered_.back();
    entered_.pop_back();
    if (!call.was_whole) {
      units_[call.unit]->reshard();
    }
  }
}

// Puts hooks on the outputs that the call made. Tensors that it only passes on belong to an earlier
// call.
std::shared_ptr<void> ShardSchedule::watch(const std::vector<at::Tensor>& outputs,
                                           uint64_t first_node) {
  std::shared_ptr<void> graph;
  const int64_t left = clock_ + 1; // the one that leave() will use
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad() || !output.grad_fn() ||
        output.grad_fn()->sequence_nr() < first_node) {
      continue;
    }
    if (!graph) {
      graph = std::make_shared<char>();
    }
    output.register_hook([weak = weak_from_this(), left, graph](const at::Tensor& gradient) {
      const auto self = weak.lock();
      if (self && gradient.defined()) {
        self->reach(left);
      }
    });
  }
  return graph;
}

static void cast_floats(std::vector<at::Tensor>& tensors, std::optional<at::ScalarType> dtype) {
  for (at::Tensor& tensor : tensors) {
    if (dtype && tensor.defined() && tensor.is_floating_point()) {
      tensor = tensor.to(*dtype);
    }
  }
}

std::vector<at::Tensor> ShardSchedule::call(size_t unit, std::vector<at::Tensor> inputs,
                                            const Forward& forward) {
  const MixedPrecisionPolicy& precision = units_[unit]->precision();
  if (precision.cast_forward_inputs) {
    cast_floats(inputs, precision.param_dtype);
  }
  const bool again = in_recompute();
  const size_t depth = entered_.size();
  const uint64_t first_node = at::sequence_number::peek();
  again ? enter_recompute(unit) : enter(unit);
  std::vector<at::Tensor> outputs;
  try {
    outputs = forward(std::move(inputs));
  } catch (...) { // also where a recomputation ends early
    again ? exit_recompute(unit) : give_up(depth);
    throw;
  }
  cast_floats(outputs, precision.output_dtype);
  if (again) {
    exit_recompute(unit);
  } else {
    leave(at::GradMode::is_enabled() ? watch(outputs, first_node) : nullptr);
  }
  return outputs;
}

void ShardSchedule::enter_recompute(size_t unit) {
  const bool sharded = units_[unit]->state() == ShardUnit::State::sharded;
  unshard(unit);
  if (sharded) {
    recomputing_[unit] = 1;
  }
}

void ShardSchedule::exit_recompute(size_t unit) {
  if (std::exchange(recomputing_[unit], 0)) {
    units_[unit]->reshard();
  }
}

} // namespace hasten::detail
