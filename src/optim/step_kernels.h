// What the kernel of an optimizer reads and writes: raw memory, no tensors, no threads. The kernels
// are beside their optimizers. Their loops are compiled for several vector widths. Contraction to
// fused multiply-adds is off, so that all of them give the same bits.
#pragma once

#include <cstdint>

namespace hasten::detail {

enum class StepType : uint8_t { f32, f64, bf16, f16 };

/// The arrays of one parameter. Computation is in fp64 for an fp64 parameter, else in fp32.
struct StepArrays {
  void* parameter = nullptr;
  void* gradient = nullptr;
  /// fp32 master of a 16-bit parameter, which is rounded from it; null if there is none.
  float* master = nullptr;
  /// In the optimizer's order; unused ones are null.
  void* moments[3] = {};
  /// Of moments that are codes of blockwise_8bit.h, the first one signed; else null.
  float* absmax[3] = {};
  StepType parameter_type = StepType::f32;
  StepType gradient_type = StepType::f32;
  /// f32; f64 for an fp64 parameter; or bf16 with stochastic rounding.
  StepType moment_type = StepType::f32;
  int64_t count = 0;
  /// Adafactor: count = matrices * rows * columns; columns 0: not factored.
  int64_t rows = 0;
  int64_t columns = 0;
  /// Random bits for this tensor in this step.
  uint64_t rounding_key = 0;
};

/// Content of a used gradient after the step.
enum class GradientAfter : uint8_t { keep, scaled, zero };

struct StepPass {
  /// Multiplies every gradient.
  double factor = 1;
  GradientAfter after = GradientAfter::keep;
};

/// Coefficients of a group in one step. Each kernel reads only its own.
struct StepNumbers {
  double lr = 0;
  double keep = 1; // 1 - lr weight_decay: factor of the parameter in decoupled decay
  double l2 = 0; // coefficient of the parameter that is added to its gradient
  double beta1 = 0;
  double beta2 = 0;
  double step_size = 0; // lr / (1 - beta1^step)
  double root = 1; // 1 / sqrt(1 - beta2^step)
  double eps = 0;
  double momentum = 0;
  double share = 1; // 1 - dampening
  double weight_decay = 0; // read by ATen's operations only
  double eps_scale = 0; // Adafactor's eps[1]
  double clip_threshold = 1;
  bool amsgrad = false;
  bool nesterov = false;
  bool scale_parameter = false;
};

/// Elements of a block: a kernel's first element is a multiple of it.
constexpr int64_t kStepBlock = 1024;

/// Sum over one tensor of |x| or x^2, or the largest |x| (NaN if there is one). Adds kStepBlock
/// elements in fp32 (fp64 for fp64), and these sums in fp64.
enum class NormKind : uint8_t { l1, l2, max };
double norm_sum(const void* data, StepType type, int64_t count, NormKind kind);

} // namespace hasten::detail
