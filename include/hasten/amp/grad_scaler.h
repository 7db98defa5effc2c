// Loss scaling for fp16 in a loop of one's own; names and numbers are PyTorch's:
//
//   hasten::GradScaler scaler;
//   for (…) {
//     {
//       const hasten::Autocast autocast({.dtype = at::kHalf});
//       loss = cross_entropy(model->forward(x), y);
//     }
//     scaler.scale(loss).backward();
//     scaler.clip_grad_norm_(optimizer, 1.0); // or unscale_() and one's own
//     if (scaler.step(optimizer)) { schedule.step(); }
//     scaler.update();                        // once, after all optimizers
//     optimizer.zero_grad();
//   }
//
// An Accelerator with mixed_precision = fp16 does all of this by itself.
//
// With a communicator the ranks agree, before any of them steps, whether a gradient
// of one of them is not finite: then no rank steps, and their scales stay equal. A
// collective of one number; not needed where gradients are reduced by a sum, which
// every rank sees alike.
// Threading: one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
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
  /// Throws InputError for an option out of range.
  explicit GradScaler(GradScalerOptions options = {},
                      std::shared_ptr<Communicator> communicator = nullptr);

  /// loss * scale, in fp32. Differentiable. Local.
  /// Throws TrainingError for a loss on the CPU that is not finite: no scale makes
  /// it so, and it is no overflow of gradients.
  at::Tensor scale(const at::Tensor& loss);

  /// Divides the optimizer's gradients by the scale, in place, and finds out whether
  /// one is not finite. Before whatever reads them; step() does it otherwise.
  /// Collective with a communicator.
  /// Throws InputError the second time for a step, and after step().
  void unscale_(torch::optim::Optimizer& optimizer);
  /// The global norm (docs: Accelerator::clip_grad_norm_) of the gradients without
  /// the scale; makes it at most max_norm. What they are multiplied by is left to
  /// step() where the optimizer is a FusedOptimizer: no pass over memory but the
  /// norm's. Returns the norm before; not finite where a gradient is not.
  /// Collective with a communicator. Throws as unscale_(), and where that was called.
  double clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm);
  /// optimizer.step(), unless a gradient is not finite. Returns whether it stepped.
  /// Collective with a communicator, if nothing was unscaled before.
  /// Throws InputError the second time without update() in between.
  bool step(torch::optim::Optimizer& optimizer);
  /// After the steps of all optimizers: LossScale::update. Local.
  /// Throws InputError where no optimizer was unscaled or stepped since the last.
  void update();

  /// What losses are multiplied by.
  double get_scale() const { return scale_.value(); }
  bool is_enabled() const { return scale_.options().enabled; }
  LossScale& loss_scale() { return scale_; }

  /// Those of LossScale, between update() and scale().
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  // Of an optimizer since the last update().
  struct Progress {
    bool checked = false;
    bool stepped = false;
    bool found_inf = false;
    double factor = 1; // what step() multiplies by
  };
  Progress& begin(torch::optim::Optimizer& optimizer, const char* where);
  void check(torch::optim::Optimizer& optimizer, Progress& progress);
  bool agree(bool found_inf);

  LossScale scale_;
  std::shared_ptr<Communicator> communicator_;
  std::unordered_map<const torch::optim::Optimizer*, Progress> progress_{};
};

} // namespace hasten
