// The matrix product of a linear layer. Uses whichever of LibTorch's libraries is faster on this
// CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace hasten {

/// x weight^T + bias, like torch::nn::functional::linear: x [..., in], weight [out, in], bias [out]
/// or undefined; returns [..., out]. Differentiable any number of times. Saves x and weight for
/// backward, as torch's does.
///
/// On a CPU torch uses MKL for float products. MKL runs at half its speed on x86 CPUs with AVX-512
/// that are not Intel's. There fast_linear uses oneDNN (2.2 times the speed on a Zen 5 core; sums
/// in another order, a relative difference of 1e-6). On other CPUs it has the bits of torch's linear.
/// In fp32 it makes the weight's gradient where a bucket of DDP or a buffer of FSDP has its place, without a
/// copy, and frees x before it makes x's gradient. Under autocast in bf16 it uses oneDNN, for
/// fp32 and bf16 weights: it saves x in bf16 and no converted weight (torch keeps one until
/// backward, 2 bytes per parameter), and sums the weight's gradient in fp32.
///
/// On a GPU under autocast it is one node of the graph, where torch makes eight, and the gradients of
/// weight and bias are fp32 from the product on, without torch's rounding to 16 bits. It keeps the
/// converted weight until backward, as torch does. All other cases use torch's linear: other dtypes,
/// fp16 on a CPU, and products too small to gain.
at::Tensor fast_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

/// An activation function by the name that transformers gives it: "gelu", "gelu_new", "relu", "silu",
/// "tanh", or "" for none.
struct Activation {
  std::string name{};
  /// x [..., 2 n] becomes name(x[..., :n]) * x[..., n:], as in GEGLU (Shazeer 2020, "GLU variants
  /// improve Transformer").
  bool gated = false;

  at::Tensor operator()(const at::Tensor& x) const;
  /// Gradient of x, from the gradient of the result. Differentiable.
  at::Tensor backward(const at::Tensor& gradient, const at::Tensor& x) const;
};

/// fast_linear(activation(x), weight, bias), which saves x alone for backward: backward computes
/// activation(x) again, which is cheap. For a feed-forward of width 4 H this saves 4 H elements per
/// token, a quarter of a BERT block's activations. Where torch's linear is used, both are saved.
at::Tensor fast_linear(const Activation& activation, const at::Tensor& x, const at::Tensor& weight,
                       const at::Tensor& bias = {});

/// out [m, n] in fp32 becomes a^T b, or with `add` out + a^T b, summed over the rows of a [rows, m] and
/// b [rows, n] of one dtype: a weight's gradient, or a part of it. Without autograd.
void product_over_rows(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out, bool add);

/// Whether float products use oneDNN on this CPU.
bool linear_uses_onednn();
/// Whether products under autocast in bf16 use oneDNN directly on this CPU.
bool linear_uses_bf16();

} // namespace hasten
