// Operators as they reach their kernels: a boxed fallback on a spare dispatch key
// below autograd and autocast, above back ends. It is on in this thread only while
// an OpScope lives; elsewhere it costs nothing.
// Threading: every function speaks of the calling thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <vector>

#include "hasten/core/recompute.h"

namespace hasten::detail {

/// One operator on its way.
struct OpPassing {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet below;
  torch::jit::Stack& stack;

  size_t arguments() const { return op.schema().arguments().size(); }
  /// Runs the kernel: arguments on the stack become results.
  void run() const { op.redispatchBoxed(below, &stack); }
};

/// Steps in where operators pass. Each must run `passing` once, or put its results
/// on the stack itself.
class OpObserver {
 public:
  virtual ~OpObserver() = default;
  virtual void pass(const OpPassing& passing) = 0;
};

/// Operators of this thread go through `observer` while it lives; the observer
/// that was there before is asleep.
class OpScope {
 public:
  explicit OpScope(OpObserver* observer);
  OpScope(const OpScope&) = delete;
  OpScope& operator=(const OpScope&) = delete;
  ~OpScope();

 private:
  c10::impl::IncludeDispatchKeyGuard include_;
  OpObserver* before_;
};
OpObserver* current_op_observer();

/// What does not change about an operator, looked up once.
struct OpInfo {
  std::string name{}; // "aten::mm"
  std::vector<size_t> writes{}; // arguments that it changes in place
  bool fresh = true; // results have storages of their own
  bool ignored = false; // detach: how often it runs differs by design
  bool random = false; // draws from a generator
  bool collective = false;
};
const OpInfo& op_info(const c10::OperatorHandle& op);

/// Calls visit(tensor) for each defined tensor in the value.
template <typename Visit>
void visit_tensors(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      visit(value.toTensor());
    }
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined()) {
        visit(tensor);
      }
    }
  }
}

} // namespace hasten::detail
