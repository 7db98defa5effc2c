#include "autocast_ops.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <algorithm>

#include "hasten/core/op_scope.h"

namespace hasten::detail {

static thread_local Fp32Ops current_fp32_ops = Fp32Ops::torch_list;

Fp32Ops fp32_ops() { return current_fp32_ops; }
void set_fp32_ops(Fp32Ops ops) { current_fp32_ops = ops; }

// Note [Operators in fp32]
// torch registers no kernel under AutocastCPU for softmax, layer_norm and similar operators. They
// compute in the dtype of their inputs: 16 bits after a matrix product. These kernels equal torch's
// under AutocastCUDA: convert the inputs, then call the operator with autocast off inside it. A
// call that names the dtype of the result gets that dtype.
constexpr const char* kFp32Ops[] = {
    // normalisations and sums
    "layer_norm", "native_layer_norm", "group_norm", "rms_norm", "norm.Scalar",
    "norm.ScalarOpt_dim", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "renorm",
    "cosine_similarity", "dist", "pdist", "logsumexp", "softmax.int", "log_softmax.int", "sum",
    "sum.dim_IntList", "cumsum", "cumprod", "linalg_vector_norm", "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    // functions
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
    "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus"};

static bool names_dtype(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const auto dtype = op.schema().argumentIndexWithName("dtype");
  return dtype && !torch::jit::peek(stack, static_cast<size_t>(*dtype), arguments.size()).isNone();
}

static void call_in_fp32(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack, bool in_fp32) {
  if (!in_fp32) {
    op.redispatchBoxed(
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::AutocastCPU),
        stack);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastCPU);
  const auto count = static_cast<int64_t>(op.schema().arguments().size());
  std::transform(stack->end() - count, stack->end(), stack->end() - count,
                 [](const c10::IValue& argument) {
                   return map_tensors(argument, [](const at::Tensor& tensor) {
                     return at::autocast::cached_cast(at::kFloat, tensor, at::DeviceType::CPU);
                   });
                 });
  op.callBoxed(stack);
}

static void in_fp32(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack) {
  call_in_fp32(op, keys, stack, fp32_ops() == Fp32Ops::as_on_gpus && !names_dtype(op, *stack));
}

// oneDNN has no LSTM in fp16 on CPUs.
static void lstm_in_fp32(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack) {
  call_in_fp32(op, keys, stack, at::autocast::get_autocast_dtype(at::kCPU) == at::kHalf);
}

void register_fp32_ops() {
  static const torch::Library library = [] {
    torch::Library made(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastCPU, __FILE__,
                        __LINE__);
    for (const char* op : kFp32Ops) {
      made.impl(op, torch::CppFunction::makeFromBoxedFunction<&in_fp32>());
    }
    made.impl("lstm.input", torch::CppFunction::makeFromBoxedFunction<&lstm_in_fp32>());
    return made;
  }();
}

} // namespace hasten::detail
