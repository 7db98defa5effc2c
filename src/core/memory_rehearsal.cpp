#include "hasten/core/memory_rehearsal.h"

#include <ATen/EmptyTensor.h>
#include <ATen/OpMathType.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <string>
#include <vector>

#include "hasten/core/op_scope.h"

namespace hasten {

namespace detail {

static at::Tensor on_meta(const at::Tensor& tensor) {
  at::Tensor meta(
      at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return meta;
}

static at::Tensor on_cpu(const at::Tensor& meta) {
  return at::Tensor(
      at::detail::empty_strided_cpu(meta.sizes(), meta.strides(), meta.scalar_type()));
}

/// Results of operators without a meta kernel, for meta arguments. Empty for other operators.
static std::vector<at::Tensor> rule_results(const std::string& name,
                                            const torch::jit::Stack& arguments) {
  const auto tensor = [&](size_t i) {
    return arguments[i].isTensor() ? arguments[i].toTensor() : at::Tensor();
  };
  const auto like = [&](size_t i) {
    return tensor(i).defined() ? at::empty_like(tensor(i)) : at::Tensor();
  };
  const auto by_token = [&](size_t i) { // [B, heads, T, width], in memory [B, T, heads, width]
    return at::empty_like(tensor(i).transpose(1, 2), {}, at::MemoryFormat::Contiguous)
        .transpose(1, 2);
  };
  if (name == "aten::native_layer_norm") {
    std::vector<int64_t> rows = tensor(0).sizes().vec();
    std::fill(rows.end() - static_cast<int64_t>(arguments[1].toDimVector().size()), rows.end(), 1);
    const auto options = tensor(2).defined() ? tensor(2).options() : tensor(0).options();
    return {like(0), at::empty(rows, options), at::empty(rows, options)};
  }
  if (name == "aten::native_layer_norm_backward") {
    const auto wanted = arguments[7].toBoolList();
    return {wanted[0] ? like(1) : at::Tensor(), wanted[1] ? like(5) : at::Tensor(),
            wanted[2] ? like(6) : at::Tensor()};
  }
  if (name == "aten::relu") {
    return {like(0)};
  }
  if (name == "aten::embedding") {
    std::vector<int64_t> sizes = tensor(1).sizes().vec();
    sizes.push_back(tensor(0).size(1));
    return {at::empty(sizes, tensor(0).options())};
  }
  if (name == "aten::embedding_dense_backward") {
    return {at::empty({arguments[2].toInt(), tensor(0).size(-1)}, tensor(0).options())};
  }
  if (name == "aten::_scaled_dot_product_flash_attention_for_cpu") {
    return {by_token(0),
            at::empty(tensor(0).sizes().slice(0, 3),
                      tensor(0).options().dtype(at::toOpMathType(tensor(0).scalar_type())))};
  }
  if (name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward") {
    return {by_token(1), by_token(2), by_token(3)};
  }
  return {};
}

/// Results of an operator that creates tensors, without memory.
static torch::jit::Stack results_on_meta(const c10::OperatorHandle& op, const std::string& name,
                                         torch::jit::Stack stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  for (size_t i = 0; i < stack.size(); ++i) {
    stack[i] = op.schema().arguments()[i].name() == "device" ? c10::IValue(c10::Device(at::kMeta))
                                                             : map_tensors(stack[i], on_meta);
  }
  if (const auto results = rule_results(name, stack); !results.empty()) {
    stack.assign(results.begin(), results.end());
  } else {
    op.callBoxed(&stack);
  }
  for (c10::IValue& result : stack) {
    result = map_tensors(result, on_cpu);
  }
  return stack;
}

// Views run. In-place operators do nothing. For all others only the shapes are computed.
class ShapeObserver final : public OpObserver {
 public:
  void pass(const OpPassing& passing) override {
    const OpInfo& info = op_info(passing.op);
    const auto arguments = passing.arguments();
    const bool composite =
        passing.op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
        !passing.op.hasKernelForDispatchKey(c10::DispatchKey::CPU); // silu_backward has both
    // Consists of operators, which are observed too.
    if (composite || info.name.rfind("hasten::", 0) == 0) {
      const auto keys = c10::impl::tls_local_dispatch_key_set();
      const c10::impl::ForceDispatchKeyGuard inside(keys.included_,
                                                    keys.excluded_ - c10::DispatchKeySet(kOpKey));
      passing.run();
      return;
    }
    const size_t returned = passing.op.schema().returns().size();
    torch::jit::Stack results;
    if (!info.writes.empty() && (!info.fresh || returned == 0)) {
      for (size_t i = 0; i < returned; ++i) {
        results.push_back(arguments[info.writes[i]]);
      }
    } else if (!info.fresh) {
      passing.run();
      return;
    } else if (info.name == "aten::_local_scalar_dense") {
      results.emplace_back(c10::Scalar(0));
    } else {
      results = results_on_meta(passing.op, info.name, {arguments.begin(), arguments.end()});
    }
    passing.answer(std::move(results));
  }

 private:
  OpScope scope_{this};
};

} // namespace detail

MemoryRehearsal::MemoryRehearsal()
    : without_memory_(detail::without_memory()),
      observer_(std::make_shared<detail::ShapeObserver>()) {}

} // namespace hasten
