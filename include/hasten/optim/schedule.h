// Sets the learning rates of an optimizer from a schedule (config/schedule.h).
// Threading: one thread. Lifetime: LRScheduler keeps a reference to its optimizer. Do not move
// either of them.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <utility>
#include <vector>

#include "hasten/config/schedule.h"
#include "hasten/core/stateful.h"

namespace hasten {

class LRScheduler final : public Stateful {
 public:
  /// Uses the groups' current learning rates as peaks and sets the learning rates to m(0) · peak.
  LRScheduler(torch::optim::Optimizer& optimizer, Schedule schedule);
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;

  /// Call once after each optimizer step that was not skipped. Local.
  void step();
  /// Learning rate of the next optimizer step. [group]
  const std::vector<double>& get_last_lr() const { return last_lr_; }
  /// For records. close_step() ends an optimizer step, whether it was made, skipped or made by other
  /// ranks alone; then used_lr() is the learning rate that it had. [group]
  void close_step();
  const std::vector<double>& used_lr() const { return used_lr_; }
  int64_t completed_updates() const { return completed_updates_; }
  /// Peak of each group. set_base_lrs() also sets the current learning rates. Call it between steps.
  const std::vector<double>& base_lrs() const { return base_lrs_; }
  void set_base_lrs(std::vector<double> base_lrs) { set(std::move(base_lrs), completed_updates_); }
  torch::optim::Optimizer& optimizer() const { return optimizer_; }

  /// values: completed_updates, base_lrs. No tensors.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// Also sets the optimizer's learning rates.
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  void set(std::vector<double> base_lrs, int64_t completed_updates);
  void apply();

  torch::optim::Optimizer& optimizer_;
  Schedule schedule_;
  std::vector<double> base_lrs_{}; // [group]
  std::vector<double> last_lr_{}; // [group]
  std::vector<double> used_lr_{}; // [group]
  std::vector<double> open_lr_{}; // of the step that is not closed. [group]
  int64_t completed_updates_ = 0;
};

} // namespace hasten
