// What the library must know of devices: the CPU and any device that LibTorch has a back end for.
// It uses the interfaces that ATen has for all devices, and no header of CUDA.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace hasten::detail {

/// Where the rank with this number on its host computes: on a GPU, or on the CPU if `cpu` is true
/// or there is no GPU. If there are more ranks than GPUs, ranks share a GPU.
at::Device device_of_rank(int local_rank, bool cpu);

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
  /// Whether the states are equal. Only for generators of the CPU.
  bool same_as(const GeneratorState& other) const;
  /// The bytes that at::Generator::get_state() returns.
  at::Tensor tensor() const { return copy_.get_state(); }

 private:
  at::Generator generator_;
  at::Generator copy_; // never changes
};

using GeneratorStates = std::vector<GeneratorState>;

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
  GeneratorStates before_{};
};

} // namespace hasten::detail
