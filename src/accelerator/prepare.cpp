// Optimizers and schedulers of Accelerator::prepare.
#include <ATen/ATen.h>
#include <torch/optim.h>

#include <algorithm>

#include "accelerator_core.h"
#include "hasten/base/error.h"
#include "hasten/optim/fused_optimizer.h"
#include "hasten/optim/optimizer_state.h"

namespace hasten::detail {

void move_optimizer_state(torch::optim::Optimizer& optimizer, const at::Device& device) {
  for (auto& [key, value] : optimizer.state()) {
    const bool known =
        visit_state_tensors(*value, [&device](at::Tensor& tensor) { tensor = tensor.to(device); });
    if (!known && !device.is_cpu()) {
      throw InputError(
          "accelerator::prepare", "an optimizer of unknown type has state on another device",
          "one of hasten's, or torch's Adam, AdamW, SGD, RMSprop, Adagrad or one derived from them",
          "prepare it before its first step");
    }
  }
}

std::shared_ptr<OptimizerState> AcceleratorCore::prepare_optimizer(
    const std::shared_ptr<torch::optim::Optimizer>& optimizer) {
  auto state = std::make_shared<OptimizerState>();
  state->parameters = [optimizer] {
    std::vector<at::Tensor> parameters;
    for (const auto& group : optimizer->param_groups()) {
      parameters.insert(parameters.end(), group.params().begin(), group.params().end());
    }
    return parameters;
  };
  state->parameter_count = [optimizer] {
    size_t count = 0;
    for (const auto& group : optimizer->param_groups()) {
      count += group.params().size();
    }
    return count;
  };
  state->known_count = state->parameter_count();
  auto lists = slots_of(state->parameters());
  refuse_optimizer(*optimizer, lists);
  optimizer_slots_.push_back(std::move(lists));
  move_optimizer_state(*optimizer, device);
  cut_optimizer_state(*optimizer);
  state->step = [optimizer] { optimizer->step(); };
  state->optimizer = optimizer;
  state->fused = dynamic_cast<FusedOptimizer*>(optimizer.get());
  state->index = static_cast<int64_t>(optimizers_.size());
  optimizers_.push_back(state);
  decide_who_scales();
  return state;
}

void AcceleratorCore::decide_who_scales() {
  shared_->steps_scale = options.scale_in_step && !optimizers_.empty();
  for (const auto& optimizer : optimizers_) {
    const auto& lists = optimizer_slots_[static_cast<size_t>(optimizer->index)];
    shared_->steps_scale =
        shared_->steps_scale && optimizer->fused != nullptr &&
        std::all_of(lists.begin(), lists.end(), [](const SlotList& list) { return list.all; });
  }
}

std::shared_ptr<SchedulerState> AcceleratorCore::prepare_scheduler(
    std::function<void()> step, std::vector<std::shared_ptr<OptimizerState>> optimizers) {
  auto state = std::make_shared<SchedulerState>();
  state->step = std::move(step);
  if (options.scheduler_ticks == SchedulerTicks::per_process) {
    state->step = [step = state->step, ticks = world.world_size] {
      for (int i = 0; i < ticks; ++i) {
        step();
      }
    };
  }
  state->optimizers = std::move(optimizers);
  state->index = static_cast<int64_t>(schedulers_.size());
  schedulers_.push_back(state);
  return state;
}

} // namespace hasten::detail
