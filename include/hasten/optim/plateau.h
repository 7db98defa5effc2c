// A learning rate that falls when a metric has stopped improving:
// torch.optim.lr_scheduler.ReduceLROnPlateau, with its names, defaults and numbers.
// Threading: one thread. Lifetime: keeps a reference to its optimizer.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>

#include "hasten/core/stateful.h"

namespace hasten {

struct ReduceLrOnPlateauOptions {
  /// Better is larger; false: smaller.
  bool greater_is_better = false;
  /// What the rates are multiplied by, above 0 and below 1.
  double factor = 0.1;
  /// Evaluations without an improvement that are waited for, >= 0.
  int64_t patience = 10;
  /// Least improvement that counts, >= 0; of the best value where `relative`.
  double threshold = 1e-4;
  bool relative = true;
  /// Evaluations after a reduction that do not count, >= 0.
  int64_t cooldown = 0;
  /// Rates do not fall below this, >= 0.
  double min_lr = 0;
  /// Smaller reductions are left out, >= 0.
  double eps = 1e-8;
};

class ReduceLrOnPlateau final : public Stateful {
 public:
  /// Throws InputError for options out of range.
  explicit ReduceLrOnPlateau(torch::optim::Optimizer& optimizer,
                             ReduceLrOnPlateauOptions options = {});
  ReduceLrOnPlateau(const ReduceLrOnPlateau&) = delete;
  ReduceLrOnPlateau& operator=(const ReduceLrOnPlateau&) = delete;

  /// After an evaluation, with the value that all ranks have. True where the
  /// rates were reduced. Local. A value that is not finite is no improvement.
  bool step(double metric);
  double best() const { return best_; }
  int64_t num_bad_epochs() const { return num_bad_epochs_; }

  /// values: best, num_bad_epochs, cooldown_counter, lrs. No tensors.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// Sets the optimizer's learning rates as well.
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  bool improved(double metric) const;
  bool reduce();

  torch::optim::Optimizer& optimizer_;
  ReduceLrOnPlateauOptions options_;
  double best_ = 0;
  bool any_ = false; // best_ is a value
  int64_t num_bad_epochs_ = 0;
  int64_t cooldown_counter_ = 0;
};

} // namespace hasten
