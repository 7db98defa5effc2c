#include "sharded_model.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <cmath>
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

ShardedModel::ShardedModel(
    std::shared_ptr<Communicator> communicator,
    std::shared_ptr<torch::nn::Module> module,
    const std::vector<std::shared_ptr<torch::nn::Module>>& units,
    FullyShardOptions options)
    : communicator_(communicator),
      sharded_(std::move(communicator), module, units, std::move(options)),
      parameters_(shards_of(sharded_)),
      gradients_(FlatLayout(parameters_)) {}

void ShardedModel::begin(bool keep, bool) {
  if (keep) {
    throw InputError(
        "accelerator::accumulate",
        "this rank has run out of batches, and a sharded model is trained on",
        "every rank to run every forward, whose messages it needs",
        "prepare the loader: a rank without rows gets stand-ins");
  }
  sharded_.begin();
}

void ShardedModel::start_backward(bool reduce, DdpBackward backward) {
  const ShardUnitReport before = sharded_.report().total;
  sharded_.start_backward(reduce, std::move(backward));
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

// Nothing is ever left to be multiplied: only 1 comes here.
void ShardedModel::set_pending_factor(double) {}

// Powers are added up; of the largest number NaN travels beside it, since a maximum
// may lose it.
void ShardedModel::reduce_norms(
    std::vector<double>& norms, double norm_type) const {
  const auto count = static_cast<int64_t>(norms.size());
  const bool largest = std::isinf(norm_type);
  const at::Tensor all =
      at::zeros({largest ? 2 * count : count}, at::TensorOptions(at::kDouble));
  auto* values = all.mutable_data_ptr<double>();
  for (int64_t i = 0; i < count; ++i) {
    const double norm = norms[static_cast<size_t>(i)];
    if (largest) {
      values[i] = std::isnan(norm) ? 0 : norm;
      values[count + i] = std::isnan(norm) ? 1 : 0;
    } else {
      values[i] = std::pow(norm, norm_type);
    }
  }
  communicator_->all_reduce(
      all, largest ? ReduceOp::max : ReduceOp::sum, "norms of shards");
  for (int64_t i = 0; i < count; ++i) {
    norms[static_cast<size_t>(i)] = !largest
                                        ? std::pow(values[i], 1 / norm_type)
                                    : values[count + i] != 0 ? std::nan("")
                                                             : values[i];
  }
}

void ShardedModel::register_comm_hook(std::shared_ptr<CommHook> hook) {
  if (hook) {
    throw InputError(
        "parallel::FullyShard",
        "communication hook=" + hook->description(),
        "none: rows of gradients are summed where they belong",
        "set fully_shard.precision.reduce_dtype for 16 bits on the wire");
  }
}

void ShardedModel::set_local(bool local) {
  if (local) {
    throw InputError(
        "parallel::FullyShard",
        "a LocalSgd scope over a sharded model",
        "ranks that each have a whole model",
        "use strategy=ddp");
  }
}

void ShardedModel::save_state(
    NamedTensors& tensors, nlohmann::json& values) const {
  sharded_.save_state(tensors, values);
}

void ShardedModel::load_state(
    const NamedTensors& tensors, const nlohmann::json& values) {
  sharded_.load_state(tensors, values);
}

} // namespace hasten::detail
