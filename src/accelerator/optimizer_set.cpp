#include "optimizer_set.h"

#include <ATen/ATen.h>
#include <torch/optim.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <torch/optim.h>
#include <algorithm>
#include "gradient_checks.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/core/memory.h"
#include "hasten/core/random.h"
#include "hasten/optim/fused_optimizer.h"
#include "hasten/optim/optimizer_state.h"
#include "model_set.h"
#include "open_batch.h"
#include "run_context.h"
#include "window_set.h"

namespace hasten::detail {

// Moves the moments of torch's optimizers and of classes derived from them.
static void move_optimizer_state(torch::optim::Optimizer& optimizer, const at::Device& device) {
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

static std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  return parameters;
}

static size_t parameter_count(const torch::optim::Optimizer& optimizer) {
  size_t count = 0;
  for (const auto& group : optimizer.param_groups()) {
    count += group.params().size();
  }
  return count;
}

std::shared_ptr<OptimizerState> OptimizerSet::prepare(
    const std::shared_ptr<torch::optim::Optimizer>& optimizer) {
  auto lists = models_.slots_of(parameters_of(*optimizer));
  models_.check_optimizer(*optimizer, lists);
  move_optimizer_state(*optimizer, run_.device());
  models_.shard_optimizer_state(*optimizer);
  const auto known = std::ranges::find(optimizers_, optimizer.get(),
                                       [](const auto& state) { return state->optimizer.get(); });
  const auto index = static_cast<size_t>(known - optimizers_.begin());
  if (known == optimizers_.end()) {
    optimizers_.push_back(std::make_shared<OptimizerState>());
    slots_.emplace_back();
  }
  const auto state = optimizers_[index];
  slots_[index] = std::move(lists);
  state->known_count = parameter_count(*optimizer);
  state->optimizer = optimizer;
  state->fused = dynamic_cast<FusedOptimizer*>(optimizer.get());
  state->index = static_cast<int64_t>(index);
  decide_who_scales();
  return state;
}

// An optimizer may still have parameters that were replaced: an error at its next step. One without a
// handle may be gone.
void OptimizerSet::models_changed() {
  for (const auto& optimizer : optimizers_) {
    const auto watching = std::ranges::count_if(schedulers_, [&](const auto& scheduler) {
      return std::ranges::find(scheduler->optimizers, optimizer) != scheduler->optimizers.end();
    });
    if (optimizer.use_count() == watching + 1) {
      slots_[static_cast<size_t>(optimizer->index)].clear();
      continue;
    }
    auto parameters = parameters_of(*optimizer->optimizer);
    std::erase_if(parameters, [this](const at::Tensor& p) { return !models_.owns(p); });
    optimizer->known_count = parameters.size();
    slots_[static_cast<size_t>(optimizer->index)] = models_.slots_of(parameters);
  }
  forget_done();
  decide_who_scales();
}

void OptimizerSet::decide_who_scales() {
  windows_.shared()->steps_scale = run_.options().scale_in_step && !optimizers_.empty();
  for (const auto& optimizer : optimizers_) {
    const auto& lists = lists_of(*optimizer);
    windows_.shared()->steps_scale =
        windows_.shared()->steps_scale && optimizer->fused != nullptr &&
        std::ranges::all_of(lists, [](const SlotList& list) { return list.all; });
  }
}

std::shared_ptr<SchedulerState> OptimizerSet::prepare_scheduler(
    std::function<void()> step, std::vector<std::shared_ptr<OptimizerState>> optimizers) {
  auto state = std::make_shared<SchedulerState>();
  state->step = std::move(step);
  if (run_.options().scheduler_ticks == SchedulerTicks::per_process) {
    state->step = [step = state->step, ticks = run_.world().world_size] {
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

// Looks up parameters that were added to the optimizer since it was prepared.
void OptimizerSet::update_slots(OptimizerState& optimizer) {
  const size_t count = parameter_count(*optimizer.optimizer);
  if (count == optimizer.known_count) {
    return;
  }
  slots_[static_cast<size_t>(optimizer.index)] =
      models_.slots_of(parameters_of(*optimizer.optimizer));
  optimizer.known_count = count;
  decide_who_scales();
}

StepResult OptimizerSet::step(OptimizerState& optimizer) {
  update_slots(optimizer);
  const auto& lists = lists_of(optimizer);
  batch_.complete_open_window(lists);
  const auto act = windows_.acts(lists);
  const uint64_t complete = windows_.completed_window(lists);
  if (act == WindowSet::Acts::in_window ||
      (act == WindowSet::Acts::once && optimizer.stepped == complete)) {
    return StepResult::inside_window;
  }
  windows_.check_reduced(lists, "accelerator::step");
  bool local = false;
  bool nothing = false; // a local rank whose window had no samples
  for (const SlotList& list : lists) {
    windows_.note_attempt(list.model);
    local = local || windows_.is_local(list.model);
    const GradientWindow* window = windows_.of(list.model);
    nothing = nothing || (windows_.is_local(list.model) &&
                          (window == nullptr || window->report().weight == 0));
  }
  optimizer.skipped = (!nothing && checks_.leaves_out_step(lists, complete)) ||
                      (run_.options().skip_non_finite_steps && checks_.non_finite(lists));
  if (optimizer.skipped) {
    return StepResult::skipped;
  }
  optimizer.stepped = complete; // so that the scheduler steps, too
  if (nothing) {
    return StepResult::skipped;
  }
  try {
    step_scaled(optimizer, lists);
  } catch (const std::exception& error) {
    name_shortage(error, "accelerator::step", "the optimizer", run_.device());
    throw;
  }
  if (!local) { // local ranks may have different numbers
    auto& steps = windows_.shared()->steps;
    steps = mix(steps, static_cast<uint64_t>(optimizer.index) + 1);
    note_done([this, &optimizer] { step(optimizer); }, optimizer.index);
  }
  return StepResult::stepped;
}

double OptimizerSet::common_factor(const std::vector<SlotList>& lists) {
  const double factor = lists.empty() ? 1 : models_[lists[0].model].parallel->pending_factor();
  const bool common = std::ranges::all_of(lists, [&](const SlotList& list) {
    return list.all && models_[list.model].parallel->pending_factor() == factor;
  });
  for (size_t i = 0; !common && i < lists.size(); ++i) {
    models_[lists[i].model].parallel->apply_pending_factor();
  }
  return common ? factor : 1;
}

void OptimizerSet::step_scaled(OptimizerState& optimizer, const std::vector<SlotList>& lists) {
  const double factor = common_factor(lists);
  for (const SlotList& list : lists) {
    DataParallel& spread = *models_[list.model].parallel;
    if (optimizer.fused != nullptr) {
      spread.set_pending_factor(1);
    } else { // prepared after the window
      spread.apply_pending_factor();
    }
  }
  if (factor == 1 || optimizer.fused == nullptr) {
    optimizer.optimizer->step();
  } else {
    optimizer.fused->step_scaled(factor);
  }
  drop_autocast_casts();
}

const std::vector<std::shared_ptr<OptimizerState>>& OptimizerSet::watched(
    const SchedulerState& scheduler) const {
  return scheduler.optimizers.empty() ? optimizers_ : scheduler.optimizers;
}

bool OptimizerSet::scheduler_step(SchedulerState& scheduler) {
  const auto& watching = watched(scheduler);
  uint64_t stepped = 0;
  bool always = watching.empty();
  for (const auto& optimizer : watching) {
    const auto& lists = lists_of(*optimizer);
    if (optimizer->skipped) {
      return false;
    }
    always = always || windows_.acts(lists) == WindowSet::Acts::always;
    if (windows_.completed_window(lists) == optimizer->stepped) {
      stepped = std::max(stepped, optimizer->stepped);
    }
  }
  if (!always && (stepped == 0 || stepped == scheduler.stepped)) {
    return false;
  }
  scheduler.step();
  scheduler.stepped = stepped;
  ++scheduler.ticks;
  note_done([this, &scheduler] { scheduler_step(scheduler); });
  return true;
}

void OptimizerSet::zero_grad(OptimizerState& optimizer) {
  update_slots(optimizer);
  const auto& lists = lists_of(optimizer);
  for (const SlotList& list : lists) {
    if (windows_.in_window(list.model)) {
      if (windows_.of(list.model)->waiting() > 0) {
        windows_.check_reduced(lists, "accelerator::zero_grad");
      }
      return;
    }
  }
  at::NoGradGuard no_grad;
  for (const SlotList& list : lists) {
    const FlatGradients& gradients = models_[list.model].parallel->gradients();
    if (list.all) {
      checks_.zeroed(list.model);
    }
    for (const int64_t slot : list.slots) {
      gradients.layout().slots()[static_cast<size_t>(slot)].parameter.mutable_grad().reset();
    }
  }
}

void OptimizerSet::note_done(std::function<void()> again, int64_t optimizer) {
  if (!done_.empty() && done_.back().window != windows_.serial()) {
    done_.clear();
  }
  done_.push_back({windows_.serial(), std::move(again), optimizer});
}

void OptimizerSet::complete_at_end(const LoaderState* loader) {
  for (GradientWindow* last : windows_.lacking_backward(loader)) {
    std::vector<Done> done = std::exchange(done_, {});
    if (!done.empty() && done.back().window != windows_.serial()) {
      done.clear(); // nothing was done with the window before
    }
    std::vector<size_t> zeroed; // before this window, and so after it
    for (const size_t i : models_.in(last->models_mask())) {
      if (!models_[i].parallel->has_earlier_gradients()) {
        zeroed.push_back(i);
      }
    }
    const auto steps_with_it = [&](const Done& action) {
      return action.optimizer >= 0 &&
             std::ranges::any_of(
                 slots_.at(static_cast<size_t>(action.optimizer)),
                 [&](const SlotList& list) { return windows_.of(list.model) == last; });
    };
    const int64_t batches = last->batches();
    if (!batch_.complete_without_backward(*last)) {
      continue;
    }
    if (std::ranges::none_of(done, steps_with_it)) {
      throw InputError("accelerator::accumulate",
                       "the last batch of the data had no backward, and no step of a "
                       "prepared optimizer came after it: the gradients of " +
                           std::to_string(batches) + " batches need one",
                       "a step after a window's last batch",
                       "call optimizer.step() for a batch that is left out, too");
    }
    for (const Done& action : done) {
      action.again();
    }
    for (const size_t i : zeroed) {
      models_[i].parallel->gradients().reset();
      checks_.zeroed(i);
    }
  }
}

std::vector<std::shared_ptr<OptimizerState>> OptimizerSet::of_model(size_t model) const {
  std::vector<std::shared_ptr<OptimizerState>> found;
  for (const auto& optimizer : optimizers_) {
    const auto& lists = lists_of(*optimizer);
    if (std::ranges::any_of(lists, [&](const SlotList& list) {
          return list.model == model && !list.slots.empty();
        })) {
      found.push_back(optimizer);
    }
  }
  return found;
}

std::vector<int64_t> OptimizerSet::ticks() const {
  return mapped(schedulers_, [](const auto& scheduler) { return scheduler->ticks; });
}

void OptimizerSet::tick_until(const int64_t* ticks) {
  for (size_t i = 0; i < schedulers_.size(); ++i) {
    for (; schedulers_[i]->ticks < ticks[i]; ++schedulers_[i]->ticks) {
      schedulers_[i]->step();
    }
  }
}

} // namespace hasten::detail
