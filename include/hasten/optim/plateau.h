// Reduces the learning rate when a metric has stopped improving:
// torch.optim.lr_scheduler.ReduceLROnPlateau, with its names, defaults and values.
// Threading: one thread. Lifetime: keeps a reference to its optimizer.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>

#include "hasten/config/schedule.h"
#include "hasten/core/stateful.h"

namespace hasten {

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
