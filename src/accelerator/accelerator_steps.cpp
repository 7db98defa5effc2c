// What happens to gradients when a window is complete.
#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/optim.h>

#include <algorithm>
#include <sstream>

#include "accelerator_core.h"
#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/optim/fused_optimizer.h"

namespace hasten::detail {

uint64_t AcceleratorCore::completed_window(const std::vector<SlotList>& lists) const {
  uint64_t last = 0;
  for (const SlotList& list : lists) {
    if (in_window(models_[list.model])) {
      return 0;
    }
    last = std::max(last, models_[list.model].completed);
  }
  return last;
}

// Inside accumulate(): once for each complete window. Outside: always.
AcceleratorCore::Acts AcceleratorCore::acts(const std::vector<SlotList>& lists) const {
  bool outside = !accumulates_;
  for (const SlotList& list : lists) {
    const ModelState& model = models_[list.model];
    if (in_window(model) && !model.outside) {
      return Acts::in_window;
    }
    outside = outside || model.outside;
  }
  return outside ? Acts::always : completed_window(lists) == 0 ? Acts::in_window : Acts::once;
}

// Parameters that were added to the optimizer since.
void AcceleratorCore::update_slots(OptimizerState& optimizer) {
  if (optimizer.parameter_count() == optimizer.known_count) {
    return;
  }
  optimizer_slots_[static_cast<size_t>(optimizer.index)] = slots_of(optimizer.parameters());
  optimizer.known_count = optimizer.parameter_count();
  decide_who_scales();
}

void AcceleratorCore::note_step(const OptimizerState& optimizer) {
  shared_->steps =
      shared_->steps * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(optimizer.index) + 1;
}

StepResult AcceleratorCore::optimizer_step(OptimizerState& optimizer) {
  update_slots(optimizer);
  const auto& lists = optimizer_slots_[static_cast<size_t>(optimizer.index)];
  complete_open_window(lists);
  const Acts act = acts(lists);
  const uint64_t complete = completed_window(lists);
  if (act == Acts::in_window || (act == Acts::once && optimizer.stepped == complete)) {
    return StepResult::inside_window;
  }
  refuse_local_gradients(lists, "accelerator::step");
  bool local = false;
  bool nothing = false; // a rank of its own, whose window had no rows
  for (const SlotList& list : lists) {
    ModelState& model = models_[list.model];
    model.attempted = model.completed;
    local = local || model.local;
    nothing = nothing || (model.local && window_weight(list.model) == 0);
  }
  const auto non_finite = [this](const SlotList& list) { return models_[list.model].non_finite; };
  optimizer.skipped =
      (!nothing && leaves_out_step(lists, complete)) ||
      (options.skip_non_finite_steps && std::any_of(lists.begin(), lists.end(), non_finite));
  if (optimizer.skipped) {
    return StepResult::skipped;
  }
  optimizer.stepped = complete; // the schedule keeps pace
  if (nothing) {
    return StepResult::skipped;
  }
  step_scaled(optimizer, lists);
  if (!local) { // ranks need not have equally many
    note_step(optimizer);
    done_.push_back({[this, &optimizer] { optimizer_step(optimizer); }, optimizer.index});
  }
  return StepResult::stepped;
}

double AcceleratorCore::common_factor(const std::vector<SlotList>& lists) {
  const double factor = lists.empty() ? 1 : models_[lists[0].model].parallel->pending_factor();
  const bool common = std::all_of(lists.begin(), lists.end(), [&](const SlotList& list) {
    return list.all && models_[list.model].parallel->pending_factor() == factor;
  });
  for (size_t i = 0; !common && i < lists.size(); ++i) {
    models_[lists[i].model].parallel->apply_pending_factor();
  }
  return common ? factor : 1;
}

void AcceleratorCore::step_scaled(OptimizerState& optimizer, const std::vector<SlotList>& lists) {
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
    optimizer.step();
  } else {
    optimizer.fused->step_scaled(factor);
  }
  drop_autocast_casts();
}

bool AcceleratorCore::scheduler_step(SchedulerState& scheduler) {
  const auto& watched = scheduler.optimizers.empty() ? optimizers_ : scheduler.optimizers;
  uint64_t stepped = 0;
  bool always = watched.empty();
  for (const auto& optimizer : watched) {
    const auto& lists = optimizer_slots_[static_cast<size_t>(optimizer->index)];
    if (optimizer->skipped) {
      return false;
    }
    always = always || acts(lists) == Acts::always;
    if (completed_window(lists) == optimizer->stepped) {
      stepped = std::max(stepped, optimizer->stepped);
    }
  }
  if (!always && (stepped == 0 || stepped == scheduler.stepped)) {
    return false;
  }
  scheduler.step();
  scheduler.stepped = stepped;
  ++scheduler.ticks;
  done_.push_back({[this, &scheduler] { scheduler_step(scheduler); }});
  return true;
}

