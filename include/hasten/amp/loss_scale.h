// The number fp16 losses are multiplied by, so that small gradients do not become 0,
// and the rule by which it follows what the gradients can bear: PyTorch's
// torch.amp.GradScaler's, number for number.
// Threading: one thread.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>

#include "hasten/core/stateful.h"

namespace hasten {

struct GradScalerOptions {
  /// 2^16, above 0. It falls by itself to what fits.
  double init_scale = 65536.0;
  /// Above 1.
  double growth_factor = 2.0;
  /// Above 0, below 1.
  double backoff_factor = 0.5;
  /// Steps without an overflow after which it grows, >= 1.
  int64_t growth_interval = 2000;
  /// False: losses stay as they are, every step is made.
  bool enabled = true;
};

class LossScale : public Stateful {
 public:
  /// Throws InputError for an option out of range.
  explicit LossScale(GradScalerOptions options = {});

  /// What losses are multiplied by; 1 where disabled.
  double value() const { return options_.enabled ? scale_ : 1.0; }
  /// Steps without an overflow since it changed last.
  int64_t growth_tracker() const { return growth_tracker_; }
  const GradScalerOptions& options() const { return options_; }

  /// After a step, or one that was left out because a gradient was not finite:
  ///   found:  scale <- scale backoff_factor, tracker <- 0
  ///   else:   tracker <- tracker + 1; at growth_interval:
  ///           scale <- scale growth_factor where that is finite in fp32, tracker <- 0
  /// in fp32, as torch does. Each change is logged, and a scale so small that the
  /// gradients overflow without it is warned of.
  void update(bool found_inf);
  /// A scale of one's own, above 0; the tracker goes on.
  void set_scale(double scale);

  /// scale, growth_factor, backoff_factor, growth_interval, _growth_tracker:
  /// torch.amp.GradScaler's names. Empty where disabled.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// Throws InputError for an empty state where enabled, or a number out of range.
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  GradScalerOptions options_;
  double scale_;
  int64_t growth_tracker_ = 0;
};

} // namespace hasten
