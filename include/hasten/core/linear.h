// The matrix product of a linear layer, by the quicker of the libraries that
// LibTorch brings for this CPU.
#pragma once

#include <ATen/core/Tensor.h>

namespace hasten {

/// x weight^T + bias, as torch::nn::functional::linear: x [..., in], weight
/// [out, in], bias [out] or undefined; returns [..., out]. Differentiable, any
/// number of times. It stores x and weight for backward, as torch's does.
///
/// torch gives float products on a CPU to MKL, which runs at half its speed on
/// x86 CPUs with AVX-512 that are not Intel's; there they go to oneDNN (2.2 times
/// the speed on a Zen 5 core, sums in another order: a relative 1e-6). Under
/// autocast in bf16 they are made by oneDNN too, in the same pieces, of fp32 and of bf16
/// weights: x is stored in bf16, no converted weight is (torch keeps them all until
/// backward: 2 bytes a parameter), and the weight's gradient is summed in fp32. All else, other CPUs,
/// devices, dtypes, fp16 and products too small to gain, is torch's own linear.
at::Tensor fast_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

/// Whether this CPU's float products go to oneDNN.
bool linear_uses_onednn();
/// Whether its products under autocast in bf16 are made here.
bool linear_uses_bf16();

} // namespace hasten
