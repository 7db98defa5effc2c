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

// Copies replace the tensors in the arguments, and the tensors replace the copies in the results.
void WriteGuard::pass(const OpPassing& passing) {
  const OpInfo& info = op_info(passing.op);
  std::vector<std::pair<at::Tensor, at::Tensor>> copies; // copy, tensor
  for (const size_t argument : info.writes) {
    c10::IValue& value = passing.arguments()[argument];
    value = map_tensors(value, [&](const at::Tensor& tensor) {
      if (!outside(tensor)) {
        return tensor;
      }
      if (!tensor.is_inference()) {
        const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
        versions_.push_back({counter, counter.current_version()});
      }
      return copies.emplace_back(tensor.clone(), tensor).first;
    });
  }
  passing.run();
  for (c10::IValue& result : passing.results()) {
    for (const auto& [copy, tensor] : copies) {
      if (result.isTensor() && result.toTensor().is_same(copy)) {
        result = tensor;
        break;
      }
    }
    if (info.fresh) { // a view of an existing tensor does not make it the guard's own
      visit_tensors(result, [&](const at::Tensor& tensor) {
        if (tensor.has_storage()) {
          made_.push_back(tensor.storage().unsafeGetStorageImpl());
        }
      });
    }
  }
}

} // namespace hasten::detail
