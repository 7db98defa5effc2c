// What happens when a rank's batches end: all ranks end together, or the rank joins
// what the others still do (Note [Stale ranks]).
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "accelerator_core.h"
#include "hasten/base/error.h"
#include "hasten/core/autocast.h"
#include "hasten/optim/optimizer_state.h"

namespace hasten::detail {

// What ranks that finish must agree on, below 2^16: which loader ended, and the
// optimizer steps so far. 0, which agrees with all: the end of the run.
uint64_t end_of_data(const LoaderState* loader, uint64_t steps) {
  if (loader == nullptr) {
    return 0;
  }
  const uint64_t mixed = (steps * 0x9e3779b97f4a7c15ull + loader->index) * 0x9e3779b97f4a7c15ull;
  return (mixed >> 49) + 1;
}

void AcceleratorCore::end_ranges(const LoaderState* loader, bool joins) {
  try {
    complete_at_end(loader);
    // Other ranks complete a window that had only its last batch here. Inside a LocalSGD
    // scope each rank has windows of its own.
    joins = joins || local_scope_ != nullptr || left_out_last(loader);
    drop_unfinished(loader);
    if (communicator->world_size() > 1) {
      take_part(loader, joins);
    }
  } catch (const std::exception& error) {
    if (communicator->world_size() > 1) {
      communicator->abort(error.what()); // peers may wait for this rank
    }
    throw;
  }
}

bool AcceleratorCore::left_out_last(const LoaderState* loader) const {
  return std::ranges::any_of(windows_, [&](const auto& entry) {
    return entry.second.left_out_last() && feeds(entry.first, loader);
  });
}

// A peer may be lost in between: where a scope of LocalSGD goes on without it, so
// does this.
void AcceleratorCore::take_part(const LoaderState* loader, bool joins) {
  end_with_copy(loader);
  for (;;) {
    bool survivable = true;
    try {
      serve_peers(loader, joins, survivable);
      return;
    } catch (const CommunicationError&) {
      if (!survivable || local_scope_ == nullptr || !local_scope_->recover()) {
        throw;
      }
      if (local_scope_->ended_in_recovery()) {
        return;
      }
    }
  }
}

// Inside a LocalSGD scope the ranks that hold a copy together end together, without a
// word to the others.
void AcceleratorCore::end_with_copy(const LoaderState* loader) {
  WindowControl& of_copy = control_of(~uint64_t{0});
  if (local_scope_ == nullptr || &of_copy == &control_) {
    return;
  }
  WindowTotals mine;
  mine.finished = 1;
  mine.data = end_of_data(loader, shared_->steps);
  of_copy.start(mine, at::Tensor());
  of_copy.wait();
}

// Says "finished" until every rank does.
void AcceleratorCore::serve_peers(const LoaderState* loader, bool joins, bool& survivable) {
  WindowTotals mine;
  mine.finished = 1;
  mine.joins = joins;
  // A rank that joins may have steps still to take part in. Inside a LocalSGD scope steps
  // are each rank's own.
  if (local_scope_ != nullptr) {
    mine.data = end_of_data(loader, 0);
  } else if (!joins) {
    mine.data = end_of_data(loader, shared_->steps);
  }
  mine.read = loader != nullptr ? loader->read : 0;
  mine.range = loader != nullptr ? loader->range : "";
  WindowTotals totals;
  for (;;) {
    mine.stale = stale_ ? 1 : 0;
    control_.start(mine, at::Tensor());
    totals = control_.wait();
    if (totals.finished == communicator->world_size()) {
      break;
    }
    const bool is_window = totals.round == 0 && !totals.buffers && totals.models != 0;
    survivable = totals.round != 0; // those with batches do not survive the others either
    if (totals.stale > 0 && !is_window && !totals.buffers) {
      share_learners();
    }
    if (totals.round != 0) {
      local_scope_->join_round(totals.round);
    } else if (totals.buffers) {
      sync_announced(totals.models, true, false);
    } else if (is_window) {
      join_window(totals);
    } else {
      save_with_peers();
    }
    survivable = true;
  }
  if (totals.stale > 0) {
    share_learners();
  }
  if (local_scope_ != nullptr) {
    align_clocks();
  }
}

void AcceleratorCore::join_window(const WindowTotals& totals) {
  stale_ = true;
  GradientWindow& theirs = window_of(totals.models);
  theirs.join(totals);
  report = theirs.report();
}

// Note [Stale ranks]
// A rank that joins windows adds zeros to them and does none of the steps that follow:
// they happen in user code that it does not run. When all ranks have ended, before a
// round of LocalSGD and before a state is saved, a rank that is not stale sends what it
// has: models, gradients, optimizers, how often schedules ticked, the loss scale. Local
// and sharded models stay: ranks are to differ.
void AcceleratorCore::share_learners() {
  for (const ModelState& model : models_) {
    model.parallel->apply_pending_factor();
  }
  NamedTensors tensors;
  const nlohmann::json mine = stale_ ? nlohmann::json() : collect_trained(tensors);
  const auto ranks = communicator->all_gather_object(mine, "state of ranks that trained on");
  const auto source = std::find_if(ranks.begin(), ranks.end(),
                                   [](const nlohmann::json& rank) { return !rank.is_null(); });
  const auto from = static_cast<int>(source - ranks.begin());
  NamedTensors received;
  for (const auto& form : source->at("tensors")) {
    const auto name = form[0].get<std::string>();
    const auto type = static_cast<at::ScalarType>(form[1].get<int>());
    const auto sizes = form[2].get<std::vector<int64_t>>();
    const at::Tensor wire = from == communicator->rank()
                                ? tensors.at(name).detach().to(device).contiguous()
                                : at::empty(sizes, at::TensorOptions(type).device(device));
    if (wire.numel() > 0) {
      communicator->broadcast(wire.reshape({-1}).view(at::kByte), from, "trained state");
    }
    received[name] = wire;
  }
  if (std::exchange(stale_, false)) {
    take_trained(received, *source);
  }
}

bool AcceleratorCore::is_shared(const OptimizerState& optimizer) const {
  const auto& lists = optimizer_slots_[static_cast<size_t>(optimizer.index)];
  return std::none_of(lists.begin(), lists.end(), [this](const SlotList& list) {
    return models_[list.model].local || models_[list.model].sharded;
  });
}

nlohmann::json AcceleratorCore::collect_trained(NamedTensors& tensors) const {
  nlohmann::json values = {{"models", nlohmann::json::array()},
                           {"optimizers", nlohmann::json::array()},
                           {"ticks", nlohmann::json::array()},
                           {"tensors", nlohmann::json::array()},
                           {"serial", serial_},
                           {"scaled", scaled_serial_},
                           {"steps", shared_->steps},
                           {"accumulates", accumulates_},
                           {"complete", last_batch_completed_},
                           {"loss_scale", saved_loss_scale()}};
  for (size_t i = 0; i < models_.size(); ++i) {
    const ModelState& model = models_[i];
    values["models"].push_back({{"window", model.window ? model.window->models_mask() : 0},
                                {"completed", model.completed},
                                {"attempted", model.attempted},
                                {"outside", model.outside},
                                {"non_finite", model.non_finite}});
    if (model.local || model.sharded) {
      continue;
    }
    const std::string prefix = std::to_string(i) + ".";
    put_below(tensors, "model." + prefix, named_model_tensors(*model.parallel->module()));
    for (const FlatSlot& slot : model.parallel->gradients().layout().slots()) {
      if (const at::Tensor& gradient = slot.parameter.grad(); gradient.defined()) {
        tensors["grad." + prefix + slot.name] =
            gradient.is_sparse() ? gradient.to_dense() : gradient;
      }
    }
  }
  const ParameterNames names = parameter_names();
  for (const auto& state : optimizers_) {
    nlohmann::json saved = {{"stepped", state->stepped}, {"skipped", state->skipped}};
    NamedTensors moments;
    if (!is_shared(*state)) {
      saved = nlohmann::json();
    } else if (const auto* own = dynamic_cast<const Stateful*>(state->optimizer.get())) {
      own->save_state(moments, saved["values"]);
    } else {
      save_optimizer_state(*state->optimizer, names, moments, saved["values"]);
    }
    put_below(tensors, "optimizer." + std::to_string(state->index) + ".", moments);
    values["optimizers"].push_back(std::move(saved));
  }
  for (const auto& scheduler : schedulers_) {
    values["ticks"].push_back({scheduler->ticks, scheduler->stepped});
  }
  for (const auto& [name, tensor] : tensors) {
    values["tensors"].push_back(
        {name, static_cast<int>(tensor.scalar_type()), tensor.sizes().vec()});
  }
  return values;
}

void AcceleratorCore::take_trained(const NamedTensors& tensors, const nlohmann::json& values) {
  for (size_t i = 0; i < models_.size(); ++i) {
    if (!models_[i].local && !models_[i].sharded) {
      take_model(i, tensors, values.at("models").at(i));
    }
  }
  for (const auto& scheduler : schedulers_) {
    const auto& watched = scheduler->optimizers.empty() ? optimizers_ : scheduler->optimizers;
    if (!std::ranges::all_of(watched, [this](const auto& state) { return is_shared(*state); })) {
      continue;
    }
    const auto& theirs = values.at("ticks").at(static_cast<size_t>(scheduler->index));
    for (; scheduler->ticks < theirs[0].get<int64_t>(); ++scheduler->ticks) {
      scheduler->step();
    }
    theirs[1].get_to(scheduler->stepped);
  }
  for (const auto& state : optimizers_) { // after the ticks: rates are theirs
    const auto& saved = values.at("optimizers").at(static_cast<size_t>(state->index));
    if (saved.is_null()) {
      continue;
    }
    const NamedTensors moments =
        tensors_below(tensors, "optimizer." + std::to_string(state->index) + ".");
    if (auto* own = dynamic_cast<Stateful*>(state->optimizer.get())) {
      own->load_state(moments, saved.at("values"));
    } else {
      prepare_optimizer_load(*state->optimizer, parameter_names(), moments, saved.at("values"))();
    }
    saved.at("stepped").get_to(state->stepped);
    saved.at("skipped").get_to(state->skipped);
  }
  if (scales()) {
    loss_scale_.load_state({}, values.at("loss_scale"));
    publish_loss_scale();
  }
  serial_ = std::max(serial_, values.at("serial").get<uint64_t>());
  scaled_serial_ = std::max(scaled_serial_, values.at("scaled").get<uint64_t>());
  values.at("steps").get_to(shared_->steps);
  values.at("accumulates").get_to(accumulates_);
  values.at("complete").get_to(last_batch_completed_);
  done_.clear();
  drop_autocast_casts();
}

void AcceleratorCore::take_model(size_t index, const NamedTensors& tensors,
                                 const nlohmann::json& values) {
  const at::NoGradGuard no_grad;
  ModelState& model = models_[index];
  const std::string prefix = std::to_string(index) + ".";
  for (const auto& [name, target] : named_model_tensors(*model.parallel->module())) {
    const bool is_parameter = parameter_owner_.count(target.unsafeGetTensorImpl()) > 0;
    if (is_parameter || options.buffers != BufferPolicy::leave) {
      at::Tensor(target).copy_(tensors.at("model." + prefix + name));
    }
  }
  FlatGradients& gradients = model.parallel->gradients();
  const auto& slots = gradients.layout().slots();
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto found = tensors.find("grad." + prefix + slots[i].name);
    const auto slot = static_cast<int64_t>(i);
    if (found == tensors.end()) {
      slots[i].parameter.mutable_grad().reset();
      continue;
    }
    gradients.install_slot(slot);
    at::Tensor(gradients.view(slot)).copy_(found->second);
    gradients.mark_written();
  }
  const auto mask = values.at("window").get<uint64_t>();
  model.window = mask == 0 ? nullptr : &window_of(mask);
  values.at("completed").get_to(model.completed);
  values.at("attempted").get_to(model.attempted);
  values.at("outside").get_to(model.outside);
  values.at("non_finite").get_to(model.non_finite);
}

// A last step outside the loops is compared by nobody else.
void AcceleratorCore::check_steps() {
  if (communicator->world_size() == 1) {
    return;
  }
  LoaderState end_of_run;
  bool survivable = false;
  serve_peers(&end_of_run, false, survivable);
}

void AcceleratorCore::finish() {
  if (std::exchange(finished, true)) {
    return;
  }
  bool open = false;
  for (const auto& loader : training_) {
    open = std::exchange(loader->open, false) || open;
  }
  if (open) {
    end_ranges(nullptr, false);
  }
  check_steps();
  for (const ModelState& model : models_) {
    if (model.sharded) {
      model.sharded->close();
    }
  }
  for (const auto& group : {sync_norms_, replicas_, shard_group_}) {
    if (group) {
      group->close();
    }
  }
  if (owns_communicator) {
    communicator->close();
  }
}

} // namespace hasten::detail
