// The scope of LocalSGD, as the accelerator sees it.
#pragma once

#include <vector>

#include "hasten/core/stateful.h"
#include "parts.h"

namespace hasten::detail {

/// What the accelerator calls of an open LocalSGD.
class LocalScope : public Stateful {
 public:
  /// The model whose windows reduce nothing.
  virtual size_t model() const = 0;
  /// Takes part in the others' synchronisations until all ranks wait. Then all have the same number
  /// of steps. Collective, blocking.
  virtual void wait_for_peers() = 0;
  /// A state was loaded: the last window has been counted.
  virtual void loaded() = 0;
};

class LocalWindows : private WindowParts {
 public:
  LocalWindows(const WindowParts& parts, OptimizerSet& optimizers)
      : WindowParts(parts), optimizers_(optimizers) {}

  /// Throws InputError if there is a scope, or the model's window is open.
  void open(LocalScope& scope);
  void close() noexcept;
  /// Null: none is open.
  LocalScope* scope() const { return scope_; }
  /// Its model reduces nothing.
  bool is_local() const;
  /// Between windows: whether the scope's model reduces nothing.
  void set_local(bool local);

  void collect(StateToSave& parts) const;
  /// Before the windows: it says which of them reduce.
  void add_scope_to(StateToLoad& load);
  /// After what is shared, which is rank 0's.
  void add_to(StateToLoad& load);

 private:
  OptimizerSet& optimizers_;
  LocalScope* scope_ = nullptr;
};

} // namespace hasten::detail
