// Loss scaling for fp16 in your own training loop. Names and values are PyTorch's:
//
//   hasten::GradScaler scaler;
//   for (…) {
//     {
//       const hasten::Autocast autocast({.dtype = at::kHalf});
//       loss = cross_entropy(model->forward(x), y);
//     }
//     scaler.scale(loss).backward();
//     scaler.clip_grad_norm_(optimizer, 1.0); // or unscale_() and your own code
//     if (scaler.step(optimizer)) { schedule.step(); }
//     scaler.update();                        // once, after all optimizers
//     optimizer.zero_grad();
//   }
//
// An Accelerator with mixed_precision = fp16 does all of this itself.
//
// With a communicator the ranks agree before each step whether a rank has a gradient that is not
// finite. If so, no rank steps, and the ranks' scales stay equal. This costs an all-reduce of one
// element. It is not needed if an all-reduce sums the gradients, because every rank then sees the
// same values.
// Threading: one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <unordered_map>

#include "hasten/amp/loss_scale.h"

namespace torch::optim {
class Optimizer;
}

namespace hasten {

class Communicator;

class GradScaler : public Stateful {
 public:
  /// Throws InputError if an option is out of range.
  explicit GradScaler(GradScalerOptions options = {},
                      std::shared_ptr<Communicator> communicator = nullptr);

  /// Returns loss · scale in fp32 (in fp64 for an fp64 loss). Differentiable. Local.
  /// Throws TrainingError for a loss on the CPU that is not finite, because no scale can correct
  /// that.
  at::Tensor scale(const at::Tensor& loss);

  /// Divides the optimizer's gradients by the scale, in place, and checks whether all are finite.
  /// Call it before code that reads the gradients; otherwise step() does it. Collective with a
  /// communicator.
  /// Throws InputError if it was called already for this step, and after step().
  void unscale_(torch::optim::Optimizer& optimizer);
  /// Clips the global 2-norm of the unscaled gradients to max_norm (see
  /// Accelerator::clip_grad_norm_). Returns the norm before clipping, which is not finite if a
  /// gradient is not finite. For a FusedOptimizer step() multiplies the gradients, so this call
  /// reads them only for the norm.
  /// Collective with a communicator. Throws InputError as unscale_() does, after unscale_(), and
  /// for max_norm ≤ 0.
  double clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm);
  /// Calls optimizer.step(), unless a gradient is not finite. Returns whether it did. Collective
  /// with a communicator, unless unscale_() or clip_grad_norm_() was called before. Throws
  /// InputError if it was called already since the last update().
  bool step(torch::optim::Optimizer& optimizer);
  /// Updates the scale (LossScale::update). Call it after the steps of all optimizers. Local.
  /// Throws InputError if no optimizer was unscaled or stepped since the last update().
  void update();

  /// The factor that scale() multiplies losses by.
  double get_scale() const { return scale_.value(); }
  bool is_enabled() const { return scale_.options().enabled; }
  LossScale& loss_scale() { return scale_; }

  /// The state of LossScale. Call these between update() and scale().
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  // State of an optimizer since the last update().
  struct Progress {
    bool checked = false;
    bool stepped = false;
    bool found_inf = false;
    double factor = 1; // what step() multiplies by
  };
  Progress& begin(torch::optim::Optimizer& optimizer, const char* where);
  void check(torch::optim::Optimizer& optimizer, Progress& progress);

  LossScale scale_;
  std::shared_ptr<Communicator> communicator_;
  std::unordered_map<const torch::optim::Optimizer*, Progress> progress_{};
};

} // namespace hasten
