// Ends a run when its evaluations stop improving; transformers' EarlyStoppingCallback.
// TrainingArguments::early_stopping_patience adds one.
// Threading: one Trainer per object.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "hasten/core/stateful.h"
#include "hasten/trainer/callback.h"

namespace hasten {

struct EarlyStoppingOptions {
  /// Training stops after this many evaluations in a row without an improvement, >= 1.
  int64_t early_stopping_patience = 1;
  /// The minimum improvement that counts, in units of the metric, >= 0; must be exceeded.
  double early_stopping_threshold = 0.0;
};

/// Watches metric_for_best_model by greater_is_better. An evaluation counts as better if its value
/// beats the best so far by more than the threshold. The best itself changes with any improvement,
/// so many small ones in a row do not count, as in transformers. A value that is not finite is no
/// improvement. Its state is saved in checkpoints if it was added under a name.
class EarlyStoppingCallback : public TrainerCallback, public Stateful {
 public:
  /// Throws InputError for a patience below 1 or a threshold below 0.
  explicit EarlyStoppingCallback(EarlyStoppingOptions options = {});

  /// Throws InputError without evaluation data or with eval_strategy=no.
  void on_train_begin(const RunDescription& run) override;
  /// Throws InputError if the record lacks the metric, naming the metrics that it has.
  void on_evaluate(const nlohmann::json& record) override;

  /// Evaluations in a row without an improvement so far.
  int64_t patience_counter() const { return patience_counter_; }

  /// values: best (null: none yet), patience_counter. No tensors.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  EarlyStoppingOptions options_;
  std::string metric_{};
  bool greater_ = false;
  std::optional<double> best_{};
  int64_t patience_counter_ = 0;
};

} // namespace hasten
