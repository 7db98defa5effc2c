#include "hasten/core/device.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/cuda.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <mutex>

namespace hasten::detail {

at::Device device_of_rank(int local_rank, bool cpu) {
  if (cpu || !torch::cuda::is_available()) {
    return at::kCPU;
  }
  const auto count = static_cast<int>(torch::cuda::device_count());
  return {at::kCUDA, static_cast<c10::DeviceIndex>(local_rank % count)};
}

at::Tensor tensor_to_device(const at::Tensor& tensor, const at::Device& device) {
  // The caching allocator keeps pinned memory until its copy is complete.
  const bool waits_not = !device.is_cpu() && tensor.is_cpu() && tensor.is_pinned();
  return tensor.to(device, tensor.scalar_type(), waits_not);
}

at::Tensor pinned(const at::Tensor& tensor) {
  return tensor.is_cpu() ? tensor.pin_memory() : tensor;
}

at::Generator seeded_generator(uint64_t seed) { return at::detail::createCPUGenerator(seed); }

static at::Generator copy_of(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.clone();
}

GeneratorState::GeneratorState(const at::Device& device)
    : GeneratorState(at::globalContext().defaultGenerator(device)) {}

GeneratorState::GeneratorState(at::Generator generator)
    : generator_(std::move(generator)), copy_(copy_of(generator_)) {}

GeneratorState::GeneratorState(const at::Device& device, const at::Tensor& state)
    : GeneratorState(device) {
  copy_.set_state(state);
}

void GeneratorState::restore() const {
  at::Generator generator = generator_;
  const std::lock_guard<std::mutex> lock(generator.mutex());
  if (!generator.device().is_cpu()) {
    generator.set_state(tensor());
    return;
  }
  auto* const to = generator.get<at::CPUGeneratorImpl>();
  auto* const from = copy_.get<at::CPUGeneratorImpl>();
  to->set_engine(from->engine());
  to->set_next_float_normal_sample(from->next_float_normal_sample());
  to->set_next_double_normal_sample(from->next_double_normal_sample());
}

bool GeneratorState::same_as(const GeneratorState& other) const {
  auto* const a = at::check_generator<at::CPUGeneratorImpl>(copy_);
  auto* const b = at::check_generator<at::CPUGeneratorImpl>(other.copy_);
  const auto mine = a->engine().data();
  const auto others = b->engine().data();
  return mine.left_ == others.left_ && mine.next_ == others.next_ && mine.state_ == others.state_ &&
         a->next_float_normal_sample() == b->next_float_normal_sample() &&
         a->next_double_normal_sample() == b->next_double_normal_sample();
}

GeneratorStates generator_states(const std::vector<at::Device>& devices) {
  GeneratorStates states(1);
  for (const at::Device& device : devices) {
    const at::Generator& generator = at::globalContext().defaultGenerator(device);
    if (std::none_of(states.begin(), states.end(),
                     [&](const GeneratorState& state) { return state.generator() == generator; })) {
      states.emplace_back(generator);
    }
  }
  return states;
}

void set_generator_states(const GeneratorStates& states) {
  std::for_each(states.begin(), states.end(), std::mem_fn(&GeneratorState::restore));
}

GeneratorScope::GeneratorScope(const GeneratorStates& states) {
  std::transform(states.begin(), states.end(), std::back_inserter(before_),
                 std::mem_fn(&GeneratorState::again));
  set_generator_states(states);
}

} // namespace hasten::detail
