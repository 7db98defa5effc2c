// The scope of LocalSGD, as the accelerator sees it.
#pragma once

#include <vector>

#include "hasten/core/stateful.h"
#include "optimizer_set.h"

namespace hasten::detail {

/// What the accelerator calls of an open LocalSGD.
class LocalScope : public Stateful {
 public:
  /// The model whose windows reduce nothing.
  virtual size_t model() const = 0;
  /// This rank has run out of batches, the others synchronise in this way, not 0.
  /// Collective.
  virtual void join_round(int64_t kind) = 0;
  /// Attempted optimizer steps, and when what happened last. Ranks set them to the
  /// largest (of LocalWindows::clocks(), whose first they are) when all have run out.
  virtual std::vector<int64_t> clocks() const = 0;
  virtual void set_clocks(const int64_t* clocks) = 0;
  /// After a CommunicationError: true if the ranks that are left continue as a smaller
  /// world. Collective over them.
  virtual bool recover() = 0;
  /// In that recovery, this rank's end of the data was agreed on: others had left it.
  virtual bool ended_in_recovery() const = 0;
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
  /// Between windows: whether the scope's model reduces nothing.
  void set_local(bool local);

  /// The scope's clocks and the schedulers'.
  std::vector<int64_t> clocks() const;
  void take_clocks(const int64_t* most);
  /// Takes the largest of all ranks; see Note [Clocks]. Collective.
  void align_clocks();
  /// At the end of a scope: schedules and loss scale. Collective.
  void agree_at_end();

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
