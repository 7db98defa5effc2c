#include "hasten/activation_checkpoint/activation_checkpoint.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>

#include <atomic>

#include "region.h"

namespace hasten {

namespace detail {

static std::atomic<int64_t> recomputed_regions{0};
static std::atomic<int64_t> early_stops{0};
static std::atomic<double> recompute_seconds{0};

void count_recompute(bool stopped_early) {
  recomputed_regions.fetch_add(1, std::memory_order_relaxed);
  if (stopped_early) {
    early_stops.fetch_add(1, std::memory_order_relaxed);
  }
}

void count_recompute_time(double seconds) {
  recompute_seconds.fetch_add(seconds, std::memory_order_relaxed);
}

std::optional<bool>& early_stop_override() {
  static thread_local std::optional<bool> value;
  return value;
}

std::shared_ptr<SharedRegions>& shared_regions() {
  static thread_local std::shared_ptr<SharedRegions> regions;
  return regions;
}

std::vector<at::Tensor> run_region(RegionForward forward, std::vector<at::Tensor> inputs,
                                   const ActivationCheckpointOptions& options) {
  if (!at::GradMode::is_enabled()) {
    return forward(std::move(inputs));
  }
  if (!hook_engine_installed()) {
    return run_reentrant(std::move(forward), std::move(inputs), options);
  }
  ActivationCheckpointOptions effective = options;
  effective.early_stop = early_stop_override().value_or(options.early_stop);
  const auto region = std::make_shared<Region>(std::move(effective));
  region->save_inputs(inputs);
  region->save_state(inputs);
  const uint64_t first_node = at::sequence_number::peek();
  region->set_recompute(std::move(forward));
  std::vector<at::Tensor> outputs = region->run_forward(std::move(inputs));
  region->finish_forward(outputs, first_node);
  return outputs;
}

void throw_no_tensor(const ActivationCheckpointOptions& options) {
  throw InputError("activation_checkpoint",
                   (options.name.empty() ? std::string("the region") : "region " + options.name) +
                       " returns no tensor",
                   "a result with tensors, because backward needs them",
                   "return what the region computes");
}

} // namespace detail

at::Tensor activation_checkpoint_sequential(
    const std::vector<std::function<at::Tensor(at::Tensor)>>& functions, int64_t segments,
    at::Tensor input, const ActivationCheckpointOptions& options) {
  const auto count = static_cast<int64_t>(functions.size());
  if (segments < 1 || segments > count) {
    throw InputError(
        "activation_checkpoint_sequential",
        "segments=" + std::to_string(segments) + " of " + std::to_string(count) + " functions",
        "1 to the number of functions");
  }
  const int64_t length = count / segments;
  int64_t next = 0;
  for (int64_t segment = 0; segment + 1 < segments; ++segment) {
    const std::vector<std::function<at::Tensor(at::Tensor)>> part(
        functions.begin() + next, functions.begin() + next + length);
    next += length;
    input = activation_checkpoint(
        [part](at::Tensor x) {
          for (const auto& function : part) {
            x = function(std::move(x));
          }
          return x;
        },
        std::move(input), options);
  }
  for (; next < count; ++next) {
    input = functions[static_cast<size_t>(next)](std::move(input));
  }
  return input;
}

EarlyStopGuard::EarlyStopGuard(bool early_stop) : before_(detail::early_stop_override()) {
  detail::early_stop_override() = early_stop;
}
EarlyStopGuard::~EarlyStopGuard() { detail::early_stop_override() = before_; }

SharedRecompute::SharedRecompute() {
  // Negative ids differ from the ids of backward calls.
  static std::atomic<int64_t> last{-1};
  before_ = detail::shared_regions();
  detail::shared_regions() = std::make_shared<detail::SharedRegions>();
  detail::shared_regions()->id = --last;
}

SharedRecompute::~SharedRecompute() {
  const std::shared_ptr<detail::SharedRegions> mine = std::exchange(
      detail::shared_regions(), std::static_pointer_cast<detail::SharedRegions>(before_));
  for (const std::weak_ptr<detail::Region>& weak : mine->regions) {
    if (const auto region = weak.lock()) {
      region->forget(mine->id);
    }
  }
}

RecomputeCounts recompute_counts() {
  return {detail::recomputed_regions, detail::early_stops, detail::recompute_seconds};
}

} // namespace hasten
