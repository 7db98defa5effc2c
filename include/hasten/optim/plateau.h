// Reduces the learning rate when a metric has stopped improving:
// torch.optim.lr_scheduler.ReduceLROnPlateau, with its names, defaults and values.
// Threading: one thread. Lifetime: keeps a reference to its optimizer.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>

#include "hasten/core/stateful.h"

namespace hasten {

struct ReduceLrOnPlateauOptions {
  /// Whether a larger metric is better; false: a smaller one.
  bool greater_is_better = false;
  /// Multiplies the learning rates, in (0, 1).
  double factor = 0.1;
  /// Evaluations without an improvement before a reduction, >= 0.
  int64_t patience = 10;
  /// Minimum improvement of the metric that counts as better, >= 0. If `relative`, a share of the
  /// best value.
  double threshold = 1e-4;
  bool relative = true;
  /// Evaluations after a reduction that are not counted, >= 0.
  int64_t cooldown = 0;
  /// Lower bound of the learning rates, >= 0.
  double min_lr = 0;
  /// Reductions that are not larger than this are skipped, >= 0.
  double eps = 1e-8;
};

class ReduceLrOnPlateau final : public Stateful {
 public:
  /// Throws InputError if an option is out of range.
  explicit ReduceLrOnPlateau(torch::optim::Optimizer& optimizer,
                             ReduceLrOnPlateauOptions options = {});
  ReduceLrOnPlateau(const ReduceLrOnPlateau&) = delete;
  ReduceLrOnPlateau& operator=(const ReduceLrOnPlateau&) = delete;

  /// Call it after each evaluation. `metric` must be equal on all ranks. Returns whether a learning
  /// rate was reduced. Local. A value that is not finite is no improvement.
  bool step(double metric);
  double best() const { return best_; }
  int64_t num_bad_epochs() const { return num_bad_epochs_; }

  /// values: best, num_bad_epochs, cooldown_counter, lrs. No tensors.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// Also sets the optimizer's learning rates.
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  bool improved(double metric) const;

  torch::optim::Optimizer& optimizer_;
  ReduceLrOnPlateauOptions options_;
  double best_ = 0;
  bool any_ = false; // best_ is set
  int64_t num_bad_epochs_ = 0;
  int64_t cooldown_counter_ = 0;
};

} // namespace hasten
