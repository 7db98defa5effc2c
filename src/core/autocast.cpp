#include "hasten/core/autocast.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <algorithm>
#include <iterator>

#include "hasten/base/error.h"
#include "hasten/core/op_scope.h"

namespace hasten {

namespace detail {

static thread_local Fp32Ops fp32_ops = Fp32Ops::torch_list;

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
  call_in_fp32(op, keys, stack, fp32_ops == Fp32Ops::as_on_gpus && !names_dtype(op, *stack));
}

// oneDNN has no LSTM in fp16 on CPUs.
static void lstm_in_fp32(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack) {
  call_in_fp32(op, keys, stack, at::autocast::get_autocast_dtype(at::kCPU) == at::kHalf);
}

// The first scope registers the kernels, once per process. Outside hasten's scopes they only
// redispatch.
static void register_fp32_ops() {
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

} // namespace detail

AutocastState AutocastState::now(const std::vector<at::Tensor>& tensors) {
  AutocastState state;
  state.devices_[1].type = at::getAccelerator().value_or(at::DeviceType::CUDA);
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && !tensor.is_cpu() && !tensor.is_meta()) {
      state.devices_[1].type = tensor.device().type();
      break;
    }
  }
  return state.again();
}

AutocastState AutocastState::again() const {
  AutocastState state = *this;
  for (OnDevice& on : state.devices_) {
    on.enabled = at::autocast::is_autocast_enabled(on.type);
    on.dtype = at::autocast::get_autocast_dtype(on.type);
  }
  state.cache_ = at::autocast::is_autocast_cache_enabled();
  state.fp32_ops_ = detail::fp32_ops;
  return state;
}

void AutocastState::restore() const {
  for (const OnDevice& on : devices_) {
    at::autocast::set_autocast_enabled(on.type, on.enabled);
    at::autocast::set_autocast_dtype(on.type, on.dtype);
  }
  at::autocast::set_autocast_cache_enabled(cache_);
  detail::fp32_ops = fp32_ops_;
}

bool AutocastState::enabled() const { return std::ranges::any_of(devices_, &OnDevice::enabled); }

Autocast::Autocast(const AutocastOptions& options) : before_(AutocastState::now()) {
  const at::ScalarType dtype =
      options.dtype.value_or(options.device == at::kCPU ? at::kBFloat16 : at::kHalf);
  if (dtype != at::kBFloat16 && dtype != at::kHalf) {
    throw InputError("core::Autocast", std::string("dtype=") + c10::toString(dtype),
                     "BFloat16 or Half", "leave Autocast out, or set enabled=false, for fp32");
  }
  if (!at::autocast::is_autocast_available(options.device)) {
    throw InputError("core::Autocast", "device=" + c10::DeviceTypeName(options.device, true),
                     "cpu, cuda or another device for which LibTorch has autocast");
  }
  detail::register_fp32_ops();
  at::autocast::set_autocast_enabled(options.device, options.enabled);
  at::autocast::set_autocast_dtype(options.device, dtype);
  at::autocast::set_autocast_cache_enabled(options.cache_enabled);
  if (options.device == at::kCPU) {
    detail::fp32_ops = options.fp32_ops;
  }
  at::autocast::increment_nesting();
}

Autocast::Autocast(const AutocastState& state) : before_(state.again()) {
  detail::register_fp32_ops();
  state.restore();
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
  before_.restore();
}

std::optional<at::ScalarType> autocast_dtype(at::DeviceType device) {
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) {
    return std::nullopt;
  }
  return at::autocast::get_autocast_dtype(device);
}

at::Tensor autocast_cast(const at::Tensor& x) {
  if (!x.defined() || !x.is_floating_point() || x.scalar_type() == at::kDouble) {
    return x;
  }
  const auto dtype = autocast_dtype(x.device().type());
  return dtype ? x.to(*dtype) : x;
}

void drop_autocast_casts() { at::autocast::clear_cache(); }

} // namespace hasten
