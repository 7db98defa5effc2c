// Observes operators before their kernels run: a boxed fallback on an unused dispatch key, below
// autograd and autocast and above back ends. It is active only in a thread with a live OpScope,
// and costs nothing elsewhere.
// Threading: every function affects the calling thread only.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "hasten/core/recompute.h"

namespace hasten::detail {

/// One call of an operator.
struct OpPassing {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet below;
  torch::jit::Stack& stack;

  /// The arguments on the stack, until the kernel has run.
  std::span<c10::IValue> arguments() const {
    return std::span(stack).last(op.schema().arguments().size());
  }
  /// The results on the stack, afterwards.
  std::span<c10::IValue> results() const {
    return std::span(stack).last(op.schema().returns().size());
  }
  /// Runs the kernel, which replaces the arguments on the stack by its results.
  void run() const { op.redispatchBoxed(below, &stack); }
  /// Replaces the arguments by these results instead.
  void answer(std::vector<c10::IValue> results) const;
};
/// Bytes of the results' tensors.
int64_t result_bytes(const OpPassing& passing);

/// Is called for each operator. pass() must run `passing` once, or replace the arguments on the
/// stack by results itself.
class OpObserver {
 public:
  virtual ~OpObserver() = default;
  virtual void pass(const OpPassing& passing) = 0;
};

/// While an object lives, each operator that this thread calls goes to `observer`, but not those
/// that its kernel calls. The previous observer gets none until then.
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

/// Fixed properties of an operator. They are looked up once.
struct OpInfo {
  std::string name{}; // "aten::mm"
  std::vector<size_t> writes{}; // arguments that it changes in-place
  bool fresh = true; // results have their own storages
  bool ignored = false; // detach: the number of its calls may differ in a recomputation
  bool random = false; // draws from a generator
  bool collective = false;
};
const OpInfo& op_info(const c10::OperatorHandle& op);

/// Calls visit(tensor) for each defined tensor in the value.
template <typename Visit>
void visit_tensors(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor() && value.toTensor().defined()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) {
      visit_tensors(item, visit);
    }
  }
}
/// Returns the value with each defined tensor replaced by change(tensor), including those in
/// lists.
c10::IValue map_tensors(const c10::IValue& value,
                        const std::function<at::Tensor(const at::Tensor&)>& change);

} // namespace hasten::detail
