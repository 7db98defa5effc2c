// Keeps a recomputation from writing to existing tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
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
  template <typename Run>
  void pass(const OpPassing& passing, Run&& run) {
    const OpInfo& info = op_info(passing.op);
    if (!info.writes.empty()) {
      pass_write(passing, info, std::function<void()>(std::ref(run)));
    } else {
      run();
    }
    note_results(passing);
  }

 private:
  struct Version {
    c10::VariableVersion counter;
    uint32_t version;
  };
  bool outside(const at::Tensor& tensor) const;
  at::Tensor copy_of(const at::Tensor& tensor);
  void pass_write(const OpPassing& passing, const OpInfo& info, const std::function<void()>& run);
  void note_results(const OpPassing& passing);

  std::vector<const c10::StorageImpl*> made_{};
  std::vector<Version> versions_{};
};

} // namespace hasten::detail
