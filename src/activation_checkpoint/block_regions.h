// What gradient_checkpointing_enable attaches to blocks.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/activation_checkpoint/planner.h"
#include "hasten/core/block_call.h"
#include "region_state.h"

namespace hasten::detail {

/// Whether this thread is inside a block: blocks in there are part of it.
class InsideBlock {
 public:
  InsideBlock();
  InsideBlock(const InsideBlock&) = delete;
  InsideBlock& operator=(const InsideBlock&) = delete;
  ~InsideBlock();
  static bool now();
};

/// Runs `forward` as a part of its block; from its second call on, whoever is
/// outside the checkpoint is told.
RegionForward block_part(const std::shared_ptr<torch::nn::Module>& block, Forward forward);

/// Decides what happens to a block's call; one for all blocks of a model.
class BlockHandler {
 public:
  std::atomic<bool> called{false};

  virtual ~BlockHandler() = default;
  virtual std::vector<at::Tensor> call(const std::shared_ptr<torch::nn::Module>& block,
                                       const std::string& name, std::vector<at::Tensor> inputs,
                                       const Forward& forward) = 0;
};

/// By the words of GradientCheckpointing, each block for itself.
std::shared_ptr<BlockHandler> make_mode_handler(const GradientCheckpointingOptions& options);
/// By a plan over the blocks of these names.
std::shared_ptr<BlockHandler> make_plan_handler(std::shared_ptr<const ActivationPlan> plan,
                                                const ActivationCheckpointOptions& options);

/// To every module of a model while it lives: those that are called through
/// call_block are its blocks.
class BlockAttachments {
 public:
  BlockAttachments(const std::shared_ptr<torch::nn::Module>& model,
                   std::shared_ptr<BlockHandler> handler);
  BlockAttachments(const BlockAttachments&) = delete;
  BlockAttachments& operator=(const BlockAttachments&) = delete;
  ~BlockAttachments();

 private:
  std::vector<BlockAttachment> attachments_{};
  std::vector<std::function<void()>> unwrap_{}; // of Sequentials
};

/// What is attached to the model; null where nothing is.
std::shared_ptr<BlockHandler> attached_handler(const std::shared_ptr<torch::nn::Module>& model);

/// Gradients of zeros in the place of what is there while it lives, so that measuring
/// neither counts nor changes them; buffers and random state are put back too.
class Untouched {
 public:
  explicit Untouched(const torch::nn::Module& model);
  Untouched(const Untouched&) = delete;
  Untouched& operator=(const Untouched&) = delete;
  ~Untouched();

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_{};
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_{};
  RandomState random_{};
};

/// In the place of what was attached to the model before.
void attach_handler(const std::shared_ptr<torch::nn::Module>& model,
                    std::shared_ptr<BlockHandler> handler);

} // namespace hasten::detail
