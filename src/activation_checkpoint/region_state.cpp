#include "region_state.h"

#include <ATen/Context.h>

#include <mutex>

namespace hasten::detail {

CpuRandomState CpuRandomState::now() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  auto* cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
  CpuRandomState state;
  state.engine_ = cpu->engine();
  state.next_float_ = cpu->next_float_normal_sample();
  state.next_double_ = cpu->next_double_normal_sample();
  return state;
}

void CpuRandomState::restore() const {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  auto* cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
  cpu->set_engine(engine_);
  cpu->set_next_float_normal_sample(next_float_);
  cpu->set_next_double_normal_sample(next_double_);
}

bool CpuRandomState::same_as(const CpuRandomState& other) const {
  const auto mine = engine_.data();
  const auto others = other.engine_.data();
  return mine.left_ == others.left_ && mine.next_ == others.next_ && mine.state_ == others.state_ &&
         next_float_ == other.next_float_ && next_double_ == other.next_double_;
}

static at::Tensor device_random_state(const at::Device& device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

RandomState RandomState::now(const std::vector<at::Tensor>& tensors) {
  RandomState state;
  state.cpu_ = CpuRandomState::now();
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.is_cpu() || tensor.is_meta()) {
      continue;
    }
    const at::Device device = tensor.device();
    const bool known = std::any_of(state.devices_.begin(), state.devices_.end(),
                                   [&](const auto& entry) { return entry.first == device; });
    if (!known) {
      state.devices_.emplace_back(device, device_random_state(device));
    }
  }
  return state;
}

RandomState RandomState::again() const {
  RandomState state;
  state.cpu_ = CpuRandomState::now();
  for (const auto& [device, unused] : devices_) {
    state.devices_.emplace_back(device, device_random_state(device));
  }
  return state;
}

void RandomState::restore() const {
  cpu_.restore();
  for (const auto& [device, value] : devices_) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(value);
  }
}

ForwardState ForwardState::now(const std::vector<at::Tensor>& inputs, bool preserve_rng_state) {
  ForwardState state;
  if (preserve_rng_state) {
    state.random = RandomState::now(inputs);
  }
  state.autocast = AutocastState::now(inputs);
  return state;
}

void ForwardState::restore() const {
  if (random) {
    random->restore();
  }
  autocast.restore();
}

RecomputeScope::RecomputeScope(const ForwardState& forward, const OncePlace& once)
    : random_(forward.random),
      autocast_(forward.autocast),
      casts_(forward.autocast.enabled()),
      once_(OncePlace{once.store, once.next, true}) {
  drop_casts();
}

// A cast weight from outside belongs to another graph.
void RecomputeScope::drop_casts() const {
  if (casts_) {
    drop_autocast_casts();
  }
}

} // namespace hasten::detail
