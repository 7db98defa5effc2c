// The factor by which fp16 losses are multiplied, so that small gradients do not become 0, and the
// rule that changes it. The rule is that of torch.amp.GradScaler, with the same values.
// Threading: one thread.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>

#include "hasten/core/stateful.h"

namespace hasten {

struct GradScalerOptions {
  /// First scale, above 0; 2^16 by default. It decreases until the gradients fit.
  double init_scale = 65536.0;
  /// Factor by which the scale grows, above 1.
  double growth_factor = 2.0;
  /// Factor by which an overflow reduces the scale, in (0, 1).
  double backoff_factor = 0.5;
  /// Steps without an overflow after which the scale grows, >= 1.
  int64_t growth_interval = 2000;
  /// False: losses are not scaled and no step is skipped.
  bool enabled = true;
};

class LossScale : public Stateful {
 public:
  /// Throws InputError if an option is out of range.
  explicit LossScale(GradScalerOptions options = {});

  /// The scale; 1 if disabled.
  double value() const { return options_.enabled ? scale_ : 1.0; }
  /// Steps without an overflow since the scale last changed.
  int64_t growth_tracker() const { return growth_tracker_; }
  const GradScalerOptions& options() const { return options_; }

  /// Call it after each step, also after a step that was skipped because a gradient was not finite:
  ///   found_inf:  scale <- scale backoff_factor, tracker <- 0
  ///   else:       tracker <- tracker + 1; at growth_interval:
  ///               scale <- scale growth_factor if that is finite in fp32, tracker <- 0
  /// in fp32, as in torch. Logs each change. Warns when the scale falls below 1, because the
  /// gradients then overflow without being scaled up.
  void update(bool found_inf);
  /// Sets the scale, above 0. The tracker keeps its value.
  void set_scale(double scale);

  /// scale, growth_factor, backoff_factor, growth_interval, _growth_tracker: the names of
  /// torch.amp.GradScaler. Empty if disabled.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// Throws InputError if the state is empty and this is enabled, or if a value is out of range.
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  GradScalerOptions options_;
  double scale_;
  int64_t growth_tracker_ = 0;
};

} // namespace hasten
