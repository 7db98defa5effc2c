#include "write_guard.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace hasten::detail {

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
    const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
    versions_.push_back({counter, counter.current_version()});
  }
  return tensor.clone();
}

// Copies replace the tensors in the arguments, and the tensors replace the copies in the results.
void WriteGuard::pass_write(const OpPassing& passing, const OpInfo& info,
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
  for (size_t i = passing.stack.size() - results; i < passing.stack.size(); ++i) {
    c10::IValue& value = passing.stack[i];
    if (value.isTensor()) {
      value = original(value.toTensor());
    }
  }
}

void WriteGuard::note_results(const OpPassing& passing) {
  if (!op_info(passing.op).fresh) {
    return; // a view of an existing tensor does not make it the guard's own
  }
  const size_t results = passing.op.schema().returns().size();
  for (size_t i = passing.stack.size() - results; i < passing.stack.size(); ++i) {
    visit_tensors(passing.stack[i], [&](const at::Tensor& tensor) {
      if (tensor.has_storage()) {
        made_.push_back(tensor.storage().unsafeGetStorageImpl());
      }
    });
  }
}

} // namespace hasten::detail
