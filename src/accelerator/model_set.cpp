#include "model_set.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/core/deferred_init.h"
#include "hasten/core/random.h"
#include "hasten/parallel/ddp.h"
#include "parallel/module_buffers.h"
#include "parallel/verify.h"
#include "run_context.h"

namespace hasten::detail {

size_t ModelSet::index(const torch::nn::Module* module, const char* where) const {
  const auto it = model_index_.find(module);
  if (it == model_index_.end()) {
    throw InputError(where, "a model that was not prepared", "a prepared model",
                     "call accelerator.prepare(model, …) first");
  }
  return it->second;
}

std::vector<size_t> ModelSet::indices(const std::vector<torch::nn::Module*>& modules,
                                      const char* where) const {
  return mapped(modules, [&](const auto* module) { return index(module, where); });
}

std::vector<size_t> ModelSet::in(uint64_t mask) const {
  std::vector<size_t> models;
  for (size_t i = 0; i < models_.size(); ++i) {
    if ((mask >> i & 1) != 0) {
      models.push_back(i);
    }
  }
  return models;
}

uint64_t ModelSet::synced(uint64_t mask) const {
  uint64_t synced = 0;
  for (const size_t i : in(mask)) {
    synced |= models_[i].synced ? uint64_t{1} << i : 0;
  }
  return synced;
}

// One model: no look at the graph. Several: a walk over it for each.
uint64_t ModelSet::of_loss(const at::Tensor& loss) const {
  const uint64_t all = (uint64_t{1} << models_.size()) - 1;
  if (models_.size() == 1 || !loss.defined() || !loss.requires_grad()) {
    return all;
  }
  uint64_t found = 0;
  for (size_t i = 0; i < models_.size(); ++i) {
    const auto reached = models_[i].parallel->gradients().layout().reachable(loss);
    found |= uint64_t{std::ranges::find(reached, 1) != reached.end()} << i;
  }
  if (found == 0) {
    throw InputError("accelerator::backward",
                     "the loss depends on no parameter of a prepared model",
                     "the loss of a prepared model",
                     "use the prepared model in the forward, or name it in accumulate()");
  }
  return found;
}

std::vector<SlotList> ModelSet::slots_of(const std::vector<at::Tensor>& parameters) const {
  std::map<size_t, SlotList> lists;
  size_t position = 0;
  for (const at::Tensor& parameter : parameters) {
    const auto owner = parameter_owner_.find(parameter.unsafeGetTensorImpl());
    if (owner == parameter_owner_.end()) {
      throw InputError(
          "accelerator::prepare",
          c10::str("parameter ", position, " ", parameter.sizes(), " belongs to no prepared model"),
          "parameters of models that are prepared in the same call or earlier",
          "prepare the model, too, and build the optimizer from its parameters");
    }
    const size_t model = owner->second.first;
    SlotList& list = lists.try_emplace(model, SlotList{model}).first->second;
    const auto slot = models_[model].parallel->gradients().layout().find(parameter);
    if (slot >= 0 && std::ranges::find(list.slots, slot) == list.slots.end()) {
      list.slots.push_back(slot); // once, also where it is tied; none if frozen
    }
    ++position;
  }
  std::vector<SlotList> result;
  for (auto& [model, list] : lists) {
    list.all = list.slots.size() == models_[model].parallel->gradients().layout().slots().size();
    result.push_back(std::move(list));
  }
  return result;
}

bool ModelSet::owns(const at::Tensor& parameter) const {
  return parameter_owner_.count(parameter.unsafeGetTensorImpl()) > 0;
}

void ModelSet::check_parameters(size_t model) const {
  for (const auto& item : models_[model].parallel->module()->named_parameters()) {
    if (!owns(item.value())) {
      throw InputError(
          "accelerator::accumulate",
          "parameter \"" + item.key() + "\" is another tensor than when the model was prepared",
          "the parameters that prepare() got",
          "call prepare(model) again, or copy values into the old ones (parameter.copy_ under "
          "NoGradGuard)");
    }
  }
}

ParameterNames ModelSet::parameter_names() const {
  ParameterNames names;
  for (const auto& [parameter, owner] : parameter_owner_) {
    names[parameter] = "model." + std::to_string(owner.first) + "." + owner.second;
  }
  return names;
}

void sync_buffers(const ModelSet& models, uint64_t mask) {
  for (const size_t i : models.in(mask)) {
    models[i].parallel->sync_buffers();
  }
}

// Sum of the values' bit patterns, which no rounding hides.
static int64_t bit_sum(const at::Tensor& tensor) {
  const at::Tensor own = tensor.detach().contiguous();
  const at::Tensor flat = own.as_strided({own.numel()}, {1});
  const auto bits = flat.element_size() % 4 == 0   ? at::kInt
                    : flat.element_size() % 2 == 0 ? at::kShort
                                                   : at::kByte;
  return flat.view(bits).sum(at::kLong).item<int64_t>();
}

nlohmann::json parameter_bits(const ModelSet& models) {
  nlohmann::json bits = nlohmann::json::object();
  for (size_t i = 0; i < models.size(); ++i) {
    if (models[i].sharded) { // each rank has other shards
      continue;
    }
    for (const auto& [name, parameter] : models[i].parallel->parameters()) {
      bits["parameter \"" + name + "\" of model " + std::to_string(i)] = bit_sum(parameter);
    }
  }
  return bits;
}

bool ModelSet::changed(size_t model, const torch::nn::Module& module) const {
  constexpr const char* kWhere = "accelerator::prepare";
  DataParallel& was = *models_[model].parallel;
  const FlatLayout& layout = was.gradients().layout();
  const auto now = unique_tensors(module.named_parameters());
  bool changed = now.size() != was.parameters().size();
  auto list = nlohmann::json::array();
  for (size_t i = 0; i < now.size(); ++i) {
    const auto& [name, tensor] = now[i];
    list.push_back({"parameter \"" + name + "\"",
                    std::string(tensor.requires_grad() ? "trainable" : "frozen")});
    const int64_t slot = layout.find(tensor);
    changed = changed || !tensor.is_same(was.parameters()[i].second) ||
              (slot >= 0) != tensor.requires_grad() ||
              (slot >= 0 && !was.sharded() && !layout.fits(slot));
  }
  const auto all = run_.communicator()->all_gather_object(
      {changed, !changed || was.gradients().cleared()}, "a model that is prepared again");
  const auto any = [&](size_t fact, bool value) {
    return std::ranges::any_of(all, [&](const auto& rank) { return rank[fact] == value; });
  };
  if (!any(0, true)) {
    return false;
  }
  require_equal_lists(*run_.communicator(), list, kWhere, "model", "the same model on every rank",
                      "freeze, unfreeze and replace parameters on all ranks");
  if (any(1, false)) {
    throw InputError(kWhere, "the model's parameters have changed, and it has gradients",
                     "a second prepare() between windows, after zero_grad()",
                     "complete the window, step, and call optimizer.zero_grad() before");
  }
  return true;
}

bool ModelSet::prepare(const std::shared_ptr<torch::nn::Module>& module, Precision precision,
                       const std::function<bool(size_t i)>& rows_count,
                       const std::function<void(size_t i)>& forget) {
  if (!module) {
    throw InputError("accelerator::prepare", "model=null", "a model");
  }
  const auto known = model_index_.find(module.get());
  const bool again = known != model_index_.end();
  const size_t index = again ? known->second : models_.size();
  if (again && !changed(index, *module)) {
    return false;
  }
  if (index >= 32) {
    throw InputError("accelerator::prepare", "a 33rd model", "at most 32 per accelerator");
  }
  for (const auto& item : module->named_parameters()) {
    const auto owner = parameter_owner_.find(item.value().unsafeGetTensorImpl());
    if (owner != parameter_owner_.end() && owner->second.first != index) {
      throw InputError("accelerator::prepare",
                       "parameter \"" + item.key() + "\" is also \"" + owner->second.second +
                           "\" of a model prepared before",
                       "models that share no parameters", "prepare one module that holds both");
    }
  }
  std::shared_ptr<CommHook> hook;
  if (again) {
    forget(index);
    hook = models_[index].parallel->comm_hook();
    give_back(models_[index]);
    std::erase_if(parameter_owner_, [&](const auto& owner) { return owner.second.first == index; });
  }
  if (run_.options().seed && !seeded_) {
    seed_dropout(*run_.options().seed, run_.world().rank);
    seeded_ = true;
  }
  const auto elsewhere = [this](const auto& item) {
    return item.value().device() != run_.device();
  };
  const auto parameters = module->named_parameters();
  const auto buffers = module->named_buffers();
  const bool moves =
      std::ranges::any_of(parameters, elsewhere) || std::ranges::any_of(buffers, elsewhere);
  if (moves && run_.strategy() == Strategy::ddp) {
    materialize(*module, run_.device()); // same tensors, new storage: flatten only after it
  }
  PreparedModel state;
  BroadcastBuffers policy = run_.options().broadcast_buffers;
  convert_batch_norms(module, state, policy, [rows_count, index] { return rows_count(index); });
  if (run_.strategy() == Strategy::ddp) {
    prepare_whole(state, module, policy);
  } else {
    prepare_sharded(state, module, policy, precision);
    state.synced = true;
  }
  if (moves) {
    module->to(run_.device()); // what a module's own to() moves, too
  }
  if (hook) {
    hook->reset(); // other buckets
    state.parallel->register_comm_hook(std::move(hook));
  }
  for (const auto& [name, parameter] : state.parallel->parameters()) {
    parameter_owner_[parameter.unsafeGetTensorImpl()] = {index, name};
  }
  model_index_[module.get()] = index;
  models_.resize(std::max(models_.size(), index + 1));
  models_[index] = std::move(state);
  return again;
}

void ModelSet::give_back(PreparedModel& model) const {
  const at::NoGradGuard no_grad;
  std::vector<std::pair<at::Tensor, at::Tensor>> whole;
  for (size_t i = 0; model.sharded && i < model.sharded->parameters().size(); ++i) {
    const at::Tensor& parameter = model.sharded->parameters()[i].parameter;
    whole.emplace_back(parameter, model.sharded->gather_like(i, parameter.detach()));
  }
  if (model.sharded) {
    model.sharded->close();
  }
  model = {};
  for (auto& [parameter, all] : whole) {
    parameter.mutable_grad().reset();
    parameter.set_data(all);
  }
}

void ModelSet::prepare_whole(PreparedModel& state, std::shared_ptr<torch::nn::Module> module,
                             BroadcastBuffers broadcast_buffers) {
  DdpOptions ddp;
  ddp.bucket_cap_mb = run_.options().bucket_cap_mb;
  ddp.first_bucket_mb = std::min(ddp.first_bucket_mb, run_.options().bucket_cap_mb);
  ddp.find_unused_parameters = run_.options().find_unused_parameters;
  ddp.static_graph = run_.options().static_graph;
  ddp.broadcast_buffers = broadcast_buffers;
  state.parallel = std::make_shared<Ddp>(run_.communicator(), std::move(module), ddp);
}

// The layers have their own group, because in backward gradients are sent on the other one, in an
// order that may differ from the layers'.
void ModelSet::convert_batch_norms(const std::shared_ptr<torch::nn::Module>& module,
                                   PreparedModel& state, BroadcastBuffers& broadcast_buffers,
                                   std::function<bool()> rows_count) {
  if (!run_.options().sync_batchnorm || run_.communicator()->world_size() == 1) {
    return;
  }
  if (!sync_norms_) {
    CommunicatorOptions own = run_.communicator()->options();
    own.name += " sync batch norm";
    sync_norms_ = run_.communicator()->duplicate(own);
  }
  state.sync_norms =
      convert_sync_batchnorm(module, sync_norms_, {.rows_count = std::move(rows_count)});
  state.synced = !state.sync_norms.layers.empty();
  // Running statistics are equal without communication, so only other buffers count.
  std::unordered_set<std::string> equal;
  for (const std::string& layer : state.sync_norms.layers) {
    const std::string prefix = layer.empty() ? "" : layer + ".";
    equal.insert({prefix + "running_mean", prefix + "running_var"});
  }
  const auto named = module->named_buffers();
  if (std::ranges::all_of(named, [&](const auto& item) {
        return !item.value().defined() || !item.value().is_floating_point() ||
               equal.count(item.key()) > 0;
      })) {
    broadcast_buffers = BroadcastBuffers::off;
  }
}

void ModelSet::close() {
  for (const PreparedModel& model : models_) {
    if (model.sharded) {
      model.sharded->close();
    }
  }
  for (const auto& group : {sync_norms_, replicas_, shard_group_}) {
    if (group) {
      group->close();
    }
  }
}

} // namespace hasten::detail
