#include "uneven_inputs.h"

#include <ATen/core/Tensor.h>

#include "hasten/base/error.h"
#include "hasten/core/random.h"

namespace hasten::detail {

void UnevenInputs::begin_range(LoaderState& loader) {
  if (!loader.training) {
    batch_.begin_evaluation();
    return;
  }
  if (loader.open) {
    end_ranges(&loader, false); // left by break
  }
  batch_.check_parameters();
  loader.open = true;
}

void UnevenInputs::end_range(LoaderState& loader) {
  if (loader.open) {
    end_ranges(&loader, false);
    loader.open = false;
  }
}

// A hash on which finished ranks must agree, below 2^16: the loader that ended and the optimizer
// steps so far. 0, which agrees with all: the end of the run.
uint64_t end_of_data(const LoaderState* loader, uint64_t steps) {
  if (loader == nullptr) {
    return 0;
  }
  const uint64_t mixed = mix(mix(steps, loader->index), 0);
  return (mixed >> 49) + 1;
}

void UnevenInputs::end_ranges(const LoaderState* loader, bool joins) {
  try {
    optimizers_.complete_at_end(loader);
    // Other ranks complete a window that had only its last batch here. Inside a LocalSGD scope each
    // rank has its own windows.
    joins = joins || local_.scope() != nullptr || windows_.left_out_last(loader);
    windows_.drop_unfinished(loader);
    if (!run_.alone()) {
      take_part(loader, joins);
    }
  } catch (const std::exception& error) {
    run_.fail_peers(error); // they may wait for this rank
    throw;
  }
}

// A peer may be lost in between. If a scope of LocalSGD continues without it, so does this.
void UnevenInputs::take_part(const LoaderState* loader, bool joins) {
  end_with_replica(loader);
  for (;;) {
    bool survivable = true;
    try {
      serve_peers(loader, joins, survivable);
      return;
    } catch (const CommunicationError&) {
      if (!survivable || local_.scope() == nullptr || !local_.scope()->recover()) {
        throw;
      }
      if (local_.scope()->ended_in_recovery()) {
        return;
      }
    }
  }
}

// Inside a LocalSGD scope the ranks of a replica end together, without the other ranks.
void UnevenInputs::end_with_replica(const LoaderState* loader) {
  WindowControl& of_copy = announcer_.control_of(~uint64_t{0});
  if (local_.scope() == nullptr || &of_copy == &announcer_.control()) {
    return;
  }
  WindowTotals mine;
  mine.finished = 1;
  mine.data = end_of_data(loader, windows_.shared()->steps);
  of_copy.start(mine, at::Tensor());
  of_copy.wait();
}

// Says "finished" until every rank does.
void UnevenInputs::serve_peers(const LoaderState* loader, bool joins, bool& survivable) {
  WindowTotals mine;
  mine.finished = 1;
  mine.joins = joins;
  // A rank that joins may still take part in steps. Inside a LocalSGD scope steps are each rank's
  // own.
  if (local_.scope() != nullptr) {
    mine.data = end_of_data(loader, 0);
  } else if (!joins) {
    mine.data = end_of_data(loader, windows_.shared()->steps);
  }
  mine.read = loader != nullptr ? loader->read : 0;
  mine.range = loader != nullptr ? loader->range : "";
  WindowTotals totals;
  for (;;) {
    mine.stale = stale_ ? 1 : 0;
    announcer_.control().start(mine, at::Tensor());
    totals = announcer_.control().wait();
    if (totals.finished == run_.communicator()->world_size()) {
      break;
    }
    const bool is_window = totals.round == 0 && !totals.buffers && totals.models != 0;
    survivable = totals.round != 0; // those with batches do not survive the others either
    if (totals.stale > 0 && !is_window && !totals.buffers) {
      share_state();
    }
    if (totals.round != 0) {
      local_.scope()->join_round(totals.round);
    } else if (totals.buffers) {
      announcer_.sync_buffers(totals.models, true, false);
    } else if (is_window) {
      stale_ = true;
      windows_.join(totals);
    } else {
      save_with_peers();
    }
    survivable = true;
  }
  if (totals.stale > 0) {
    share_state();
  }
  if (local_.scope() != nullptr) {
    local_.align_clocks();
  }
}

void UnevenInputs::end_run() {
  if (loaders_.close_passes()) {
    end_ranges(nullptr, false);
  }
  if (!run_.alone()) { // only here is a last step outside the loops compared
    LoaderState end_of_run;
    bool survivable = false;
    serve_peers(&end_of_run, false, survivable);
  }
}

} // namespace hasten::detail
