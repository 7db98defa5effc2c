#include "open_batch.h"

#include <algorithm>

#include <algorithm>
#include "gradient_checks.h"
#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/core/memory.h"
#include "hasten/core/random.h"
#include "loader_set.h"
#include "mixed_precision.h"
#include "model_set.h"
#include "run_context.h"
#include "window_set.h"

namespace hasten::detail {

void OpenBatch::open(std::shared_ptr<LoaderState> loader, std::optional<double> weight,
                     const std::vector<torch::nn::Module*>& modules) {
  const char* where = "accelerator::accumulate";
  if (window_ != nullptr) {
    throw InputError(where, "a batch is open already", "one guard at a time",
                     "pass all models of a batch to one accumulate()");
  }
  const std::vector<size_t> models = models_.indices(modules, where);
  uint64_t mask = 0;
  for (const size_t model : models) {
    mask |= uint64_t{1} << model;
  }
  if (loader == nullptr) {
    loader = loaders_.training_loader(models);
  } else {
    loaders_.train_on(loader);
  }
  GradientWindow& next = windows_.get(mask, where);
  WindowBatch batch = begin(mask, loader.get(), weight);
  batch.data_ends = loader != nullptr && loader->last && run_.options().sync_with_dataloader;
  if (next.opens()) {
    even_out_buffers(mask, true);
  } else {
    announce_forward(mask);
  }
  next.open(batch);
  windows_.enter(next, false, loader.get());
  window_ = &next;
  shortages_ = memory_stats(run_.device()).shortages;
  stands_in_ = batch.stand_in;
  for (const size_t model : models) {
    if (models_[model].sharded) {
      forwards_.emplace_back(new ForwardScope(models_[model].sharded->forward_scope()));
    }
  }
  precision_.begin_batch();
}

void OpenBatch::close(bool unwinding) noexcept {
  if (window_ == nullptr) {
    return;
  }
  precision_.end_batch(true);
  forwards_.clear();
  const bool broken = !window_->failure().empty();
  if (broken) {
    run_.fail_peers(window_->failure(), window_->failure_kind());
  } else if (unwinding && memory_stats(run_.device()).shortages > shortages_) {
    run_.fail_peers("memory of " + run_.device().str() + " ran out in the window of accumulate()",
                    ErrorKind::out_of_memory);
  } else if (unwinding) {
    run_.fail_peers("an exception left the window of accumulate()", ErrorKind::other);
  }
  closed_without_backward_ = window_->had_backward() || unwinding ? 0 : window_->models_mask();
  last_batch_completed_ = window_->is_complete();
  window_->close();
  if (broken) {
    windows_.leave(*window_);
  }
  window_ = nullptr;
}

void OpenBatch::backward(const at::Tensor& loss, std::optional<double> sum_weight,
                         const BackwardOptions& options) {
  if (options.last) {
    precision_.end_batch(false);
  }
  std::optional<Autocast> off; // gradients are in the types of the forward
  if (AutocastState::now().enabled()) {
    off.emplace(AutocastOptions{.device = run_.device().type(), .enabled = false});
  }
  if (window_ == nullptr) {
    backward_outside(loss, sum_weight, options);
    return;
  }
  BackwardOptions inside = options;
  inside.last = inside.last && reduces(window_->models_mask());
  const bool was_complete = window_->is_complete();
  try {
    window_->backward(loss, sum_weight, inside);
  } catch (const std::exception& error) {
    try {
      name_shortage(error, "accelerator::backward", "backward", run_.device());
    } catch (const Error& named) {
      run_.fail_peers(named); // before the guard does, because the reason is known here
      throw;
    }
    throw;
  }
  if (window_->is_complete()) {
    completed_window(*window_, false, was_complete);
  }
}

void OpenBatch::completed_window(const GradientWindow& window, bool outside, bool again) {
  windows_.complete(window, outside, again);
  if (!again) {
    announced_ &= ~window.models_mask();
    checks_.completed(window);
  }
  if (run_.order_check() && !windows_.has_local(~uint64_t{0})) { // else replicas differ
    run_.order_check()->compare(parameter_bits(models_));
  }
}

void OpenBatch::backward_outside(const at::Tensor& loss, std::optional<double> sum_weight,
                                 const BackwardOptions& options) {
  const char* where = "accelerator::backward";
  if (models_.size() == 0) {
    throw InputError(where, "no model is prepared",
                     "auto [model, optimizer, …] = accelerator.prepare(model, optimizer, …)");
  }
  const uint64_t mask = models_.of_loss(loss);
  if ((closed_without_backward_ & mask) != 0) {
    throw InputError(where, "the batch that accumulate() opened was closed before its backward",
                     "the guard to live until the optimizer's step",
                     "auto window = accelerator.accumulate(model); in the loop's body");
  }
  if (!options.last) {
    throw InputError(where, "last=false outside accumulate()", "no_sync() instead",
                     "auto quiet = accelerator.no_sync(model); around this backward");
  }
  const int64_t steps = run_.options().gradient_accumulation_steps;
  if (steps > 1 && !std::exchange(warned_of_steps_, true)) {
    log_warning("backward() outside accumulate() is not divided by gradient_accumulation_steps=" +
                std::to_string(steps) + ", which is for batches inside accumulate()");
  }
  const std::vector<size_t> models = models_.in(mask);
  refuse_sharded_outside(models);
  const bool reduce = reduces(mask);
  GradientWindow& own = windows_.get(mask, where);
  const LoaderState* loader = loaders_.current(models);
  const WindowBatch batch = begin(mask, loader, std::nullopt);
  try {
    own.backward_outside(loss, sum_weight, batch, reduce, options.retain_graph);
  } catch (...) {
    if (!own.failure().empty()) {
      windows_.leave(own);
      // Under no_sync() no peer waits for this rank, but in layers that communicate.
      if (reduce || batch.backward_communicates) {
        run_.fail_peers(own.failure(), own.failure_kind());
      }
    }
    throw;
  }
  windows_.enter(own, true, loader);
  last_batch_completed_ = reduce;
  if (own.is_complete()) {
    completed_window(own, true, false);
  }
}

uint64_t OpenBatch::push_sync(const std::vector<torch::nn::Module*>& modules, bool sync) {
  SyncScope scope{++next_scope_, modules.empty() ? ~uint64_t{0} : 0, sync};
  for (const auto* module : modules) {
    scope.models |= uint64_t{1} << models_.index(module, "accelerator::no_sync");
  }
  sync_scopes_.push_back(scope);
  return scope.id;
}

void OpenBatch::pop_sync(uint64_t id) noexcept {
  std::erase_if(sync_scopes_, [id](const SyncScope& scope) { return scope.id == id; });
}

// Bit i: model i is under no_sync(). The innermost scope of a model decides.
uint64_t OpenBatch::unsynced_models() const {
  uint64_t unsynced = 0;
  for (const SyncScope& scope : sync_scopes_) {
    unsynced = scope.sync ? unsynced & ~scope.models : unsynced | scope.models;
  }
  return unsynced;
}

bool OpenBatch::reduces(uint64_t models) const {
  const uint64_t unsynced = unsynced_models() & models;
  if (unsynced != 0 && unsynced != models) {
    throw InputError("accelerator::backward",
                     "the loss depends on models under no_sync() and on others",
                     "the same for all models of a loss", "pass all of them to no_sync(), or none");
  }
  return unsynced == 0;
}

bool OpenBatch::sync_gradients() const {
  const uint64_t unsynced = unsynced_models();
  if (window_ != nullptr) {
    return window_->is_last() && (unsynced & window_->models_mask()) == 0;
  }
  return last_batch_completed_ && unsynced == 0;
}

void OpenBatch::check_parameters() {
  for (size_t i = 0; i < models_.size(); ++i) {
    models_.check_parameters(i);
  }
  announced_ = 0;
}

WindowBatch OpenBatch::begin(uint64_t models, const LoaderState* loader,
                             std::optional<double> weight) {
  WindowBatch batch{.weight = weight};
  if (loader != nullptr && loader->rows) {
    batch.rows = loader->rows;
    batch.weight = weight.value_or(static_cast<double>(*loader->rows));
    batch.stand_in = loader->stand_in;
  }
  batch.backward_communicates = models_.synced(models) != 0;
  // The next window's control vector compares it.
  windows_.shared()->read = loader != nullptr ? loader->first_read : 0;
  windows_.shared()->range = loader != nullptr ? loader->range : "";
  opened_.resize(models_.size());
  for (const size_t i : models_.in(models)) {
    // Building names costs more than a small step. So it looks at first, then ever more rarely, and
    // at the beginning of each epoch.
    if (const uint64_t n = ++opened_[i]; (n & (n - 1)) == 0) {
      models_.check_parameters(i);
    }
    checks_.begins(i);
  }
  return batch;
}

void OpenBatch::refuse_sharded_outside(const std::vector<size_t>& models) const {
  for (const size_t model : models) {
    if (models_[model].sharded) {
      throw InputError("accelerator::backward",
                       std::string("a loss of a model with strategy=") +
                           strategy_name(run_.options().strategy) + " outside accumulate()",
                       "accumulate() around forward and backward: it unshards parameters "
                       "and prepares the reduction",
                       "auto window = accelerator.accumulate(model) before the forward");
    }
  }
}

const std::shared_ptr<Communicator>& OpenBatch::peers(uint64_t models) const {
  const bool replica = windows_.has_local(models) && models_.has_replicas(models);
  return replica ? models_.shard_group() : run_.communicator();
}

void OpenBatch::agree(const WindowTotals& place) {
  WindowControl control(peers(place.models));
  WindowTotals mine = place;
  mine.steps = windows_.shared()->steps;
  control.start(mine);
  if (control.wait().finished > 0 && place.finished == 0) {
    throw CommunicationError("accelerator::Accelerator",
                             "the data of a rank has ended inside LocalSGD, and others evaluate or "
                             "save",
                             "evaluations and saves after the loop, or after synchronize()");
  }
}

void OpenBatch::agree_on_end(const LoaderState* loader) {
  if (run_.alone()) {
    return;
  }
  const uint64_t index = loader != nullptr ? loader->index : 0;
  agree({.finished = 1,
         .data = mix(windows_.shared()->steps, index),
         .read = loader != nullptr ? loader->read : 0,
         .range = loader != nullptr ? loader->range : ""});
}

// Note [Buffers]
// Buffers are synchronised by a separate collective before a forward. A control vector before it
// finds ranks that are elsewhere, before they would wait for each other.
void OpenBatch::even_out_buffers(uint64_t models, bool forward) {
  uint64_t mask = forward ? models_.synced(models) : 0;
  for (const size_t i : models_.in(models)) {
    if (models_[i].parallel->evens_out_buffers(!forward)) {
      mask |= uint64_t{1} << i;
    }
  }
  uint64_t local = 0; // these concern other ranks than the rest
  for (const size_t i : models_.in(mask)) {
    local |= windows_.is_local(i) ? uint64_t{1} << i : 0;
  }
  for (const uint64_t part : {mask & ~local, local}) {
    if (part != 0) {
      agree({.buffers = true, .models = part});
      sync_buffers(models_, part);
    }
  }
}

// Note [Forwards that communicate]
// The others' forwards would wait for a rank that has left the loop and waits for a control vector.
// Therefore such a vector precedes each forward: in accumulate(), or in the first layer of a forward
// outside of it. A rank with a stand-in batch runs forward and backward with the others; its samples
// do not count.
void OpenBatch::announce_forward(uint64_t models) {
  if (const uint64_t synced = models_.synced(models); synced != 0) {
    agree({.buffers = true, .models = synced});
  }
}

// Between windows buffers are equal. Inside one, in a training loop's body, all ranks are at the
// same place; elsewhere they may not be.
void OpenBatch::begin_evaluation() {
  const LoaderState* around = loaders_.active();
  if (around == nullptr || !around->training) {
    return;
  }
  even_out_buffers(unfinished());
}

uint64_t OpenBatch::unfinished() const {
  uint64_t mask = 0;
  for (size_t i = 0; i < models_.size(); ++i) {
    mask |= uint64_t{windows_.in_window(i) && !windows_.of(i)->opens()} << i;
  }
  return mask;
}

bool OpenBatch::rows_count(size_t model) {
  if (window_ != nullptr) {
    return !stands_in_;
  }
  const uint64_t mask = uint64_t{1} << model;
  if ((std::exchange(announced_, announced_ | mask) & mask) == 0) {
    announce_forward(mask);
  }
  const LoaderState* loader = loaders_.current({model});
  return loader == nullptr || !loader->stand_in;
}

// Note [A last batch without a backward]
// A program that catches the exception of a bad batch wants to leave that batch out and keep the
// others. The gradients so far then complete the data's last window: at the first clip or step that
// follows in the batch, or else at the data's end, with the calls that followed the window before.
bool OpenBatch::complete_without_backward(GradientWindow& last) {
  if (!run_.alone() && models_.synced(last.models_mask()) != 0) {
    const InputError error("accelerator::accumulate",
                           "the last batch of a window had no backward, and its model "
                           "communicates in forward and backward: it is sharded, or its batch "
                           "norm layers are synchronised",
                           "a forward and a backward for each batch",
                           "call backward() with weight 0 for a batch to be left out");
    run_.fail_peers(error); // they wait for this rank
    throw error;
  }
  last.complete_without_backward();
  if (!last.is_complete()) {
    windows_.leave(last);
    return false;
  }
  completed_window(last, false, false);
  return true;
}

void OpenBatch::complete_open_window(const std::vector<SlotList>& lists) {
  const auto open = [this](const SlotList& list) { return windows_.of(list.model) == window_; };
  if (window_ != nullptr && window_->data_ends() && window_->lacks_last_backward() &&
      reduces(window_->models_mask()) && std::ranges::any_of(lists, open)) {
    complete_without_backward(*window_);
  }
}

void OpenBatch::reset(bool completed) {
  last_batch_completed_ = completed;
  closed_without_backward_ = 0;
}

} // namespace hasten::detail
