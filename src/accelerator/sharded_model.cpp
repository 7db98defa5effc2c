#include "sharded_model.h"

#include <torch/nn/module.h>

#include <utility>

#include "hasten/base/error.h"

namespace hasten::detail {

static FlatLayout::NamedParameters shards_of(const FullyShard& sharded) {
  FlatLayout::NamedParameters named;
  for (const ShardedParameter& entry : sharded.parameters()) {
    named.emplace_back(entry.name, entry.parameter);
  }
  return named;
}

ShardedModel::ShardedModel(std::shared_ptr<Communicator> communicator,
                           std::shared_ptr<torch::nn::Module> module,
                           const std::vector<std::shared_ptr<torch::nn::Module>>& units,
                           FullyShardOptions options)
    : sharded_(std::move(communicator), module, units, std::move(options)),
      parameters_(shards_of(sharded_)),
      gradients_(FlatLayout(parameters_)) {}

void ShardedModel::begin(bool) { sharded_.begin(); }

void ShardedModel::start_backward(bool reduce, DdpBackward /*backward*/) {
  const ShardUnitReport before = sharded_.report().total;
  sharded_.start_backward(reduce);
  report_ = {};
  report_.bytes = -before.reduced_bytes;
  report_.buckets = -before.reductions;
  report_.exposed_seconds = -before.exposed_seconds;
}

void ShardedModel::finish(double factor, const DdpRanks& ranks, bool) {
  sharded_.finish(factor, ranks);
  const ShardUnitReport after = sharded_.report().total;
  report_.bytes += after.reduced_bytes;
  report_.buckets += after.reductions;
  report_.exposed_seconds += after.exposed_seconds;
  report_.communication_seconds = report_.exposed_seconds;
}

// The multiplication is never deferred, so the factor is always 1.
void ShardedModel::set_pending_factor(double) {}

void ShardedModel::register_comm_hook(std::shared_ptr<CommHook> hook) {
  if (hook) {
    throw InputError("parallel::FullyShard", "communication hook=" + hook->description(),
                     "no hook with a sharded model",
                     "set fully_shard.precision.reduce_dtype to reduce in 16 bits");
  }
}

void ShardedModel::save_state(NamedTensors& tensors, nlohmann::json& values) const {
  sharded_.save_state(tensors, values);
}

void ShardedModel::load_state(const NamedTensors& tensors, const nlohmann::json& values) {
  sharded_.load_state(tensors, values);
}

} // namespace hasten::detail
