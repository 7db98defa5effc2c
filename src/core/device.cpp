#include "hasten/core/device.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#if __has_include(<c10/core/DeviceCapability.h>) // not in older releases
#define HASTEN_HAS_DEVICE_CAPABILITY 1
#endif

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "core/cuda_library.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"

namespace hasten::detail {

static int devices_of(c10::DeviceType type) {
  return c10::impl::hasDeviceGuardImpl(type) ? c10::impl::getDeviceGuardImpl(type)->deviceCount()
                                             : 0;
}

/// Throws InputError if it is no device's name.
static at::Device parsed_device(const std::string& name) {
  try {
    return at::Device(name);
  } catch (const c10::Error&) {
    throw InputError("core::choose_device", "device=" + name, "auto, cpu, cuda or cuda:N");
  }
}

DeviceChoice choose_device(const std::string& name, const World& world, bool shared) {
  const int ranks = world.local_world_size;
  if (name == "auto") {
    const CudaFacts& cuda = cuda_facts();
    const auto type = at::getAccelerator(false);
    const int count = type ? devices_of(*type) : 0;
    if (count == 0) {
      return {at::kCPU,
              cuda.driver ? "device=auto takes the CPU, because " + why_no_gpu(cuda).what : ""};
    }
    const bool enough = count >= ranks;
    const std::string name_of_type = c10::DeviceTypeName(*type, true);
    return {enough ? at::Device(*type, static_cast<c10::DeviceIndex>(world.local_rank)) : at::kCPU,
            "device=auto takes " + (enough ? name_of_type : "the CPU") +
                ", because this host has " + std::to_string(count) + " " + name_of_type +
                " devices for " + std::to_string(ranks) + " processes"};
  }
  const at::Device device = parsed_device(name);
  if (device.is_cpu()) {
    return {at::kCPU};
  }
  if (device.is_cuda() && cuda_facts().devices == 0) {
    const Advice why = why_no_gpu(cuda_facts());
    throw InputError("core::choose_device", "device=" + name + ": " + why.what,
                     "a GPU that LibTorch sees", why.fix);
  }
  const int count = devices_of(device.type());
  if (count == 0 || device.index() >= count) {
    throw InputError(
        "core::choose_device",
        "device=" + name + " on a host with " + std::to_string(count) + " such devices",
        "a device that LibTorch sees",
        count == 0 ? "check that LibTorch is a build for it and that its driver is "
                     "installed, or set device=auto"
                   : "choose another one");
  }
  if (!shared && ranks > (device.has_index() ? 1 : count)) {
    throw InputError("core::choose_device",
                     "device=" + name + " for " + std::to_string(ranks) +
                         " processes on a host with " + std::to_string(count) + " such devices",
                     "a device for each process",
                     "start fewer processes, or set backend=gloo, with which processes share a "
                     "device");
  }
  return {device.has_index()
              ? device
              : at::Device(device.type(), static_cast<c10::DeviceIndex>(world.local_rank % count))};
}

int ranks_on(const at::Device& device, const std::string& name, const World& world) {
  if (device.is_cpu() || name.find(':') != std::string::npos) {
    return world.local_world_size;
  }
  const int count = devices_of(device.type());
  return (world.local_world_size - device.index() + count - 1) / count;
}

// The capability that the guard of CUDA states includes what torch emulates.
static bool has_compute_capability_8(const at::Device& gpu) {
  const c10::DeviceGuard guard(gpu);
  const auto& hooks = at::detail::getCUDAHooks();
  return hooks.hasROCM() || hooks.supportsBFloat16ConvolutionWithCuDNNv8();
}

std::string why_no_bf16(const at::Device& device) {
  bool has = true;
  if (device.is_cuda()) {
    has = has_compute_capability_8(device);
  } else if (!device.is_cpu()) {
#ifdef HASTEN_HAS_DEVICE_CAPABILITY
    try {
      has = c10::impl::getDeviceGuardImpl(device.type())
                ->getDeviceCapability(device)
                .capability_data.supported_scalar_types.has_BFloat16;
    } catch (const c10::Error&) {
      // not stated
    }
#endif
  }
  return has ? ""
             : device.str() + " has no bf16 in hardware" +
                   (device.is_cuda() ? ": its compute capability is below 8.0" : "");
}

void allow_tf32(const at::Device& device) {
  if (!device.is_cuda() || !has_compute_capability_8(device)) {
    throw InputError("core::allow_tf32", "tf32=true on " + device.str(),
                     "an NVIDIA GPU with compute capability 8.0 or above", "leave tf32 out");
  }
  at::globalContext().setAllowTF32CuBLAS(true);
  at::globalContext().setAllowTF32CuDNN(true);
}

void use_deterministic_algorithms(const at::Device& device) {
  if (device.is_cpu()) {
    return;
  }
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  at::Context& torch = at::globalContext();
  torch.setDeterministicAlgorithms(true, /*warn_only=*/false);
  torch.setDeterministicFillUninitializedMemory(false); // a pass over memory that is written anyway
  torch.setDeterministicCuDNN(true);
}

void synchronize(const at::Device& device) {
  if (!device.is_cpu()) {
    c10::impl::getDeviceGuardImpl(device.type())->synchronizeDevice(device.index());
  }
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
  if (!generator_.device().is_cpu()) {
    return at::equal(tensor(), other.tensor());
  }
  auto* const a = at::check_generator<at::CPUGeneratorImpl>(copy_);
  auto* const b = at::check_generator<at::CPUGeneratorImpl>(other.copy_);
  const auto mine = a->engine().data();
  const auto others = b->engine().data();
  return mine.left_ == others.left_ && mine.next_ == others.next_ && mine.state_ == others.state_ &&
         a->next_float_normal_sample() == b->next_float_normal_sample() &&
         a->next_double_normal_sample() == b->next_double_normal_sample();
}

void add_generator_state(GeneratorStates& states, const at::Generator& generator) {
  if (std::ranges::find(states, generator, &GeneratorState::generator) == states.end()) {
    states.emplace_back(generator);
  }
}

GeneratorStates generator_states(const std::vector<at::Device>& devices) {
  GeneratorStates states(1);
  for (const at::Device& device : devices) {
    add_generator_state(states, at::globalContext().defaultGenerator(device));
  }
  return states;
}

void set_generator_states(const GeneratorStates& states) {
  std::for_each(states.begin(), states.end(), std::mem_fn(&GeneratorState::restore));
}

GeneratorScope::GeneratorScope(const GeneratorStates& states)
    : before_(mapped(states, &GeneratorState::again)) {
  set_generator_states(states);
}

} // namespace hasten::detail
