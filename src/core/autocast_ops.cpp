#include "autocast_ops.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace hasten::detail {

static thread_local Fp32Ops current_fp32_ops = Fp32Ops::torch_list;

Fp32Ops fp32_ops() { return current_fp32_ops; }
void set_fp32_ops(Fp32Ops ops) { current_fp32_ops = ops; }

// Note [Operators in fp32]
// torch registers no kernel under AutocastCPU for softmax, layer_norm and similar operators. They
// compute in the dtype of their inputs: 16 bits after a matrix product. These kernels equal torch's
// under AutocastCUDA: convert the inputs, then call the operator with autocast off inside it.
constexpr c10::DispatchKeySet kBelowAutocast(c10::DispatchKeySet::FULL_AFTER,
                                             c10::DispatchKey::AutocastCPU);

template <typename Op, typename... Args>
auto call_in_fp32(const Args&... args) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastCPU);
  return Op::call(at::autocast::cached_cast(at::kFloat, args, at::DeviceType::CPU)...);
}

template <typename Op, typename Schema = typename Op::schema>
struct InFp32;

template <typename Op, typename Result, typename... Args>
struct InFp32<Op, Result(Args...)> {
  static Result call(c10::DispatchKeySet keys, Args... args) {
    return fp32_ops() == Fp32Ops::torch_list ? Op::redispatch(keys & kBelowAutocast, args...)
                                             : call_in_fp32<Op>(args...);
  }
};

// A call that names the dtype of the result gets that dtype.
static bool names_dtype(const std::optional<at::ScalarType>& dtype) { return dtype.has_value(); }
template <typename Other>
bool names_dtype(const Other& /*unused*/) {
  return false;
}

template <typename Op, typename Schema = typename Op::schema>
struct InFp32UnlessNamed;

template <typename Op, typename Result, typename... Args>
struct InFp32UnlessNamed<Op, Result(Args...)> {
  static Result call(c10::DispatchKeySet keys, Args... args) {
    return fp32_ops() == Fp32Ops::torch_list || (names_dtype(args) || ...)
               ? Op::redispatch(keys & kBelowAutocast, args...)
               : call_in_fp32<Op>(args...);
  }
};

// oneDNN has no LSTM in fp16 on CPUs.
template <typename Op, typename Schema = typename Op::schema>
struct LstmInFp32;

template <typename Op, typename Result, typename... Args>
struct LstmInFp32<Op, Result(Args...)> {
  static Result call(c10::DispatchKeySet keys, Args... args) {
    return at::autocast::get_autocast_dtype(at::kCPU) != at::kHalf
               ? Op::redispatch(keys & kBelowAutocast, args...)
               : call_in_fp32<Op>(args...);
  }
};

#define HASTEN_FP32(name, op) library.impl(name, TORCH_FN((&InFp32<at::_ops::op>::call)))
#define HASTEN_FP32_UNLESS_NAMED(name, op) \
  library.impl(name, TORCH_FN((&InFp32UnlessNamed<at::_ops::op>::call)))

static void register_normalisations(torch::Library& library) {
  HASTEN_FP32("layer_norm", layer_norm);
  HASTEN_FP32("native_layer_norm", native_layer_norm);
  HASTEN_FP32("group_norm", group_norm);
  HASTEN_FP32("rms_norm", rms_norm);
  HASTEN_FP32("norm.Scalar", norm_Scalar);
  HASTEN_FP32("norm.ScalarOpt_dim", norm_ScalarOpt_dim);
  HASTEN_FP32("frobenius_norm.dim", frobenius_norm_dim);
  HASTEN_FP32("nuclear_norm", nuclear_norm);
  HASTEN_FP32("nuclear_norm.dim", nuclear_norm_dim);
  HASTEN_FP32("renorm", renorm);
  HASTEN_FP32("cosine_similarity", cosine_similarity);
  HASTEN_FP32("dist", dist);
  HASTEN_FP32("pdist", pdist);
  HASTEN_FP32("logsumexp", logsumexp);
  HASTEN_FP32_UNLESS_NAMED("softmax.int", softmax_int);
  HASTEN_FP32_UNLESS_NAMED("log_softmax.int", log_softmax_int);
  HASTEN_FP32_UNLESS_NAMED("sum", sum);
  HASTEN_FP32_UNLESS_NAMED("sum.dim_IntList", sum_dim_IntList);
  HASTEN_FP32_UNLESS_NAMED("cumsum", cumsum);
  HASTEN_FP32_UNLESS_NAMED("cumprod", cumprod);
  HASTEN_FP32_UNLESS_NAMED("linalg_vector_norm", linalg_vector_norm);
  HASTEN_FP32_UNLESS_NAMED("linalg_matrix_norm", linalg_matrix_norm);
  HASTEN_FP32_UNLESS_NAMED("linalg_matrix_norm.str_ord", linalg_matrix_norm_str_ord);
}

static void register_functions(torch::Library& library) {
  HASTEN_FP32("acos", acos);
  HASTEN_FP32("asin", asin);
  HASTEN_FP32("cosh", cosh);
  HASTEN_FP32("erfinv", erfinv);
  HASTEN_FP32("exp", exp);
  HASTEN_FP32("expm1", expm1);
  HASTEN_FP32("log", log);
  HASTEN_FP32("log10", log10);
  HASTEN_FP32("log2", log2);
  HASTEN_FP32("log1p", log1p);
  HASTEN_FP32("reciprocal", reciprocal);
  HASTEN_FP32("rsqrt", rsqrt);
  HASTEN_FP32("sinh", sinh);
  HASTEN_FP32("tan", tan);
  HASTEN_FP32("pow.Tensor_Scalar", pow_Tensor_Scalar);
  HASTEN_FP32("pow.Tensor_Tensor", pow_Tensor_Tensor);
  HASTEN_FP32("pow.Scalar", pow_Scalar);
  HASTEN_FP32("softplus", softplus);
}

#undef HASTEN_FP32
#undef HASTEN_FP32_UNLESS_NAMED

void register_fp32_ops() {
  static const torch::Library library = [] {
    torch::Library made(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastCPU, __FILE__,
                        __LINE__);
    register_normalisations(made);
    register_functions(made);
    made.impl("lstm.input", TORCH_FN((&LstmInFp32<at::_ops::lstm_input>::call)));
    return made;
  }();
}

} // namespace hasten::detail
