// backward() without a window: which models, which weight, whether it reduces; and
// what is refused because ranks would drift apart in silence.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_set>

#include "accelerator_core.h"
#include "hasten/base/error.h"
#include "hasten/base/log.h"

namespace hasten::detail {

std::vector<size_t> AcceleratorCore::models_in(uint64_t mask) const {
  std::vector<size_t> models;
  for (size_t i = 0; i < models_.size(); ++i) {
    if ((mask >> i & 1) != 0) {
      models.push_back(i);
    }
  }
  return models;
}

// One model: no look at the graph. Several: a walk over it, until all are found.
uint64_t AcceleratorCore::models_of_loss(const at::Tensor& loss) const {
  const uint64_t all = (uint64_t{1} << models_.size()) - 1;
  if (models_.size() == 1 || !loss.defined() || !loss.requires_grad()) {
    return all;
  }
  uint64_t found = 0;
  std::vector<torch::autograd::Node*> open{
      torch::autograd::impl::gradient_edge(loss).function.get()};
  std::unordered_set<const torch::autograd::Node*> seen{open.front()};
  while (!open.empty() && found != all) {
    torch::autograd::Node* node = open.back();
    open.pop_back();
    if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      const auto owner = parameter_owner_.find(leaf->variable.unsafeGetTensorImpl());
      if (owner != parameter_owner_.end()) {
        found |= uint64_t{1} << owner->second.first;
      }
    }
    for (const auto& edge : node->next_edges()) {
      if (edge.function && seen.insert(edge.function.get()).second) {
        open.push_back(edge.function.get());
      }
    }
  }
  if (found == 0) {
    throw InputError("accelerator::backward",
                     "the loss depends on no parameter of a prepared model",
                     "the loss of a model given to prepare()",
                     "use the prepared model in the forward, or name it in accumulate()");
  }
  return found;
}

uint64_t AcceleratorCore::push_sync(const std::vector<torch::nn::Module*>& modules, bool sync) {
  SyncScope scope{++next_scope_, modules.empty() ? ~uint64_t{0} : 0, sync};
  for (const auto* module : modules) {
    scope.models |= uint64_t{1} << model_index(module, "accelerator::no_sync");
  }
  sync_scopes_.push_back(scope);
  return scope.id;
}

void AcceleratorCore::pop_sync(uint64_t id) noexcept {
  std::erase_if(sync_scopes_, [id](const SyncScope& scope) { return scope.id == id; });
}

// Bit i: model i is under no_sync(). The innermost scope of a model decides.
uint64_t AcceleratorCore::quiet_models() const {
  uint64_t quiet = 0;
  for (const SyncScope& scope : sync_scopes_) {
    quiet = scope.sync ? quiet & ~scope.models : quiet | scope.models;
  }
  return quiet;
}

bool AcceleratorCore::reduces(uint64_t mask) const {
  const uint64_t quiet = quiet_models() & mask;
  if (quiet != 0 && quiet != mask) {
    throw InputError(
        "accelerator::backward", "the loss depends on models under no_sync() and on others",
        "one decision for all models of a loss", "give no_sync() all of them, or none");
  }
  return quiet == 0;
}

bool AcceleratorCore::sync_gradients() const {
  const uint64_t quiet = quiet_models();
  if (window != nullptr) {
    return window->is_last() && (quiet & window->models_mask()) == 0;
  }
  return last_batch_completed_ && quiet == 0;
}

// Whose batch a loss outside accumulate() is made of: the loop of a loader that
// was prepared with these models, or else the innermost that goes on. Evaluation
// only where there is no training loader.
const LoaderState* AcceleratorCore::current_loader(uint64_t mask) const {
  const auto goes_on = [](const std::shared_ptr<LoaderState>& loader) {
    return loader && loader->handed_out && !loader->loop.expired();
  };
  for (const size_t i : models_in(mask)) {
    if (goes_on(models_[i].loader)) {
      return models_[i].loader.get();
    }
  }
  for (auto loader = loops_.rbegin(); loader != loops_.rend(); ++loader) {
    if (goes_on(*loader) && ((*loader)->training || training_.empty())) {
      return loader->get();
    }
  }
  return nullptr;
}

// The next window's control vector compares it.
void AcceleratorCore::note_reading(const LoaderState* loader) {
  shared_->read = loader != nullptr ? loader->first_read : 0;
  shared_->range = loader != nullptr ? loader->range : "";
}

void AcceleratorCore::check_parameters(const ModelState& model) const {
  for (const auto& item : model.parallel->module()->named_parameters()) {
    if (parameter_owner_.count(item.value().unsafeGetTensorImpl()) == 0) {
      throw InputError(
          "accelerator::accumulate",
          "parameter \"" + item.key() + "\" is another tensor than when the model was prepared",
          "the parameters given to prepare()",
          "replace or register parameters before prepare(), or copy values "
          "into the old ones (parameter.copy_ under NoGradGuard)");
    }
  }
}

