// A scope in which matrix products run in 16 bits:
//
//   {
//     const hasten::Autocast autocast({.dtype = at::kBFloat16});
//     loss = cross_entropy(model->forward(x), y);
//   }
//   loss.backward(); // outside: in the types of the forward
//
// It is torch's own autocast (at::autocast), as torch.autocast is in Python: operators
// convert their inputs, parameters stay fp32. What is ours:
//   * put back when the scope ends, also by an exception; scopes nest, on and off
//   * Fp32Ops: torch's list for the CPU leaves normalisations and softmax in 16 bits
//   * LSTMs in fp16 run in fp32 on the CPU, where oneDNN has no fp16 ones
// Every other operator of torch's 16-bit list runs in fp16 and bf16 on the CPU; where
// an operator outside of it has no kernel for a 16-bit input, torch's error names it:
// put Autocast({.enabled = false}) around it and give it x.to(at::kFloat).
// Threading: settings are the thread's own. A new thread has none: give it
// AutocastState::now() of the one that starts it. Backward runs in the types of the
// forward wherever it is called, and regions of activation_checkpoint are computed
// again with the settings of their forward. Cost: thread-local writes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <vector>

namespace hasten {

/// Which operators compute in fp32 on the CPU whatever their inputs are. Losses,
/// matrix decompositions and transforms always do.
enum class Fp32Ops {
  /// Those that do on GPUs: softmax, log_softmax, layer_norm, group_norm, rms_norm,
  /// norms, sums, cumulated sums and products, logsumexp, exp, logarithms, powers,
  /// reciprocals, softplus, distances. All of torch's list for CUDA but
  /// interpolations. They give fp32, also to what comes after them.
  as_on_gpus,
  /// torch's list for the CPU alone: those above round their results to 16 bits.
  /// The memory and time of them is half.
  torch_list,
};

struct AutocastOptions {
  c10::DeviceType device = c10::DeviceType::CPU;
  /// kBFloat16 or kHalf; empty: kBFloat16 on the CPU, kHalf elsewhere.
  std::optional<c10::ScalarType> dtype{};
  /// False: a scope in which nothing is converted, inside one that converts.
  bool enabled = true;
  /// A parameter is converted once in the outermost scope, and kept until its end:
  /// half the bytes of each. Never step an optimizer inside a scope: the copies would
  /// be those of the old values (the Accelerator and GradScaler drop them).
  bool cache_enabled = true;
  /// For device CPU.
  Fp32Ops fp32_ops = Fp32Ops::as_on_gpus;
};

/// A thread's settings: a value, to be had again elsewhere or later.
class AutocastState {
 public:
  /// Of this thread, for the CPU and for the device of the first tensor that is
  /// elsewhere (none: CUDA).
  static AutocastState now(const std::vector<at::Tensor>& tensors = {});
  /// What this thread has now, of the same devices.
  AutocastState again() const;
  /// Makes them this thread's.
  void restore() const;
  /// Whether it is on for any of the devices.
  bool enabled() const;

 private:
  struct OnDevice {
    c10::DeviceType type = c10::DeviceType::CPU;
    bool enabled = false;
    c10::ScalarType dtype = c10::ScalarType::Float;
  };
  OnDevice devices_[2]{}; // CPU first
  bool cache_ = true;
  Fp32Ops fp32_ops_ = Fp32Ops::torch_list;
};

class [[nodiscard]] Autocast {
 public:
  /// Throws InputError for a dtype that is not one of 16 bits.
  explicit Autocast(const AutocastOptions& options = {});
  /// The settings of another thread, or of then.
  explicit Autocast(const AutocastState& state);
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast();

 private:
  AutocastState before_;
};

/// What this thread's autocast makes of inputs on the device; empty where it is off.
std::optional<c10::ScalarType> autocast_dtype(c10::DeviceType device = c10::DeviceType::CPU);

/// `x` as a matrix product would take it here: of autocast's type where autocast is on
/// for its device and it is a floating-point tensor, not of fp64; else itself.
/// Differentiable. Saves conversions where several products read one tensor.
at::Tensor autocast_cast(const at::Tensor& x);

/// Forgets converted parameters, of all threads: after they were changed in a scope.
void drop_autocast_casts();

} // namespace hasten