void AcceleratorCore::zero_grad(OptimizerState& optimizer) {
  update_slots(optimizer);
  const auto& lists = optimizer_slots_[static_cast<size_t>(optimizer.index)];
  for (const SlotList& list : lists) {
    const ModelState& model = models_[list.model];
    if (in_window(model)) {
      if (model.window->waiting() > 0) {
        refuse_local_gradients(lists, "accelerator::zero_grad");
      }
      return;
    }
  }
  at::NoGradGuard no_grad;
  for (const SlotList& list : lists) {
    ModelState& model = models_[list.model];
    const FlatGradients& gradients = model.parallel->gradients();
    if (list.all) {
      model.non_finite = false;
    }
    for (const int64_t slot : list.slots) {
      gradients.layout().slots()[static_cast<size_t>(slot)].parameter.mutable_grad().reset();
    }
  }
}

void AcceleratorCore::begin_range(LoaderState& loader) {
  if (!loader.training) {
    begin_evaluation();
    return;
  }
  if (loader.open) {
    end_ranges(&loader, false); // left by break
  }
  for (ModelState& model : models_) {
    check_parameters(model);
    model.announced = false;
  }
  loader.open = true;
}

// Between windows buffers are equal. Inside one, in a training loop's body, every
// rank is at the same place; elsewhere ranks may not be.
void AcceleratorCore::begin_evaluation() {
  const LoaderState* around = active_loader();
  if (around == nullptr || !around->training) {
    return;
  }
  uint64_t middle = 0;
  for (size_t i = 0; i < models_.size(); ++i) {
    const GradientWindow* of_model = models_[i].window;
    if (in_window(models_[i]) && !of_model->opens()) {
      middle |= uint64_t{1} << i;
    }
  }
  even_out_buffers(middle);
}

void AcceleratorCore::end_range(LoaderState& loader) {
  if (loader.open) {
    end_ranges(&loader, false);
    loader.open = false;
  }
}

// Note [A last batch without a backward]
// Who catches what a bad batch threw wants it left out and the others kept. The data's
// last window is completed by what is there: by the first clip or step that follows in
// the batch, or at the data's end, by what was done with the window before.
void AcceleratorCore::complete_without_backward(GradientWindow& last) {
  if (communicator->world_size() > 1 && synced_models(last.models_mask())) {
    const InputError error("accelerator::accumulate",
                           "the last batch of a window had no backward, and its model "
                           "communicates in forward and backward: it is sharded, or its batch "
                           "norm layers are synchronised",
                           "a forward and a backward for each batch",
                           "give backward() of a batch to be left out the weight 0");
    communicator->abort(error.what()); // peers wait for this rank
    throw error;
  }
  last.complete_without_backward();
  report = last.report();
  completed(last, false);
}

void AcceleratorCore::complete_open_window(const std::vector<SlotList>& lists) {
  const auto open = [this](const SlotList& list) { return models_[list.model].window == window; };
  if (window != nullptr && window->data_ends() && window->lacks_last_backward() &&
      reduces(window->models_mask()) && std::any_of(lists.begin(), lists.end(), open)) {
    complete_without_backward(*window);
  }
}

void AcceleratorCore::complete_at_end(const LoaderState* loader) {
  for (auto& [key, last] : windows_) {
    const auto models = models_in(last.models_mask());
    if (!last.lacks_last_backward() || !feeds(key, loader) ||
        models_[models.front()].local) { // whose steps are not kept
      continue;
    }
    const std::vector<Done> done = std::exchange(done_, {});
    std::vector<size_t> zeroed; // before this window, and so behind it
    for (const size_t i : models) {
      if (!models_[i].parallel->has_aside()) {
        zeroed.push_back(i);
      }
    }
    const auto steps_with_it = [&](const Done& action) {
      return action.optimizer >= 0 &&
             std::ranges::any_of(
                 optimizer_slots_.at(static_cast<size_t>(action.optimizer)),
                 [&](const SlotList& list) { return models_[list.model].window == &last; });
    };
    if (std::none_of(done.begin(), done.end(), steps_with_it)) {
      throw InputError("accelerator::accumulate",
                       "the last batch of the data had no backward, and no step of a "
                       "prepared optimizer came after it: the gradients of " +
                           std::to_string(last.batches()) + " batches wait for one",
                       "a step behind a window's last batch",
                       "call optimizer.step() for a batch that is left out, too");
    }
    complete_without_backward(last);
    for (const Done& action : done) {
      action.again();
    }
    for (const size_t i : zeroed) {
      models_[i].parallel->gradients().reset();
      models_[i].non_finite = false;
    }
  }
}

bool AcceleratorCore::feeds(uint64_t key, const LoaderState* loader) const {
  const auto of = fed_by_.find(key);
  return loader == nullptr ||
         (of != fed_by_.end() &&
          std::find(of->second.begin(), of->second.end(), loader) != of->second.end());
}

void AcceleratorCore::drop_unfinished(const LoaderState* loader) {
  for (auto& [mask, unfinished] : windows_) {
    if (!feeds(mask, loader)) {
      continue; // another loader's window goes on
    }
    const bool incomplete = unfinished.lacks_last_backward();
    if (const int64_t batches = unfinished.drop(); batches > 0) {
      log_warning(std::string(incomplete ? "the last batch of the data had no backward"
                                         : "the epoch was left in the middle of a window") +
                  ": the window's gradients are dropped, batches=" + std::to_string(batches));
    }
    fed_by_.erase(mask);
    for (ModelState& model : models_) {
      if (model.window == &unfinished && !unfinished.is_complete()) {
        model.window = nullptr;
      }
    }
  }
}

} // namespace hasten::detail
