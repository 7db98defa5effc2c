// LibTorch has saved-tensor hooks, but its stack of default hooks holds Python
// objects. Every SavedVariable asks the engine for its default hooks through a
// virtual function: an engine of ours answers from a stack of this thread.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace hasten::detail {

/// Makes the hooks of each tensor that is saved while it is on top of the stack.
class SavedHookFactory {
 public:
  virtual ~SavedHookFactory() = default;
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() = 0;
  /// Called where nothing is half done, so that the code which saves may be left.
  virtual void between_operators() {}
  /// Whether it is a region's: what is saved comes back by a recomputation.
  virtual bool recomputes() const { return false; }
};

/// On top of this thread's stack while it lives; null: tensors are saved plainly.
class HookScope {
 public:
  explicit HookScope(SavedHookFactory* factory);
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;
  ~HookScope();

 private:
  SavedHookFactory* before_;
};

/// What is on top of this thread's stack.
SavedHookFactory* current_hook_factory();

/// Puts our engine in place at the first call. False where another engine than
/// torch's own is there, or took its place since. 5 ns.
bool hook_engine_installed();

} // namespace hasten::detail
