// A scope in which matrix products run in 16 bits:
//
//   {
//     const hasten::Autocast autocast({.dtype = at::kBFloat16});
//     loss = cross_entropy(model->forward(x), y);
//   }
//   loss.backward(); // outside the scope; uses the dtypes of the forward
//
// It is torch's own autocast (at::autocast), like torch.autocast in Python: operators convert
// their inputs, and parameters stay fp32. hasten adds:
//   * The scope restores the settings at its end, also after an exception. Scopes nest.
//   * Fp32Ops: torch's list for the CPU leaves normalisations and softmax in 16 bits.
//   * LSTMs in fp16 run in fp32 on the CPU, where oneDNN has no fp16 LSTM.
// Every other operator of torch's 16-bit list runs in fp16 and bf16 on the CPU. If an operator
// that is not in the list has no kernel for a 16-bit input, torch's error names it. Put
// Autocast({.enabled = false}) around it and pass x.to(at::kFloat).
// Threading: each thread has its own settings, and a new thread has none: pass it
// AutocastState::now() of the thread that starts it. Backward uses the dtypes of the forward in
// every thread. Regions of activation_checkpoint are recomputed with the settings of their
// forward. Cost: writes to thread-local variables.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <vector>

namespace hasten {

/// Which operators compute in fp32 on the CPU, whatever the dtype of their inputs. Losses,
/// matrix decompositions and transforms always do.
enum class Fp32Ops {
  /// The same operators as on GPUs: softmax, log_softmax, layer_norm, group_norm, rms_norm,
  /// norms, sums, cumulative sums and products, logsumexp, exp, logarithms, powers,
  /// reciprocals, softplus, distances. This is torch's list for CUDA without interpolations.
  /// Their results are fp32.
  as_on_gpus,
  /// Only torch's list for the CPU. The operators above then round their results to 16 bits,
  /// and take half the memory and time.
  torch_list,
};

struct AutocastOptions {
  c10::DeviceType device = c10::DeviceType::CPU;
  /// kBFloat16 or kHalf. Empty: kBFloat16 on the CPU, kHalf on other devices.
  std::optional<c10::ScalarType> dtype{};
  /// False: nothing is converted in this scope, even inside one that converts.
  bool enabled = true;
  /// Converts each parameter once and keeps the 16-bit copy until the outermost scope ends, which
  /// takes half the parameter's bytes. Do not step an optimizer inside a scope: the copies would
  /// have the old values. (The Accelerator and GradScaler drop the copies.)
  bool cache_enabled = true;
  /// Only used if `device` is the CPU.
  Fp32Ops fp32_ops = Fp32Ops::as_on_gpus;
};

/// The autocast settings of a thread, as a value for another thread or a later time.
class AutocastState {
 public:
  /// Settings of this thread for the CPU and for the device of the first tensor that is not on
  /// the CPU (if there is none, for the accelerator that LibTorch has).
  static AutocastState now(const std::vector<at::Tensor>& tensors = {});
  /// This thread's present settings for the same devices.
  AutocastState again() const;
  /// Sets this thread's settings to this state.
  void restore() const;
  /// Whether autocast is on for any of the devices.
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
  /// Throws InputError if the dtype is not kBFloat16 or kHalf.
  explicit Autocast(const AutocastOptions& options = {});
  /// Uses settings that AutocastState::now() returned in another thread or earlier.
  explicit Autocast(const AutocastState& state);
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast();

 private:
  AutocastState before_;
};

/// The dtype to which this thread's autocast converts inputs on the device; empty if it is off.
std::optional<c10::ScalarType> autocast_dtype(c10::DeviceType device = c10::DeviceType::CPU);

/// Converts `x` as a matrix product would: to autocast's dtype if autocast is on for its device
/// and `x` is floating-point but not fp64. Otherwise returns `x`. Differentiable. Saves
/// conversions if several products read one tensor.
at::Tensor autocast_cast(const at::Tensor& x);

/// Drops the converted copies of parameters of all threads. Call it after changing parameters
/// in a scope.
void drop_autocast_casts();

} // namespace hasten
