// A collective as a back end of c10d runs it, and its text in messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "group_core.h"

namespace hasten::detail {

/// The operation's tensors in messages: "sum of Float [3] to rank 0".
std::string collective_text(const Collective& what);

c10d::ReduceOp::RedOpType c10d_op(ReduceOp op);

/// The failure in the current exception of a back end.
OperationFailure current_failure();
/// Without an error the operation has its result.
void complete(GroupCore::Started& state, const std::exception_ptr& error);

/// One collective: all kinds, but reduce_scatter only where the back end has its dtypes.
struct BackendCall {
  /// Makes the copies that the operation needs: of 16-bit tensors, to add in fp32, and of what a
  /// rank that is not the root gives to a reduce. `what` is checked. `sums_narrow`: the back end adds
  /// 16-bit tensors in their own dtype, and that is wanted.
  BackendCall(const Collective& what, int rank, int world_size, bool sums_narrow = false);
  /// The back end writes into the tensors of this object, which must be kept.
  c10::intrusive_ptr<c10d::Work> start(c10d::Backend& backend);

  std::function<void()> finish; // completes the result once the operation has ended; may be empty

 private:
  // Keeps the caller's tensors. Without the name, which is the caller's text; `op` is what the back
  // end does.
  Collective what_;
  bool root_;
  std::vector<at::Tensor> own_;
  std::vector<std::vector<at::Tensor>> rows_; // of the root
  at::Tensor to_;
};

} // namespace hasten::detail
