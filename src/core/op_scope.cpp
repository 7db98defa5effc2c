#include "hasten/core/op_scope.h"

#include <torch/library.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <unordered_map>
#include <utility>

namespace hasten::detail {

static thread_local OpObserver* op_observer = nullptr;

static void observe_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kOpKey);
  // Operators that the kernel calls are not observed.
  const c10::impl::ExcludeDispatchKeyGuard not_inside(kOpKey);
  if (op_observer == nullptr) {
    op.redispatchBoxed(below, stack);
    return;
  }
  op_observer->pass(OpPassing{op, below, *stack});
}

OpScope::OpScope(OpObserver* observer)
    : include_(kOpKey), before_(std::exchange(op_observer, observer)) {
  // Never destroyed, because operators may run in static destructors.
  [[gnu::used]] static torch::Library* const library = [] {
    auto* made = new torch::Library(torch::Library::IMPL, "_", kOpKey, __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&observe_op>());
    return made;
  }();
}

OpScope::~OpScope() { op_observer = before_; }

void OpPassing::answer(std::vector<c10::IValue> results) const {
  torch::jit::drop(stack, arguments().size());
  std::move(results.begin(), results.end(), std::back_inserter(stack));
}

int64_t result_bytes(const OpPassing& passing) {
  int64_t bytes = 0;
  for (const c10::IValue& result : passing.results()) {
    visit_tensors(
        result, [&](const at::Tensor& tensor) { bytes += static_cast<int64_t>(tensor.nbytes()); });
  }
  return bytes;
}

c10::IValue map_tensors(const c10::IValue& value,
                        const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? change(value.toTensor()) : value;
  }
  if (value.isList()) {
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) {
      list.set(i, map_tensors(list.get(i), change));
    }
    return list;
  }
  return value;
}

OpObserver* current_op_observer() { return op_observer; }

static OpInfo make_op_info(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  OpInfo info;
  info.name = schema.operator_name().name;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      info.writes.push_back(i);
    }
  }
  // These change running statistics, which are inputs in their schemas.
  for (const char* norm :
       {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}) {
    if (info.name == norm && info.writes.empty()) {
      info.writes = {3, 4};
    }
  }
  for (const auto& result : schema.returns()) {
    info.fresh = info.fresh && result.alias_info() == nullptr;
  }
  // Views that are not marked as views in their schemas.
  for (const char* view : {"aten::_unsafe_view", "aten::unsafe_chunk", "aten::unsafe_split",
                           "aten::unsafe_split_with_sizes"}) {
    info.fresh = info.fresh && info.name != view;
  }
  info.ignored = info.name == "aten::detach" || info.name == "aten::alias";
  info.random = op.hasTag(at::Tag::nondeterministic_seeded);
  info.collective = info.name.starts_with("c10d::") ||
                    info.name.starts_with("_c10d_functional::") ||
                    info.name.starts_with("c10d_functional::");
  return info;
}

const OpInfo& op_info(const c10::OperatorHandle& op) {
  // One map per thread, so that no lock is needed. A schema lives as long as its operator.
  static thread_local std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OpInfo>> known;
  std::unique_ptr<OpInfo>& info = known[&op.schema()];
  if (!info) {
    info = std::make_unique<OpInfo>(make_op_info(op));
  }
  return *info;
}

} // namespace hasten::detail
