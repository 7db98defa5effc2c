// What the library must know of devices: the CPU and any device that LibTorch has a back end for.
// It uses the interfaces that ATen has for all devices, and no header of CUDA.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "hasten/base/world.h"

namespace hasten::detail {

/// The device of a rank, and what "auto" chose on a host that has an accelerator; else empty.
struct DeviceChoice {
  at::Device device;
  std::string note{};
};

/// `name`: "cpu"; a type of device ("cuda"), of which each rank of the host takes the one with its
/// local rank; a device ("cuda:1"); or "auto": the accelerator that LibTorch has, if there is one
/// for each rank of the host, else the CPU. `shared`: ranks may share a device, which takes a back
/// end that moves host memory. Throws InputError if the device does not exist, or if there are
/// fewer than ranks.
DeviceChoice choose_device(const std::string& name, const World& world, bool shared);

/// How many ranks of this host have the device that choose_device(name, world, …) returned.
int ranks_on(const at::Device& device, const std::string& name, const World& world);

/// Empty if the device computes bf16 in hardware, else the reason. An NVIDIA GPU needs compute
/// capability 8.0; torch emulates it on others, slowly. Also empty for a device of which LibTorch
/// does not know.
std::string why_no_bf16(const at::Device& device);

/// Lets matrix products and convolutions of fp32 tensors on GPUs use TF32, in the whole process.
/// Throws InputError if the device is not an NVIDIA GPU with compute capability 8.0 or above.
void allow_tf32(const at::Device& device);

/// Lets operators on devices use kernels that give the same bits in each run, in the whole process.
/// cuBLAS reads CUBLAS_WORKSPACE_CONFIG at its first product: it is set if it is not there. Does nothing
/// for the CPU.
void use_deterministic_algorithms(const at::Device& device);

/// Waits until the device has done what was started on it. Does nothing on the CPU.
void synchronize(const at::Device& device);

/// Does not wait for the copy if the tensor is in pinned memory.
at::Tensor tensor_to_device(const at::Tensor& tensor, const at::Device& device);
/// A copy in pinned memory, from which a GPU reads without the CPU.
at::Tensor pinned(const at::Tensor& tensor);

/// A new generator of the CPU.
at::Generator seeded_generator(uint64_t seed);

/// The state that a random generator had. It needs no tensor, so the memory meter does not count
/// it.
class GeneratorState {
 public:
  /// The present state of torch's default generator of the device.
  explicit GeneratorState(const at::Device& device = at::kCPU);
  /// The present state of this generator.
  explicit GeneratorState(at::Generator generator);
  /// A state from tensor(), for torch's default generator of the device. Throws c10::Error if the
  /// tensor is not the state of such a generator.
  GeneratorState(const at::Device& device, const at::Tensor& state);

  const at::Generator& generator() const { return generator_; }
  /// "cpu" or "cuda", as in the names of saved states.
  std::string device_name() const { return c10::DeviceTypeName(generator_.device().type(), true); }
  /// The generator's present state.
  GeneratorState again() const { return GeneratorState(generator_); }
  /// Sets the generator to this state.
  void restore() const;
  /// Whether the states are equal; both are of one device.
  bool same_as(const GeneratorState& other) const;
  /// The bytes that at::Generator::get_state() returns.
  at::Tensor tensor() const { return copy_.get_state(); }

 private:
  at::Generator generator_;
  at::Generator copy_; // never changes
};

using GeneratorStates = std::vector<GeneratorState>;

/// Adds the generator's present state, unless it has one among `states`.
void add_generator_state(GeneratorStates& states, const at::Generator& generator);

/// The present states of torch's default generators: first the CPU's, then those of the other
/// devices in `devices`, each once.
GeneratorStates generator_states(const std::vector<at::Device>& devices);
void set_generator_states(const GeneratorStates& states);

/// While it lives, generators draw from `states`. Afterwards they are as before, also after an
/// exception.
class [[nodiscard]] GeneratorScope {
 public:
  explicit GeneratorScope(const GeneratorStates& states);
  GeneratorScope(const GeneratorScope&) = delete;
  GeneratorScope& operator=(const GeneratorScope&) = delete;
  ~GeneratorScope() { set_generator_states(before_); }

 private:
  GeneratorStates before_;
};

} // namespace hasten::detail
