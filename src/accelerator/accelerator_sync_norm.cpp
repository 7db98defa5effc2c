// Models that communicate in forward, because their batch norm layers are synchronised
// or because they are sharded: every rank must have a batch whenever one has.
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <unordered_set>

#include "accelerator_core.h"
#include "hasten/base/error.h"

namespace hasten::detail {

// The layers have a group of their own: in backward, gradients travel on the other
// one in an order that may differ from theirs.
void AcceleratorCore::convert_batch_norms(const std::shared_ptr<torch::nn::Module>& module,
                                          ModelState& state, BufferPolicy& buffers) {
  if (!options.sync_batchnorm || communicator->world_size() == 1) {
    return;
  }
  if (!sync_norms_) {
    static std::atomic<int> groups{0}; // names must differ; equal on all ranks
    CommunicatorOptions own = communicator->options();
    own.name += " sync batch norm " + std::to_string(++groups);
    sync_norms_ = communicator->duplicate(own);
  }
  const size_t index = models_.size();
  state.sync_norms = convert_sync_batchnorm(
      module, sync_norms_, {.rows_count = [this, index] { return rows_count(index); }});
  state.synced = !state.sync_norms.layers().empty();
  // Running statistics are equal without a word: others decide.
  std::unordered_set<std::string> equal;
  for (const std::string& layer : state.sync_norms.layers()) {
    const std::string prefix = layer.empty() ? "" : layer + ".";
    equal.insert({prefix + "running_mean", prefix + "running_var"});
  }
  const auto named = module->named_buffers();
  if (std::all_of(named.begin(), named.end(), [&](const auto& item) {
        return !item.value().defined() || !item.value().is_floating_point() ||
               equal.count(item.key()) > 0;
      })) {
    buffers = BufferPolicy::leave;
  }
}

uint64_t AcceleratorCore::synced_models(uint64_t mask) const {
  uint64_t synced = 0;
  for (const size_t i : models_in(mask)) {
    synced |= models_[i].synced ? uint64_t{1} << i : 0;
  }
  return synced;
}

// Note [Forwards that communicate]
// A rank without a batch waits for a control vector, the others' forwards would wait for
// that rank: each forward is announced by such a vector first, in accumulate(), or by
// the first layer of a forward outside of it. Ranks that have run out so make it an
// error on all ranks. A rank whose batch stands in runs forward and backward with the
// others; its rows do not count.
void AcceleratorCore::announce_forward(uint64_t mask) {
  const uint64_t synced = synced_models(mask);
  if (synced == 0) {
    return;
  }
  if (announce_models(synced)) {
    refuse_joined(synced);
  }
}

bool AcceleratorCore::rows_count(size_t model) {
  if (window != nullptr) {
    return !stands_in;
  }
  const uint64_t mask = uint64_t{1} << model;
  if (!std::exchange(models_[model].announced, true)) {
    announce_forward(mask);
  }
  const LoaderState* loader = current_loader(mask);
  return loader == nullptr || !loader->stand_in;
}

void AcceleratorCore::refuse_joined(uint64_t mask) const {
  if (synced_models(mask) == 0) {
    return;
  }
  throw InputError("accelerator::accumulate",
                   "a rank is in join_uneven_inputs() while others train a model that communicates "
                   "in forward: it is sharded, or its batch norm layers are synchronised",
                   "a batch on every rank until the data of all has ended",
                   "prepare() the loader: a rank without rows gets stand-ins");
}

} // namespace hasten::detail
