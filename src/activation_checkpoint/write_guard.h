// Keeps a recomputation from writing to existing tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "hasten/core/op_scope.h"

namespace hasten::detail {

/// In a recomputation: prevents writes to tensors that existed before. An operator that would
/// change such a tensor changes a copy, and its result is the tensor.
class WriteGuard {
 public:
  WriteGuard() = default;
  WriteGuard(const WriteGuard&) = delete;
  WriteGuard& operator=(const WriteGuard&) = delete;
  /// Restores version counters, because nothing was changed.
  ~WriteGuard();
  void pass(const OpPassing& passing);

 private:
  struct Version {
    c10::VariableVersion counter;
    uint32_t version;
  };
  bool outside(const at::Tensor& tensor) const;

  std::vector<const c10::StorageImpl*> made_{};
  std::vector<Version> versions_{};
};

} // namespace hasten::detail
