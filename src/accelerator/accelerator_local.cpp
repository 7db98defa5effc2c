// What the core does for a scope of LocalSGD: windows that reduce nothing, rounds
// that ranks without batches take part in, counts that agree at the data's end,
// and each rank's own part of a state.
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "accelerator_core.h"
#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "state_load.h"

namespace hasten::detail {

// Key of windows that reduce nothing, beside the mask of their models.
constexpr uint64_t kLocalWindow = uint64_t{1} << 63;

uint64_t AcceleratorCore::window_key(uint64_t mask) const {
  const auto models = models_in(mask);
  const auto is_local = [this](size_t i) { return models_[i].local; };
  return std::any_of(models.begin(), models.end(), is_local) ? mask | kLocalWindow : mask;
}

std::shared_ptr<Communicator> AcceleratorCore::window_communicator(uint64_t key) {
  if ((key & kLocalWindow) == 0) {
    return communicator;
  }
  if (has_replicas(key & ~kLocalWindow)) {
    return shard_group_;
  }
  if (!alone_) {
    alone_ = Communicator::create(World{}, {.name = "local windows"});
  }
  return alone_;
}

WindowControl& AcceleratorCore::control_of(uint64_t models) {
  const uint64_t key = window_key(models);
  if ((key & kLocalWindow) == 0 || !has_replicas(models)) {
    return control_;
  }
  if (!copy_control_) {
    copy_control_.emplace(shard_group_, device);
  }
  return *copy_control_;
}

void AcceleratorCore::refuse_mixed(uint64_t mask, const char* where) const {
  const auto models = models_in(mask);
  const auto is_local = [this](size_t i) { return models_[i].local; };
  if (std::any_of(models.begin(), models.end(), is_local) &&
      !std::all_of(models.begin(), models.end(), is_local)) {
    throw InputError(where, "a loss of the model of a LocalSGD scope and of others",
                     "losses of that model alone inside the scope",
                     "put both models into one module");
  }
}

void AcceleratorCore::open_local(LocalScope& scope) {
  constexpr const char* where = "accelerator::LocalSGD";
  if (local_scope_ != nullptr) {
    throw InputError(where, "a scope of this accelerator is open already", "one scope at a time",
                     "call finish() of the other one first");
  }
  if (in_window(models_[scope.model()])) {
    throw InputError(where, "the model is in the middle of a window",
                     "a complete window, or none yet", "open the scope before the loop");
  }
  if (!models_[scope.model()].sync_norms.layers().empty()) {
    throw InputError(where,
                     "the model has synchronised batch norm layers, whose every forward waits "
                     "for the other ranks",
                     "layers of this rank's own: ranks go ways of their own inside the scope",
                     "leave AcceleratorOptions::sync_batchnorm off");
  }
  local_scope_ = &scope;
}

void AcceleratorCore::set_local(bool local) {
  ModelState& model = models_[local_scope_->model()];
  model.parallel->set_local(local);
  model.local = local;
}

void AcceleratorCore::close_local() noexcept {
  ModelState& model = models_[local_scope_->model()];
  model.local = false;
  try {
    model.parallel->set_local(false);
  } catch (const Error&) { // left in the middle of a window
    model.parallel->cancel();
    model.parallel->set_local(false);
    model.window = nullptr;
  }
  local_scope_ = nullptr;
}

bool AcceleratorCore::between_windows(size_t model) const { return !in_window(models_[model]); }

std::vector<std::shared_ptr<OptimizerState>> AcceleratorCore::optimizers_of(size_t model) const {
  std::vector<std::shared_ptr<OptimizerState>> found;
  for (const auto& optimizer : optimizers_) {
    const auto& lists = optimizer_slots_[static_cast<size_t>(optimizer->index)];
    if (std::any_of(lists.begin(), lists.end(), [&](const SlotList& list) {
          return list.model == model && !list.slots.empty();
        })) {
      found.push_back(optimizer);
    }
  }
  return found;
}

void AcceleratorCore::announce_round(uint64_t number, int64_t kind) {
  WindowTotals mine;
  mine.round = kind;
  mine.number = number;
  mine.models = uint64_t{1} << local_scope_->model();
  mine.steps = shared_->steps;
  control_.start(mine, at::Tensor());
  if (control_.wait().stale > 0) {
    share_learners(); // of a window before the scope became local
  }
}

// Note [Clocks]
// Inside a scope ranks step by themselves, and those with fewer batches have fewer
// steps. When all have run out they take the largest count, so that the next
// rounds come in the same step on every rank, and tick their schedules as often.
void AcceleratorCore::align_clocks() {
  const at::Tensor most = at::tensor(clocks(), at::kLong);
  communicator->all_reduce(most, ReduceOp::MAX, "steps of the ranks");
  take_clocks(most.const_data_ptr<int64_t>());
}

std::vector<int64_t> AcceleratorCore::clocks() const {
  std::vector<int64_t> mine = local_scope_->clocks();
  for (const auto& scheduler : schedulers_) {
    mine.push_back(scheduler->ticks);
  }
  return mine;
}

void AcceleratorCore::take_clocks(const int64_t* most) {
  const size_t count = local_scope_->clocks().size();
  local_scope_->set_clocks(most);
  for (size_t i = 0; i < schedulers_.size(); ++i) {
    for (; schedulers_[i]->ticks < most[count + i]; ++schedulers_[i]->ticks) {
      schedulers_[i]->step();
    }
  }
}

bool AcceleratorCore::shrink() {
  const auto left = communicator->shrink();
  if (!left) {
    return false;
  }
  std::vector<int> launch_ranks;
  std::string names;
  for (const int rank : left->ranks) {
    launch_ranks.push_back(launch_ranks_.empty() ? rank : launch_ranks_[static_cast<size_t>(rank)]);
    names += (names.empty() ? "" : ", ") + std::to_string(launch_ranks.back());
  }
  launch_ranks_ = std::move(launch_ranks);
  world.rank = communicator->rank();
  world.world_size = communicator->world_size();
  if (world.rank == 0) {
    log_warning("local sgd: " + left->cause + "; going on with " +
                (left->ranks.size() == 1 ? "rank " : "ranks ") + names);
  }
  return true;
}

// Inside a scope every rank has parameters, buffers and moments of its own.
void AcceleratorCore::collect_local(StateParts& parts) const {
  parts.shared_values["local"] = local_scope_ != nullptr;
  if (local_scope_ == nullptr) {
    return;
  }
  const size_t model = local_scope_->model();
  NamedTensors own;
  auto& values = parts.own_values["local"];
  values["scope"] = nlohmann::json::object();
  local_scope_->save_state(own, values["scope"]);
  put_below(parts.own, "local.scope.", own);
  put_below(parts.own, "local.model.", named_model_tensors(*models_[model].parallel->module()));
  values["attempted"] = models_[model].attempted == models_[model].completed;
  const ParameterNames names = parameter_names();
  values["optimizers"] = nlohmann::json::object();
  for (const auto& state : optimizers_of(model)) {
    const std::string index = std::to_string(state->index);
    NamedTensors moments;
    auto& saved = values["optimizers"][index];
    if (const auto* stateful = dynamic_cast<const Stateful*>(state->optimizer.get())) {
      stateful->save_state(moments, saved);
    } else {
      save_optimizer_state(*state->optimizer, names, moments, saved);
    }
    put_below(parts.own, "local.optimizer." + index + ".", moments);
  }
}

// Before the windows: it says which of them reduce.
void AcceleratorCore::plan_scope(StateLoad& load) {
  const bool saved = load.shared.value("local", false);
  if (saved != (local_scope_ != nullptr)) {
    refuse_state(
        load.state_file(),
        std::string("it was saved ") + (saved ? "inside" : "outside") + " a LocalSGD scope",
        std::string("a state saved ") + (saved ? "outside" : "inside") +
            " one, as load_state() is called here",
        saved ? "open the scope before load_state()" : "open the scope behind load_state()");
  }
  if (saved) {
    load.add(load.rank_file, local_scope_, tensors_below(load.own_tensors, "local.scope."),
             load.own.at("local").at("scope"));
  }
}

// After what is shared, which is rank 0's.
void AcceleratorCore::plan_local(StateLoad& load) {
  if (local_scope_ == nullptr) {
    return;
  }
  const auto& values = load.own.at("local");
  const size_t model = local_scope_->model();
  auto copies = std::make_shared<std::vector<std::pair<at::Tensor, at::Tensor>>>();
  for (const auto& [name, target] : named_model_tensors(*models_[model].parallel->module())) {
    const auto found = load.own_tensors.find("local.model." + name);
    if (found == load.own_tensors.end() || found->second.sizes() != target.sizes()) {
      refuse_state(load.rank_file, "\"" + name + "\" is missing or of another shape");
    }
    copies->emplace_back(target, found->second);
  }
  load.apply.push_back([copies] {
    const at::NoGradGuard no_grad;
    for (auto& [target, own] : *copies) {
      target.copy_(own);
    }
  });
  for (const auto& state : optimizers_of(model)) {
    const std::string index = std::to_string(state->index);
    const auto& own = values.at("optimizers").at(index);
    NamedTensors moments = tensors_below(load.own_tensors, "local.optimizer." + index + ".");
    if (auto* stateful = dynamic_cast<Stateful*>(state->optimizer.get())) {
      load.add(load.rank_file, stateful, std::move(moments), own);
    } else {
      load.apply.push_back(
          prepare_optimizer_load(*state->optimizer, parameter_names(), moments, own));
    }
  }
  const bool attempted = values.at("attempted").get<bool>();
  load.apply.push_back([this, model, attempted] {
    models_[model].attempted = models_[model].completed - (attempted ? 0 : 1);
    local_scope_->loaded();
  });
}

} // namespace hasten::detail
