// LibTorch has saved-tensor hooks, but its stack of default hooks has Python objects. Every
// SavedVariable asks the engine for its default hooks through a virtual function. hasten's engine
// answers from a stack of its own, one per thread.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace hasten::detail {

/// Makes the hooks of each tensor that is saved while the factory is on top of the stack.
class SavedHookFactory {
 public:
  virtual ~SavedHookFactory() = default;
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() = 0;
  /// Called where no operation is half done, so that it may throw.
  virtual void between_operators() {}
  /// Whether it belongs to a region, so that a recomputation restores saved tensors.
  virtual bool recomputes() const { return false; }
};

/// Puts a factory on top of this thread's stack while it lives. null: no hooks.
class HookScope {
 public:
  explicit HookScope(SavedHookFactory* factory);
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;
  ~HookScope();

 private:
  SavedHookFactory* before_;
};

/// The factory on top of this thread's stack.
SavedHookFactory* current_hook_factory();

/// The first call installs hasten's engine. Returns false if an engine other than torch's was
/// installed before or since. Cost: 5 ns.
bool hook_engine_installed();

} // namespace hasten::detail
