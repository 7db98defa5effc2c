// How a backward processes the calls of a forward: Note [Order].
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <map>

#include "hasten/base/error.h"
#include "shard_schedule.h"

namespace hasten::detail {

// Forgets only calls that a backward has processed. Whether another call still has a graph may
// depend on what a rank's loss uses.
void ShardSchedule::forget_dead_calls() {
  std::erase_if(calls_, [](const Call& call) { return call.spent && call.graph.expired(); });
}

void ShardSchedule::open_backward(bool last) {
  close_forward(forward_, false);
  forget_dead_calls();
  end_reduction(); // the last one of the previous backward
  in_backward_ = true;
  staying_.reset();
  last_ = last;
  touched_.clear();
  complete_.assign(units_.size(), 0);
  for (Call& call : calls_) {
    call.reached = false;
  }
  unshard(root());
  if (settings_.prefetch > 0 && !calls_.empty() && !calls_.back().spent) {
    prefetch(calls_.back().unit);
  }
}

void ShardSchedule::reach(int64_t left) {
  if (!in_backward_) {
    throw InputError("parallel::FullyShard",
                     "loss.backward() outside start_backward() and finish_backward()",
                     "a backward between the two, because ranks gather and reduce in it",
                     "use accelerator.backward(loss), or call them around it");
  }
  const auto found = std::ranges::find(calls_, left, &Call::left);
  if (found == calls_.end()) {
    throw InputError("parallel::FullyShard",
                     "a backward through a forward that was abandoned or belongs to an earlier "
                     "window",
                     "a forward of the open window", "run forward again");
  }
  if (found->reached) {
    return;
  }
  touched_.insert(found->forward);
  for (auto call = calls_.end() - 1; call != found; --call) {
    if (call->forward == found->forward && !call->reached) {
      advance(*call);
    }
  }
  advance(*found);
}

void ShardSchedule::advance(Call& call) {
  call.reached = true;
  complete_after(call.left);
  reshard_others(call);
  unshard(call.unit);
  if (settings_.prefetch == 0) {
    return;
  }
  for (auto next = calls_.rbegin(); next != calls_.rend(); ++next) {
    if (next->forward == call.forward && !next->reached) {
      prefetch(next->unit);
      return;
    }
  }
}

void ShardSchedule::reshard_others(const Call& call) {
  for (size_t unit = 0; unit < root(); ++unit) {
    const bool around = std::any_of(calls_.begin(), calls_.end(), [&](const Call& outer) {
      return outer.unit == unit && outer.reached && outer.forward == call.forward &&
             outer.entered < call.entered && outer.left > call.left;
    });
    if (unit != call.unit && !around && !keeps(unit) && !recomputing_[unit]) {
      units_[unit]->reshard();
    }
  }
}

// Completes units that were first entered after `time`, because they get no more gradients. The
// last one entered comes first.
void ShardSchedule::complete_after(int64_t time) {
  struct First {
    int64_t entered = std::numeric_limits<int64_t>::max();
    bool touched = false;
  };
  std::map<size_t, First> firsts;
  for (const Call& call : calls_) {
    const bool touched_here = touched(call.forward);
    if (!call.spent || touched_here) {
      First& first = firsts[call.unit];
      first.entered = std::min(first.entered, call.entered);
      first.touched = first.touched || touched_here;
    }
  }
  std::vector<std::pair<int64_t, size_t>> ready;
  for (const auto& [unit, first] : firsts) {
    if (first.touched && first.entered > time && !complete_[unit]) {
      ready.emplace_back(first.entered, unit);
    }
  }
  std::sort(ready.rbegin(), ready.rend());
  for (const auto& [entered, unit] : ready) {
    complete(unit);
  }
}

void ShardSchedule::complete(size_t unit) {
  complete_[unit] = 1;
  ShardUnit& done = *units_[unit];
  if (!keeps(unit) || last_) {
    done.reshard();
  }
  const bool reduces = last_ || settings_.sync_each_batch;
  if (done.alone() || !reduces) {
    done.keep_taken();
  }
  if (!reduces) {
    return;
  }
  end_reduction();
  if (!done.alone()) {
    note('r', unit);
    done.start_reduction(*settings_.reductions);
  }
  reducing_ = unit;
}

// Only one reduction is in flight at a time, because the next one reuses its memory.
void ShardSchedule::end_reduction() {
  if (!reducing_) {
    return;
  }
  ShardUnit& unit = *units_[*reducing_];
  reducing_.reset();
  unit.finish_reduction();
  if (settings_.replicas && last_) {
    for (Work& handle : unit.sum_over(*settings_.replicas)) {
      replica_sums_.push_back(std::move(handle));
    }
  }
}

void ShardSchedule::close_backward() {
  if (touched_.empty()) {
    const auto latest =
        std::find_if(calls_.rbegin(), calls_.rend(), [](const Call& call) { return !call.spent; });
    if (latest != calls_.rend()) {
      touched_.insert(latest->forward);
    }
  }
  for (auto call = calls_.rbegin(); call != calls_.rend(); ++call) {
    if (touched(call->forward) && !call->reached) {
      advance(*call);
    }
  }
  complete_after(-1);
  // Gradients of earlier batches in units that this batch did not call.
  const bool left = last_ && (!settings_.sync_each_batch || settings_.replicas);
  for (size_t unit = 0; left && unit < root(); ++unit) {
    if (!complete_[unit]) {
      complete(unit);
    }
  }
  complete(root());
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    units_[unit]->wait_for_unshard(); // a prefetch that was not needed
    if (settings_.reshard_after_forward || last_) {
      units_[unit]->reshard();
    }
  }
  for (Call& call : calls_) {
    call.spent = call.spent || touched(call.forward);
  }
  in_backward_ = false;
}

void ShardSchedule::wait() {
  end_reduction();
  for (Work& handle : replica_sums_) {
    handle.wait();
  }
  replica_sums_.clear();
}

void ShardSchedule::settle() {
  cancel();
  for (const auto& unit : units_) {
    unit->wait_for_unshard();
    unit->reshard();
  }
}

void ShardSchedule::unshard() {
  staying_.reset();
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    prefetch(unit);
  }
  for (const auto& unit : units_) {
    unit->wait_for_unshard();
  }
}

void ShardSchedule::reshard() {
  for (const auto& unit : units_) {
    unit->reshard();
  }
}

void ShardSchedule::close_window() {
  window_ = false;
  reshard();
}

void ShardSchedule::cancel() noexcept {
  in_backward_ = open_ = window_ = false;
  staying_.reset();
  entered_.clear();
  calls_.clear();
  replica_sums_.clear();
  reducing_.reset();
  for (const auto& unit : units_) {
    unit->drop_reduction();
    unit->reshard(); // settle() reshards a unit that is still being gathered
  }
}

} // namespace hasten::detail
