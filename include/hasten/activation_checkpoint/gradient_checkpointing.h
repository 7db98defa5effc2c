// Activation checkpointing of a whole model, whose code says nothing about it:
//
//   hasten::gradient_checkpointing_enable(model);           // every block
//   hasten::gradient_checkpointing_enable(model, {"every:2"});
//   hasten::gradient_checkpointing_enable(model, {"ops"});
//
// Blocks are the modules that the model calls through hasten::call_block, and the
// children of its torch::nn::Sequential containers (of consecutive children that
// have no children of their own, ceil(sqrt(n)) regions). A block inside a block is
// part of it. With gradients disabled nothing changes.
// Local: ranks need not agree, since gradients are bit for bit the same.
// Threading: enable and disable between steps; forward in any threads.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hasten/activation_checkpoint/activation_checkpoint.h"
#include "hasten/activation_checkpoint/checkpoint_spec.h"

namespace torch::nn {
class Module;
}

namespace hasten {

class ActivationPlan;

struct GradientCheckpointingOptions {
  /// Which blocks, in the words of checkpoint_spec.h. A budget needs a plan.
  GradientCheckpointing mode = true;
  /// Of each region; its name becomes the block's. Without a policy of its own,
  /// "ops" takes OpPolicy::keep_expensive().
  ActivationCheckpointOptions region{};
  /// What to recompute, as planned (planner.h); then `mode` says nothing.
  std::shared_ptr<const ActivationPlan> plan{};
};

/// From the next forward on. Enabling again replaces what was there.
/// A Sequential's entries, each from one tensor to one, are wrapped until disable:
/// its children, names and state dict stay, but at<T>(i), ptr(i) and clone() meet
/// the wrappers.
/// Throws InputError: mode budget without a plan; a plan of another model; a block
/// that somebody else attached a checkpoint to.
void gradient_checkpointing_enable(const std::shared_ptr<torch::nn::Module>& model,
                                   const GradientCheckpointingOptions& options = {});
/// As before enabling. Nothing where it is not enabled.
void gradient_checkpointing_disable(const std::shared_ptr<torch::nn::Module>& model);
bool gradient_checkpointing_enabled(const std::shared_ptr<torch::nn::Module>& model);
/// Whether a block has been called since: where none is, nothing is recomputed.
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
