// Models whose blocks go through call_block, and their gradients.
#pragma once

#include "activation_checkpoint/region_rig.h"
#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/activation_checkpoint/planner.h"
#include "support/on_device.h"

namespace hasten::testing_support {

// Blocks of different inner widths and a head. All blocks get the same mask.
struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(int64_t count, int64_t width = 8) {
    for (int64_t i = 0; i < count; ++i) {
      blocks.emplace_back(width);
      register_module("block" + std::to_string(i), blocks.back());
    }
    head = register_module("head", on_device::moved(torch::nn::Linear(width, 2)));
  }
  Tensor forward(const Tensor& x) {
    const Tensor mask = on_device::ones({x.size(-1)});
    Tensor y = x;
    for (Mlp& block : blocks) {
      y = call_block(block, y) * mask;
      // Code between blocks is not recomputed, so this product is saved.
    }
    return head(y);
  }
  std::vector<Mlp> blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Chain);

// The same, but each block gets the tensor object that the previous one returned.
struct StraightImpl : ChainImpl {
  using ChainImpl::ChainImpl;
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (Mlp& block : blocks) {
      y = call_block(block, y);
    }
    return head(y);
  }
};
TORCH_MODULE(Straight);

inline std::vector<int> calls_of(ChainImpl& chain) {
  std::vector<int> calls;
  for (Mlp& block : chain.blocks) {
    calls.push_back(block->calls);
    block->calls = 0;
  }
  return calls;
}

template <typename Model>
Derived derive_model(Model& model, const Tensor& x) {
  return derive(model->parameters(), [&] { return model->forward(x).square().sum(); });
}

inline std::shared_ptr<const ActivationPlan> plan_of(ChainImpl& chain,
                                                     std::vector<PlanRegion> regions) {
  auto plan = std::make_shared<ActivationPlan>();
  for (size_t i = 0; i < chain.blocks.size(); ++i) {
    plan->blocks.push_back("block" + std::to_string(i));
  }
  plan->regions = std::move(regions);
  return plan;
}

} // namespace hasten::testing_support
