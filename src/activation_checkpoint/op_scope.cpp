#include "op_scope.h"

#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace hasten::detail {

static thread_local OpObserver* op_observer = nullptr;

static void observe_op(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  const auto below =
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kOpKey);
  // What the kernel calls is the kernel's own business.
  const c10::impl::ExcludeDispatchKeyGuard not_inside(kOpKey);
  if (op_observer == nullptr) {
    op.redispatchBoxed(below, stack);
    return;
  }
  op_observer->pass(OpPassing{op, below, *stack});
}

static void register_op_fallback() {
  // Leaked: operators may run in static destructors.
  static auto* library = [] {
    auto* made = new torch::Library(
        torch::Library::IMPL, "_", kOpKey, __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&observe_op>());
    return made;
  }();
  static_cast<void>(library);
}

static OpObserver* swap_op_observer(OpObserver* observer) {
  register_op_fallback();
  return std::exchange(op_observer, observer);
}

OpScope::OpScope(OpObserver* observer)
    : include_(kOpKey), before_(swap_op_observer(observer)) {}
OpScope::~OpScope() { op_observer = before_; }

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
  // These change running statistics that their schemas call inputs.
  for (const char* norm :
       {"aten::native_batch_norm",
        "aten::cudnn_batch_norm",
        "aten::miopen_batch_norm"}) {
    if (info.name == norm && info.writes.empty()) {
      info.writes = {3, 4};
    }
  }
  for (const auto& result : schema.returns()) {
    info.fresh = info.fresh && result.alias_info() == nullptr;
  }
  // Views that their schemas do not call views.
  for (const char* view :
       {"aten::_unsafe_view",
        "aten::unsafe_chunk",
        "aten::unsafe_split",
        "aten::unsafe_split_with_sizes"}) {
    info.fresh = info.fresh && info.name != view;
  }
  info.ignored = info.name == "aten::detach" || info.name == "aten::alias";
  info.random = op.hasTag(at::Tag::nondeterministic_seeded);
  info.collective = info.name.rfind("c10d::", 0) == 0 ||
                    info.name.rfind("_c10d_functional::", 0) == 0 ||
                    info.name.rfind("c10d_functional::", 0) == 0;
  return info;
}

const OpInfo& op_info(const c10::OperatorHandle& op) {
  // By thread: no lock on the way. A schema lives as long as its operator.
  static thread_local std::
      unordered_map<const c10::FunctionSchema*, std::unique_ptr<OpInfo>>
          known;
  std::unique_ptr<OpInfo>& info = known[&op.schema()];
  if (!info) {
    info = std::make_unique<OpInfo>(make_op_info(op));
  }
  return *info;
}

WriteGuard::~WriteGuard() {
  for (auto& [counter, version] : versions_) {
    counter.set_version(version);
  }
}

bool WriteGuard::outside(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) {
    return false;
  }
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  return std::find(made_.begin(), made_.end(), storage) == made_.end();
}

at::Tensor WriteGuard::copy_of(const at::Tensor& tensor) {
  if (!tensor.is_inference()) {
    const c10::VariableVersion& counter =
        tensor.unsafeGetTensorImpl()->version_counter();
    versions_.push_back({counter, counter.current_version()});
  }
  return tensor.clone();
}

// The copies stand in for the tensors in arguments, and the tensors for the copies
// in results.
void WriteGuard::pass_write(
    const OpPassing& passing,
    const OpInfo& info,
    const std::function<void()>& run) {
  std::vector<std::pair<at::Tensor, at::Tensor>> copies; // copy, tensor
  const auto replaced = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !outside(tensor)) {
      return tensor;
    }
    copies.emplace_back(copy_of(tensor), tensor);
    return copies.back().first;
  };
  const size_t first = passing.stack.size() - passing.arguments();
  for (const size_t argument : info.writes) {
    c10::IValue& value = passing.stack[first + argument];
    if (value.isTensor()) {
      value = replaced(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list = value.toTensorVector();
      std::transform(list.begin(), list.end(), list.begin(), replaced);
      value = std::move(list);
    }
  }
  run();
  if (copies.empty()) {
    return;
  }
  const auto original = [&](const at::Tensor& result) {
    for (const auto& [copy, tensor] : copies) {
      if (result.is_same(copy)) {
        return tensor;
      }
    }
    return result;
  };
  const size_t results = passing.op.schema().returns().size();
  for (size_t i = passing.stack.size() - results; i < passing.stack.size();
       ++i) {
    c10::IValue& value = passing.stack[i];
    if (value.isTensor()) {
      value = original(value.toTensor());
    }
  }
}

void WriteGuard::note_results(const OpPassing& passing) {
  if (!op_info(passing.op).fresh) {
    return; // a view of something outside does not make it ours
  }
  const size_t results = passing.op.schema().returns().size();
  for (size_t i = passing.stack.size() - results; i < passing.stack.size();
       ++i) {
    visit_tensors(passing.stack[i], [&](const at::Tensor& tensor) {
      if (tensor.has_storage()) {
        made_.push_back(tensor.storage().unsafeGetStorageImpl());
      }
    });
  }
}

} // namespace hasten::detail
