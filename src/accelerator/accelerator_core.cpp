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
      announcer(run, models, windows),
      batch(window_parts(), loaders, announcer),
      optimizers(window_parts(), batch),
      local(window_parts(), optimizers),
      uneven(parts()),
      checkpointer(parts(), uneven) {
  if (run.order_check()) {
    windows.shared()->check = [this] { compare_ranks(); };
  }
  windows.on_complete = [this](const GradientWindow& window) {
    optimizers.forget_done();
    announcer.forget_forwards(window.models_mask());
    checks.completed(window);
  };
  announcer.share_state = [this] { uneven.share_state(); };
  uneven.save_with_peers = [this] { checkpointer.save_with_peers(); };
  if (run.options().seed) {
    set_seed(*run.options().seed);
  }
}

// Sum of the values' bit patterns, which no rounding hides.
static int64_t bit_sum(const at::Tensor& tensor) {
  const at::Tensor own = tensor.detach().contiguous();
  const at::Tensor flat = own.as_strided({own.numel()}, {1});
  const auto bits = flat.element_size() % 4 == 0   ? at::kInt
                    : flat.element_size() % 2 == 0 ? at::kShort
                                                   : at::kByte;
  return flat.view(bits).sum(at::kLong).item<int64_t>();
}

void AcceleratorCore::compare_ranks() {
  if (&announcer.control_of(~uint64_t{0}) != &announcer.control()) {
    return; // inside LocalSGD a replica of a sharded model differs from the others
  }
  nlohmann::json parameters = nlohmann::json::object();
  for (size_t i = 0; i < models.size(); ++i) {
    if (models[i].sharded) { // each rank has other shards
      continue;
    }
    for (const auto& [name, parameter] : models[i].parallel->parameters()) {
      parameters["parameter \"" + name + "\" of model " + std::to_string(i)] = bit_sum(parameter);
    }
  }
  run.order_check()->compare(parameters);
}

void AcceleratorCore::finish() {
  if (run.closed()) {
    return;
  }
  run.mark_closed();
  uneven.end_run();
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