void AcceleratorCore::begin_models(uint64_t mask) {
  for (const size_t i : models_in(mask)) {
    ModelState& model = models_[i];
    // Names cost more than a small step: at first, then ever more rarely. The
    // beginning of an epoch looks too.
    if (const uint64_t n = ++model.opened; (n & (n - 1)) == 0) {
      check_parameters(model);
    }
    if (model.non_finite && !in_window(model) && model.parallel->gradients().cleared()) {
      model.non_finite = false;
    }
  }
}

void AcceleratorCore::refuse_other_windows(const std::vector<size_t>& models,
                                           const GradientWindow& next, const char* where) const {
  for (const size_t model : models) {
    if (in_window(models_[model]) && models_[model].window != &next) {
      throw InputError(where, "a model is in the middle of a window with other models",
                       "the same models until the window is complete");
    }
  }
}

void AcceleratorCore::add_feeder(uint64_t mask, const LoaderState* loader) {
  auto& feeders = fed_by_[window_key(mask)];
  if (std::find(feeders.begin(), feeders.end(), loader) == feeders.end()) {
    feeders.push_back(loader);
  }
}

void AcceleratorCore::backward_outside(const at::Tensor& loss, std::optional<double> sum_weight,
                                       const BackwardOptions& backward_options) {
  const char* where = "accelerator::backward";
  if (models_.empty()) {
    throw InputError(where, "no model is prepared",
                     "auto [model, optimizer, …] = accelerator.prepare(model, optimizer, …)");
  }
  const uint64_t mask = models_of_loss(loss);
  if ((closed_without_backward_ & mask) != 0) {
    throw InputError(where, "the batch that accumulate() opened was closed before its backward",
                     "the guard to live until the optimizer's step",
                     "auto window = accelerator.accumulate(model); in the loop's body");
  }
  if (!backward_options.last) {
    throw InputError(where, "last=false outside accumulate()", "no_sync() there",
                     "auto quiet = accelerator.no_sync(model); around this backward");
  }
  if (options.gradient_accumulation_steps > 1 && !std::exchange(warned_of_steps_, true)) {
    log_warning(
        "backward() outside accumulate() is scaled by nobody: gradient_accumulation_steps=" +
        std::to_string(options.gradient_accumulation_steps) + " is for batches inside it");
  }
  const std::vector<size_t> models = models_in(mask);
  refuse_sharded_outside(models);
  const bool reduce = reduces(mask);
  refuse_mixed(mask, where);
  GradientWindow& own = window_of(mask);
  refuse_other_windows(models, own, where);
  const LoaderState* loader = current_loader(mask);
  WindowBatch batch;
  if (loader != nullptr && loader->rows) {
    batch.rows = loader->rows;
    batch.weight = static_cast<double>(*loader->rows);
    batch.stand_in = loader->stand_in;
  }
  note_reading(loader);
  batch.backward_communicates = synced_models(mask) != 0;
  begin_models(mask);
  try {
    own.backward_outside(loss, sum_weight, batch, reduce, backward_options.retain_graph);
  } catch (...) {
    if (!own.failure().empty()) {
      for (const size_t i : models) {
        models_[i].window = nullptr;
      }
      // Under no_sync() no peer waits for this rank, but in layers that communicate.
      if (communicator->world_size() > 1 && (reduce || batch.backward_communicates)) {
        communicator->abort(own.failure());
      }
    }
    throw;
  }
  for (const size_t i : models) {
    models_[i].window = &own;
    models_[i].completed = 0;
    models_[i].outside = true;
  }
  add_feeder(mask, loader);
  last_batch_completed_ = reduce;
  if (own.is_complete()) {
    report = own.report();
    completed(own, true);
  }
}

void AcceleratorCore::refuse_local_gradients(const std::vector<SlotList>& lists,
                                             const char* where) const {
  for (const SlotList& list : lists) {
    const ModelState& model = models_[list.model];
    if (model.window != nullptr && model.window->waiting() > 0) {
      throw InputError(where,
                       std::to_string(model.window->waiting()) +
                           " backward calls under no_sync() are not reduced yet",
                       "a backward outside no_sync() before it",
                       "end no_sync() before the last backward, or call trigger_sync()");
    }
    if (model.parallel->has_foreign_gradients()) {
      throw InputError(where,
                       "gradients of \"" + model.parallel->parameters().front().first +
                           "\" and others come from a backward that was not "
                           "accelerator.backward() on this model: every rank has its own",
                       "accelerator.backward(loss), or gradients that were zeroed",
                       "use that instead of loss.backward(); name every model that the loss "
                       "depends on in accumulate(), or detach() what it is not to train");
    }
  }
}

} // namespace hasten::detail
