// Activation checkpointing for a whole model, without a change of its code:
//
//   hasten::gradient_checkpointing_enable(model);           // every block
//   hasten::gradient_checkpointing_enable(model, {"every:2"});
//   hasten::gradient_checkpointing_enable(model, {"ops"});
//
// Blocks are the modules that the model calls through hasten::call_block, and the children of its
// torch::nn::Sequential containers. Consecutive children without children of their own form
// ceil(sqrt(n)) regions. A block inside a block belongs to the outer one. With gradients disabled
// nothing changes.
// Local. Ranks may use different settings, since gradients are bit for bit the same.
// Threading: call enable and disable between steps; forward may run in any threads.
#pragma once

#include <memory>

#include "hasten/activation_checkpoint/activation_checkpoint.h"
#include "hasten/config/checkpoint_spec.h"

namespace torch::nn {
class Module;
}

namespace hasten {

class ActivationPlan;

struct GradientCheckpointingOptions {
  /// Which blocks to recompute (checkpoint_spec.h). Mode budget needs `plan`.
  GradientCheckpointing mode = true;
  /// Options of each region. The block's name replaces `name`. With "ops" and no policy,
  /// OpPolicy::keep_expensive() is used.
  ActivationCheckpointOptions region{};
  /// Plan of what to recompute (planner.h). If set, `mode` is ignored.
  std::shared_ptr<const ActivationPlan> plan{};
};

/// Enables checkpointing from the next forward on. Enabling again replaces the earlier options.
/// The entries of a Sequential, each from one tensor to one tensor, are wrapped until disable. Its
/// children, names and state dict do not change, but at<T>(i), ptr(i) and clone() see the wrappers.
/// Throws InputError for mode budget without a plan, and for a block that already has another
/// checkpoint. With a plan of another model, forward throws it.
void gradient_checkpointing_enable(const std::shared_ptr<torch::nn::Module>& model,
                                   const GradientCheckpointingOptions& options = {});
/// Disables checkpointing. Does nothing if it is not enabled.
void gradient_checkpointing_disable(const std::shared_ptr<torch::nn::Module>& model);
bool gradient_checkpointing_enabled(const std::shared_ptr<torch::nn::Module>& model);
/// Whether a block was called since enable. If not, nothing is recomputed.
bool gradient_checkpointing_called(const std::shared_ptr<torch::nn::Module>& model);

/// The same for a ModuleHolder.
template <typename Holder>
  requires requires(const Holder& holder) { holder.ptr(); }
void gradient_checkpointing_enable(const Holder& model,
                                   const GradientCheckpointingOptions& options = {}) {
  gradient_checkpointing_enable(std::shared_ptr<torch::nn::Module>(model.ptr()), options);
}
template <typename Holder>
  requires requires(const Holder& holder) { holder.ptr(); }
void gradient_checkpointing_disable(const Holder& model) {
  gradient_checkpointing_disable(std::shared_ptr<torch::nn::Module>(model.ptr()));
}

} // namespace hasten
