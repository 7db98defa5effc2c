#include "accelerator_core.h"

#include <ATen/core/Tensor.h>

#include "hasten/core/random.h"

namespace hasten::detail {

AcceleratorCore::AcceleratorCore(AcceleratorOptions options,
                                 std::shared_ptr<Communicator> communicator)
    : run(std::move(options), std::move(communicator)),
      models(run),
      windows(run, models),
      precision(run, windows.shared()),
      checks(run, models, windows, precision),
      batch(window_parts(), loaders),
      optimizers(window_parts(), batch),
      local(window_parts(), optimizers),
      checkpointer(parts()) {
  if (run.options().seed) {
    set_seed(*run.options().seed);
  }
}

void AcceleratorCore::begin_pass(LoaderState& loader) {
  if (!loader.training) {
    batch.begin_evaluation();
    return;
  }
  end_pass(loader); // left by break
  batch.check_parameters();
  loader.open = true;
}

void AcceleratorCore::end_pass(LoaderState& loader) {
  if (loader.open) {
    end_of_data(&loader);
    loader.open = false;
  }
}

void AcceleratorCore::end_of_data(const LoaderState* loader) {
  try {
    const bool window_goes_on = loader != nullptr && !run.options().sync_with_dataloader;
    if (!window_goes_on) {
      optimizers.complete_at_end(loader);
      windows.drop_unfinished(loader);
    }
    if (local.is_local()) { // each rank has its own windows
      if (loader == nullptr || loader->own_end) {
        local.scope()->wait_for_peers();
      }
      return;
    }
    batch.agree_on_end(loader);
    if (window_goes_on) { // evaluations that follow need equal buffers
      sync_buffers(models, batch.unfinished());
    }
  } catch (const std::exception& error) {
    run.fail_peers(error); // they may wait for this rank
    throw;
  }
}

void AcceleratorCore::finish() {
  if (run.closed()) {
    return;
  }
  run.mark_closed();
  if (loaders.close_passes()) {
    end_of_data(nullptr);
  } else {
    batch.agree_on_end(nullptr); // only here is a last step outside the loops compared
  }
  models.close();
  run.close();
  finish_trackers();
}

void AcceleratorCore::finish_trackers() {
  for (const auto& tracker : trackers) {
    tracker->finish();
  }
  trackers.clear();
}

} // namespace hasten::detail
