#include "accelerator_core.h"

#include <ATen/ATen.h>
#include <torch/cuda.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdlib>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/core/deferred_init.h"
#include "hasten/core/random.h"
#include "hasten/parallel/ddp.h"

namespace hasten::detail {

bool debugs(const AcceleratorOptions& options) {
  const char* text = std::getenv("HASTEN_DEBUG");
  return options.debug || (text != nullptr && std::string_view(text) == "1");
}

at::Device accelerator_device(const AcceleratorOptions& options, int rank) {
  if (options.cpu || !torch::cuda::is_available()) {
    return at::kCPU;
  }
  const auto count = static_cast<int>(torch::cuda::device_count());
  return {at::kCUDA, static_cast<c10::DeviceIndex>(rank % count)};
}

AcceleratorCore::AcceleratorCore(AcceleratorOptions o, World w, std::shared_ptr<Communicator> c,
                                 bool owns)
    : options(o),
      world(std::move(w)),
      order_check(debugs(o) ? std::make_shared<OrderCheck>(c) : nullptr),
      communicator(order_check ? order_check : std::move(c)),
      owns_communicator(owns),
      device(accelerator_device(o, world.local_rank)),
      loss_scale_(o.grad_scaler),
      shared_(std::make_shared<WindowShared>()),
      control_(communicator, device) {
  if (order_check) {
    shared_->check = [this] { compare_ranks(); };
  }
  choose_precision(options.mixed_precision);
  if (options.seed) {
    set_seed(*options.seed);
  }
}

void AcceleratorCore::enter_loop(const std::shared_ptr<LoaderState>& loader) {
  std::erase(loops_, loader);
  loops_.push_back(loader);
}

const LoaderState* AcceleratorCore::active_loader() {
  std::erase_if(loops_, [](const auto& loader) { return loader->loop.expired(); });
  return loops_.empty() || !loops_.back()->handed_out ? nullptr : loops_.back().get();
}

size_t AcceleratorCore::model_index(const torch::nn::Module* module, const char* where) const {
  const auto it = model_index_.find(module);
  if (it == model_index_.end()) {
    throw InputError(where, "a model that was not prepared", "a model given to prepare()",
                     "call accelerator.prepare(model, …) first");
  }
  return it->second;
}

void AcceleratorCore::prepare_model(std::shared_ptr<torch::nn::Module> module) {
  if (!module) {
    throw InputError("accelerator::prepare", "model=null", "a model");
  }
  if (model_index_.count(module.get()) > 0) {
    return;
  }
  if (models_.size() >= 32) {
    throw InputError("accelerator::prepare", "a 33rd model", "at most 32 an accelerator");
  }
  for (const auto& item : module->named_parameters()) {
    const auto owner = parameter_owner_.find(item.value().unsafeGetTensorImpl());
    if (owner != parameter_owner_.end()) {
      throw InputError("accelerator::prepare",
                       "parameter \"" + item.key() + "\" is also \"" + owner->second.second +
                           "\" of a model prepared before",
                       "models that share no parameters", "prepare one module that holds both");
    }
  }
  if (options.seed && !seeded_) {
    seed_dropout(*options.seed, world.rank);
    seeded_ = true;
  }
  const auto elsewhere = [this](const auto& item) { return item.value().device() != device; };
  const auto parameters = module->named_parameters();
  const auto buffers = module->named_buffers();
  if (std::any_of(parameters.begin(), parameters.end(), elsewhere) ||
      std::any_of(buffers.begin(), buffers.end(), elsewhere)) {
    materialize(*module); // only memory of the CPU is deferred
    module->to(device); // same tensors, new storage: flatten only after it
  }
  ModelState state;
  BufferPolicy policy = options.buffers;
  convert_batch_norms(module, state, policy);
  if (strategy_in_use() == Strategy::ddp) {
    prepare_whole(state, module, policy);
  } else {
    prepare_sharded(state, module, policy);
    state.synced = true;
  }
  for (const auto& [name, parameter] : state.parallel->parameters()) {
    parameter_owner_[parameter.unsafeGetTensorImpl()] = {models_.size(), name};
  }
  model_index_[module.get()] = models_.size();
  models_.push_back(std::move(state));
}

void AcceleratorCore::prepare_whole(ModelState& state, std::shared_ptr<torch::nn::Module> module,
                                    BufferPolicy buffers) {
  DdpOptions ddp;
  ddp.bucket_cap_mb = options.bucket_cap_mb;
  ddp.first_bucket_mb = std::min(ddp.first_bucket_mb, options.bucket_cap_mb);
  ddp.find_unused_parameters = options.find_unused_parameters;
  ddp.static_graph = options.static_graph;
  ddp.buffers = buffers;
  state.parallel = std::make_shared<Ddp>(communicator, std::move(module), ddp);
}

void AcceleratorCore::register_comm_hook(const torch::nn::Module* module,
                                         std::shared_ptr<CommHook> hook) {
  models_[model_index(module, "accelerator::register_comm_hook")].parallel->register_comm_hook(
      std::move(hook));
}

// Note [Buffers]
// A collective of its own, before a forward. Ranks that ran out of batches wait
// for a control vector, so one announces it; it also finds ranks that are
// elsewhere, before they would wait for each other.
void AcceleratorCore::even_out_buffers(uint64_t models, bool forward) {
  uint64_t mask = forward ? synced_models(models) : 0;
  for (const size_t i : models_in(models)) {
    if (models_[i].parallel->evens_out_buffers(!forward)) {
      mask |= uint64_t{1} << i;
    }
  }
  uint64_t local = 0; // these concern other ranks than the rest
  for (const size_t i : models_in(mask)) {
    local |= models_[i].local ? uint64_t{1} << i : 0;
  }
  for (const uint64_t part : {mask & ~local, local}) {
    if (part != 0) {
      sync_announced(part, announce_models(part), true);
    }
  }
}

bool AcceleratorCore::announce_models(uint64_t models) {
  WindowTotals mine;
  mine.buffers = true;
  mine.models = models;
  mine.steps = shared_->steps;
  WindowControl& control = control_of(models);
  control.start(mine, at::Tensor());
  return control.wait().finished > 0;
}

// What ranks that ran out hold is stale.
void AcceleratorCore::sync_announced(uint64_t models, bool joined, bool here) {
  DdpRanks ranks;
  if (joined) {
    refuse_joined(models);
    ranks = ranks_with_batches(*communicator, here);
  }
  for (const size_t i : models_in(models)) {
    models_[i].parallel->sync_buffers(ranks);
  }
}

void AcceleratorCore::sync_buffers() { even_out_buffers(~uint64_t{0}); }

std::vector<SlotList> AcceleratorCore::slots_of(const std::vector<at::Tensor>& parameters) {
  std::map<size_t, SlotList> lists;
  size_t position = 0;
  for (const at::Tensor& parameter : parameters) {
    const auto owner = parameter_owner_.find(parameter.unsafeGetTensorImpl());
    if (owner == parameter_owner_.end()) {
      std::ostringstream what;
      what << "parameter " << position << " " << parameter.sizes()
           << " belongs to no prepared model";
      throw InputError("accelerator::prepare", what.str(),
                       "parameters of models that are prepared in the same call or before",
                       "prepare the model too, and build the optimizer from its parameters");
    }
    const size_t model = owner->second.first;
    SlotList& list = lists.try_emplace(model, SlotList{model}).first->second;
    const auto slot = models_[model].parallel->gradients().layout().find(parameter);
    if (slot >= 0 && std::find(list.slots.begin(), list.slots.end(), slot) == list.slots.end()) {
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

void AcceleratorCore::tie_loaders(const std::vector<std::shared_ptr<LoaderState>>& loaders,
                                  const std::vector<torch::nn::Module*>& models,
                                  bool with_optimizer) {
  for (const auto& loader : loaders) {
    loaders_.push_back(loader);
    loader->index = loaders_.size();
  }
  if (loaders.empty() || !with_optimizer) {
    return;
  }
  loaders.front()->training = true;
  training_.push_back(loaders.front());
  for (const auto* module : models) {
    models_[model_index(module, "accelerator::prepare")].loader = loaders.front();
  }
}

std::shared_ptr<LoaderState> AcceleratorCore::training_loader(
    const std::vector<size_t>& models) const {
  for (const size_t model : models) {
    if (models_[model].loader) {
      return models_[model].loader;
    }
  }
  if (training_.size() > 1) {
    throw InputError("accelerator::accumulate",
                     std::to_string(training_.size()) +
                         " training loaders are prepared, none of them with this model",
                     "to be told which", "call accumulate(loader, model)");
  }
  return training_.empty() ? nullptr : training_.front();
}

void AcceleratorCore::set_accumulation(int64_t steps) {
  constexpr const char* kWhere = "accelerator::set_gradient_accumulation_steps";
  if (steps < 1) {
    throw InputError(kWhere, "steps=" + std::to_string(steps), "1 or more");
  }
  for (const auto& [key, known] : windows_) {
    if (known.is_open() || !known.opens()) {
      throw InputError(kWhere, "steps=" + std::to_string(steps) + " inside a window",
                       "a call between windows");
    }
  }
  options.gradient_accumulation_steps = steps;
  for (auto& [key, known] : windows_) {
    known.set_steps(steps);
  }
}

GradientWindow& AcceleratorCore::window_at(uint64_t key) {
  const auto it = windows_.find(key);
  if (it != windows_.end()) {
    return it->second;
  }
  uint64_t mask = 0;
  std::vector<std::shared_ptr<DataParallel>> models;
  for (size_t i = 0; i < models_.size(); ++i) {
    if ((key >> i & 1) != 0) {
      mask |= uint64_t{1} << i;
      models.push_back(models_[i].parallel);
    }
  }
  return windows_
      .try_emplace(key, window_communicator(key), std::move(models), mask, window_options(), device,
                   shared_)
      .first->second;
}

void AcceleratorCore::open(std::shared_ptr<LoaderState> loader, std::optional<double> weight,
                           const std::vector<torch::nn::Module*>& modules) {
  const char* where = "accelerator::accumulate";
  if (window != nullptr) {
    throw InputError(where, "a batch is open already", "one guard at a time",
                     "pass all models of a batch to one accumulate()");
  }
  std::vector<size_t> models;
  uint64_t mask = 0;
  for (const auto* module : modules) {
    models.push_back(model_index(module, where));
    mask |= uint64_t{1} << models.back();
  }
  if (loader == nullptr) {
    loader = training_loader(models);
  } else if (!loader->training) {
    loader->training = loader->open = true;
    training_.push_back(loader);
  }
  refuse_mixed(mask, where);
  GradientWindow& next = window_of(mask);
  refuse_other_windows(models, next, where);
  WindowBatch batch{.weight = weight};
  if (loader != nullptr) {
    batch.data_ends = loader->last;
    batch.rows = loader->rows;
    if (!weight && batch.rows) {
      batch.weight = static_cast<double>(*batch.rows);
    }
    batch.stand_in = loader->stand_in;
  }
  note_reading(loader.get());
  batch.backward_communicates = synced_models(mask) != 0;
  begin_models(mask);
  if (next.opens()) {
    even_out_buffers(mask, true);
  } else {
    announce_forward(mask);
  }
  next.open(batch);
  accumulates_ = true;
  for (const size_t model : models) {
    models_[model].window = &next;
    models_[model].completed = 0;
    models_[model].outside = false;
  }
  add_feeder(mask, loader.get());
  window = &next;
  stands_in = batch.stand_in;
  for (const size_t model : models) {
    if (models_[model].sharded) {
      forwards_.emplace_back(new ForwardScope(models_[model].sharded->forward_scope()));
    }
  }
  begin_autocast();
}

void AcceleratorCore::close(bool unwinding) noexcept {
  if (window == nullptr) {
    return;
  }
  end_autocast(true);
  forwards_.clear();
  const bool broken = !window->failure().empty();
  if ((unwinding || broken) && communicator->world_size() > 1) {
    communicator->abort(broken ? window->failure()
                               : "an exception left the window of accumulate()");
  }
  closed_without_backward_ = window->had_backward() || unwinding ? 0 : window->models_mask();
  last_batch_completed_ = window->is_complete();
  window->close();
  if (broken) {
    for (ModelState& model : models_) {
      if (model.window == window) {
        model.window = nullptr;
      }
    }
  }
  window = nullptr;
}

void AcceleratorCore::backward(const at::Tensor& loss, std::optional<double> sum_weight,
                               const BackwardOptions& backward_options) {
  if (backward_options.last) {
    end_autocast(false);
  }
  std::optional<Autocast> off; // gradients are in the types of the forward
  if (AutocastState::now().enabled()) {
    off.emplace(AutocastOptions{.device = device.type(), .enabled = false});
  }
  if (window == nullptr) {
    backward_outside(loss, sum_weight, backward_options);
    return;
  }
  BackwardOptions inside = backward_options;
  inside.last = inside.last && reduces(window->models_mask());
  const bool was_complete = window->is_complete();
  window->backward(loss, sum_weight, inside);
  if (!window->is_complete()) {
    return;
  }
  report = window->report();
  if (!was_complete) {
    completed(*window, false);
  }
}

void AcceleratorCore::completed(GradientWindow& done, bool outside) {
  ++serial_;
  done_.clear();
  fed_by_.erase(window_key(done.models_mask()));
  for (ModelState& model : models_) {
    if (model.window == &done) {
      model.completed = serial_;
      model.announced = false;
      model.outside = outside;
      model.bad_loss = report.non_finite > 0;
      model.looked = false;
      model.non_finite = model.non_finite || report.non_finite > 0;
    }
  }
}

} // namespace hasten::detail
