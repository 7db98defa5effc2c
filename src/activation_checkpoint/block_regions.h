// Block handlers that gradient_checkpointing_enable attaches, and what planner, plans and the
// measurement of blocks share.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/activation_checkpoint/planner.h"
#include "hasten/core/block_call.h"
#include "hasten/core/device.h"

namespace hasten::detail {

/// Runs `forward` as a part of its block. From its second call on, a RecomputeNotice reports the
/// recomputation.
RegionForward block_part(const std::shared_ptr<torch::nn::Module>& block, Forward forward);

/// Decides how to run a block's call; one handler for all blocks of a model.
class BlockHandler {
 public:
  std::atomic<bool> called{false};

  virtual ~BlockHandler() = default;
  virtual std::vector<at::Tensor> call(const std::shared_ptr<torch::nn::Module>& block,
                                       const std::string& name, std::vector<at::Tensor> inputs,
                                       const Forward& forward) = 0;
};

/// Follows a plan for the blocks with these names.
std::shared_ptr<BlockHandler> make_plan_handler(std::shared_ptr<const ActivationPlan> plan,
                                                const ActivationCheckpointOptions& options);

/// The handler that is attached to the model, or null.
std::shared_ptr<BlockHandler> attached_handler(const std::shared_ptr<torch::nn::Module>& model);

/// While it lives, all gradients are zeros, so that a measurement neither counts nor changes the
/// real ones. Its destructor restores gradients, buffers and random states.
class Untouched {
 public:
  Untouched(const torch::nn::Module& model, const at::Device& device);
  Untouched(const Untouched&) = delete;
  Untouched& operator=(const Untouched&) = delete;
  ~Untouched();

 private:
  // Delegating to it makes the destructor run if the public constructor throws.
  explicit Untouched(const at::Device& device) : random_(generator_states({device})) {}

  GeneratorScope random_; // restored last
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_{};
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_{};
};

/// Attaches a handler to every module of the model and replaces an earlier one. The modules that
/// are called through call_block are the model's blocks.
void attach_handler(const std::shared_ptr<torch::nn::Module>& model,
                    std::shared_ptr<BlockHandler> handler);

/// Where the model's first parameter is; the CPU if it has none.
at::Device device_of(const torch::nn::Module& model);

/// Measures the memory of one step, block by block.
class StepMeter : public BlockHandler {
 public:
  at::Device device = at::kCPU; // the model's
  int64_t level = 0; // bytes in use before the step

  virtual void end() = 0; // the backward is done
};
/// Runs `loss` and its backward with `meter` attached, and attaches `after` then, or nothing.
void meter_step(const std::shared_ptr<torch::nn::Module>& model,
                const std::shared_ptr<StepMeter>& meter, const std::shared_ptr<BlockHandler>& after,
                const std::function<at::Tensor()>& loss);

/// Peak of a block at the end of a recomputation, with its backward.
inline int64_t alone_bytes(const BlockProfile& block) {
  return block.recompute_peak > 0 ? block.recompute_peak
                                  : block.output_bytes + block.saved_bytes +
                                        std::max(block.forward_extra, block.backward_extra);
}

/// The plans with which others are compared: keep everything, sqrt(n) regions, each block.
struct SimplePlan {
  const char* name = "";
  std::vector<PlanRegion> regions{};
};
std::vector<SimplePlan> simple_plans(const ChainProfile& profile);

/// Cost of one forward and backward. observe_peak() returns its peak.
PlanCost observe_step(const std::shared_ptr<torch::nn::Module>& model,
                      const std::function<at::Tensor()>& loss);

/// Calls `hook` with the gradient of the first of the tensors that gets one.
void on_gradient(const std::vector<at::Tensor>& tensors,
                 std::function<void(const at::Tensor&)> hook);

} // namespace hasten::detail
