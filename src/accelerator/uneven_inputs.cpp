#include "uneven_inputs.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "hasten/base/error.h"
#include "hasten/core/autocast.h"
#include "hasten/core/random.h"

namespace hasten::detail {

void UnevenInputs::begin_range(LoaderState& loader) {
  if (!loader.training) {
    batch_.begin_evaluation();
    return;
  }
  if (loader.open) {
    end_ranges(&loader, false); // left by break
  }
  batch_.check_parameters();
  loader.open = true;
}

void UnevenInputs::end_range(LoaderState& loader) {
  if (loader.open) {
    end_ranges(&loader, false);
    loader.open = false;
  }
}

// A hash on which finished ranks must agree, below 2^16: the loader that ended and the optimizer
// steps so far. 0, which agrees with all: the end of the run.
uint64_t end_of_data(const LoaderState* loader, uint64_t steps) {
  if (loader == nullptr) {
    return 0;
  }
  const uint64_t mixed = mix(mix(steps, loader->index), 0);
  return (mixed >> 49) + 1;
}

void UnevenInputs::end_ranges(const LoaderState* loader, bool joins) {
  try {
    const bool goes_on = loader != nullptr && !run_.options().sync_with_dataloader;
    if (!goes_on) {
      optimizers_.complete_at_end(loader);
    }
    // Other ranks complete a window that had only its last batch here. Inside a LocalSGD scope each
    // rank has its own windows.
    joins = joins || local_.scope() != nullptr || windows_.left_out_last(loader);
    if (!goes_on) {
      windows_.drop_unfinished(loader);
    }
    if (!run_.alone()) {
      take_part(loader, joins);
    }
    if (goes_on && local_.scope() == nullptr) { // evaluations that follow need equal buffers
      announcer_.sync_buffers(batch_.unfinished(), false, true);
    }
  } catch (const std::exception& error) {
    run_.fail_peers(error); // they may wait for this rank
    throw;
  }
}

// A peer may be lost in between. If a scope of LocalSGD continues without it, so does this.
void UnevenInputs::take_part(const LoaderState* loader, bool joins) {
  end_with_replica(loader);
  for (;;) {
    bool survivable = true;
    try {
      join_until_all_finished(loader, joins, survivable);
      return;
    } catch (const CommunicationError&) {
      if (!survivable || local_.scope() == nullptr || !local_.scope()->recover()) {
        throw;
      }
      if (local_.scope()->ended_in_recovery()) {
        return;
      }
    }
  }
}

// Inside a LocalSGD scope the ranks of a replica end together, without the other ranks.
void UnevenInputs::end_with_replica(const LoaderState* loader) {
  WindowControl& of_copy = announcer_.control_of(~uint64_t{0});
  if (local_.scope() == nullptr || &of_copy == &announcer_.control()) {
    return;
  }
  of_copy.start({.finished = 1, .data = end_of_data(loader, windows_.shared()->steps)});
  of_copy.wait();
}

// Says "finished" until every rank does.
void UnevenInputs::join_until_all_finished(const LoaderState* loader, bool joins,
                                           bool& survivable) {
  WindowTotals mine{.finished = 1, .joins = joins};
  // A rank that joins may still take part in steps. Inside a LocalSGD scope steps are each rank's
  // own.
  if (local_.scope() != nullptr) {
    mine.data = end_of_data(loader, 0);
  } else if (!joins) {
    mine.data = end_of_data(loader, windows_.shared()->steps);
  }
  mine.read = loader != nullptr ? loader->read : 0;
  mine.range = loader != nullptr ? loader->range : "";
  WindowTotals totals;
  for (;;) {
    mine.out_of_date = out_of_date_ ? 1 : 0;
    announcer_.control().start(mine);
    totals = announcer_.control().wait();
    if (totals.finished == run_.communicator()->world_size()) {
      break;
    }
    const bool is_window = totals.round == 0 && !totals.buffers && totals.models != 0;
    survivable = totals.round != 0; // those with batches do not survive the others either
    if (totals.out_of_date > 0 && !is_window && !totals.buffers) {
      share_state();
    }
    if (totals.round != 0) {
      local_.scope()->join_round(totals.round);
    } else if (totals.buffers) {
      announcer_.sync_buffers(totals.models, true, false);
    } else if (is_window) {
      out_of_date_ = true;
      windows_.join(totals);
    } else {
      save_with_peers();
    }
    survivable = true;
  }
  if (totals.out_of_date > 0) {
    share_state();
  }
  if (local_.scope() != nullptr) {
    local_.align_clocks();
  }
}

void UnevenInputs::end_run() {
  if (loaders_.close_passes()) {
    end_ranges(nullptr, false);
  }
  if (!run_.alone()) { // only here is a last step outside the loops compared
    LoaderState end_of_run;
    bool survivable = false;
    join_until_all_finished(&end_of_run, false, survivable);
  }
}

// Note [Ranks out of date]
// A rank that joins windows adds zeros to them and makes none of the steps that follow, because
// these happen in user code that it does not run. When all ranks have ended, before a
// synchronisation of LocalSGD, and before a state is saved, a rank that is up to date sends its
// models, gradients, optimizers, schedulers' step counts and loss scale. Local and sharded models
// are not sent, because they differ between ranks.
void UnevenInputs::share_state() {
  for (const PreparedModel& model : models_) {
    model.parallel->apply_pending_factor();
  }
  NamedTensors tensors;
  const nlohmann::json mine = out_of_date_ ? nlohmann::json() : collect_trained(tensors);
  const auto ranks = run_.communicator()->all_gather_object(mine, "state of ranks that trained on");
  const auto source =
      std::ranges::find_if(ranks, [](const nlohmann::json& rank) { return !rank.is_null(); });
  const auto from = static_cast<int>(source - ranks.begin());
  NamedTensors received;
  for (const auto& form : source->at("tensors")) {
    const auto name = form[0].get<std::string>();
    const auto type = static_cast<at::ScalarType>(form[1].get<int>());
    const auto sizes = form[2].get<std::vector<int64_t>>();
    const at::Tensor wire = from == run_.communicator()->rank()
                                ? tensors.at(name).detach().to(run_.device()).contiguous()
                                : at::empty(sizes, at::TensorOptions(type).device(run_.device()));
    if (wire.numel() > 0) {
      run_.communicator()->broadcast(wire.reshape({-1}).view(at::kByte), from, "trained state");
    }
    received[name] = wire;
  }
  if (std::exchange(out_of_date_, false)) {
    take_trained(received, *source);
  }
}

nlohmann::json UnevenInputs::collect_trained(NamedTensors& tensors) const {
  nlohmann::json values = windows_.save_counts();
  values["models"] = nlohmann::json::array();
  values["tensors"] = nlohmann::json::array();
  values["scaled"] = checks_.scaled();
  values["complete"] = batch_.completed();
  values["loss_scale"] = precision_.save();
  for (size_t i = 0; i < models_.size(); ++i) {
    values["models"].push_back(windows_.save_model_window(i));
    values["models"].back()["non_finite"] = checks_.non_finite(i);
    if (windows_.is_local(i) || models_[i].sharded) {
      continue;
    }
    const DataParallel& model = *models_[i].parallel;
    const std::string prefix = std::to_string(i) + ".";
    put_below(tensors, "model." + prefix, named_model_tensors(*model.module()));
    for (const FlatSlot& slot : model.gradients().layout().slots()) {
      if (const at::Tensor& gradient = slot.parameter.grad(); gradient.defined()) {
        tensors["grad." + prefix + slot.name] =
            gradient.is_sparse() ? gradient.to_dense() : gradient;
      }
    }
  }
  optimizers_.collect_trained(tensors, values);
  for (const auto& [name, tensor] : tensors) {
    values["tensors"].push_back(
        {name, static_cast<int>(tensor.scalar_type()), tensor.sizes().vec()});
  }
  return values;
}

void UnevenInputs::take_trained(const NamedTensors& tensors, const nlohmann::json& values) {
  for (size_t i = 0; i < models_.size(); ++i) {
    if (!windows_.is_local(i) && !models_[i].sharded) {
      take_model(i, tensors, values.at("models").at(i));
    }
  }
  optimizers_.take_trained(tensors, values);
  precision_.load(values.at("loss_scale"));
  windows_.load_counts(values);
  checks_.set_scaled(std::max(checks_.scaled(), values.at("scaled").get<uint64_t>()));
  batch_.set_completed(values.at("complete").get<bool>());
  drop_autocast_casts();
}

void UnevenInputs::take_model(size_t index, const NamedTensors& tensors,
                              const nlohmann::json& values) {
  const at::NoGradGuard no_grad;
  DataParallel& model = *models_[index].parallel;
  const std::string prefix = std::to_string(index) + ".";
  for (const auto& [name, target] : named_model_tensors(*model.module())) {
    if (models_.owns(target) || run_.options().broadcast_buffers != BroadcastBuffers::off) {
      at::Tensor(target).copy_(tensors.at("model." + prefix + name));
    }
  }
  FlatGradients& gradients = model.gradients();
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
  windows_.load_model_window(index, values);
  checks_.set_non_finite(index, values.at("non_finite").get<bool>());
}

} // namespace hasten::detail
