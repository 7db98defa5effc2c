// Learning rates over a run: a multiplier of each group's first learning rate,
// as a function of the updates completed. Values equal Hugging Face's.
// Threading: one thread. Lifetime: LrScheduler keeps a reference to its
// optimizer; neither is moved.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "hasten/core/stateful.h"

namespace hasten {

/// m(k): k = updates completed, >= 0; the next update runs at m(k) * peak.
using Schedule = std::function<double(int64_t completed_updates)>;

/// k / W for k < W, then max(0, (N - k) / max(1, N - W)). With a warm-up the
/// first update runs at 0; the last one runs at 1 / (N - W), never at 0.
Schedule linear_schedule(int64_t warmup_steps, int64_t total_steps);
/// 1.
Schedule constant_schedule();
/// k / W for k < W, then 1.
Schedule constant_schedule_with_warmup(int64_t warmup_steps);

class LrScheduler final : public Stateful {
 public:
  /// Takes the groups' present learning rates as peaks and sets m(0) at once.
  LrScheduler(torch::optim::Optimizer& optimizer, Schedule schedule);
  LrScheduler(const LrScheduler&) = delete;
  LrScheduler& operator=(const LrScheduler&) = delete;

  /// Call once after each optimizer step that was not skipped. Local.
  void step();
  /// The learning rate the next update uses. [group]
  const std::vector<double>& get_last_lr() const { return last_lr_; }
  int64_t completed_updates() const { return completed_updates_; }
  /// Peak of each group. Setting them sets the present learning rates.
  const std::vector<double>& base_lrs() const { return base_lrs_; }
  void set_base_lrs(std::vector<double> base_lrs);
  torch::optim::Optimizer& optimizer() const { return optimizer_; }

  /// values: completed_updates, base_lrs. No tensors.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// Sets the optimizer's learning rates as well.
  void load_state(
      const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  void apply();

  torch::optim::Optimizer& optimizer_;
  Schedule schedule_;
  std::vector<double> base_lrs_{}; // [group]
  std::vector<double> last_lr_{}; // [group]
  int64_t completed_updates_ = 0;
};

} // namespace hasten
