// Batch normalisation over the rows of all ranks: in training, mean and variance are
// those of the joined batch, as if one process had all its rows, also where ranks have
// different numbers of them or none. For small batches a rank: with many rows a rank's
// own statistics are nearly the same and cost nothing.
//
//   hasten::SyncBatchNorm norm(torch::nn::BatchNormOptions(64), communicator);
//
// or, for a model that has torch's layers,
//
//   const auto synced = hasten::convert_sync_batchnorm(model, communicator);
//
// The Accelerator does it by itself: AcceleratorOptions::sync_batchnorm.
//
// A training forward and its backward are collective: every rank runs the same layers
// in the same order, on a batch of its own, which may have no rows. Rows that are
// accumulated over time are not joined: each forward has the statistics of its own.
// Evaluation, a rank alone and layers that were not converted send nothing.
// Cost a layer: 2 C + 1 numbers gathered in forward and 2 C summed in backward, in
// fp64, C channels, each waited for: the ranks go through a model in step.
// Statistics are made in fp32 for 16-bit and fp32 inputs, in fp64 for fp64 ones, and
// joined in fp64; every rank gets the same bits. Inputs that are channels-last stay so.
// A forward that activation checkpointing runs again sends nothing and counts no batch.
// A backward with create_graph through a layer throws InputError, and so does a forward
// where a rank's input holds NaN or infinity: on every rank, naming that one.
// Threading: one thread a model. Design: docs/guides/sync-batch-norm.md
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hasten/comm/communicator.h"

namespace hasten {

namespace detail {
struct SyncLayer;
} // namespace detail

/// Parameters, buffers and their names are those of torch's BatchNorm layers, so that
/// state dicts go both ways.
class SyncBatchNormImpl
    : public torch::nn::NormImplBase<1, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  /// The communicator may be a group of some ranks (Communicator::new_group), and
  /// should be one of its own: nothing but such layers may use it while a backward
  /// runs. A clone() shares it. Collective over it: ranks compare options. Blocking.
  /// Throws InputError, on every rank, where they differ.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options,
                    std::shared_ptr<Communicator> communicator);

  /// x: [N, C] or [N, C, …] up to 5 dimensions, N ≥ 0; the result has its shape and
  /// dtype. Collective in training, local in evaluation. Blocks until every rank has
  /// come to it, at most the communicator's timeout.
  /// Throws InputError for another shape, and on every rank where all ranks together
  /// have one value a channel.
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const at::Tensor& x) override;

 private:
  std::shared_ptr<const detail::SyncLayer> layer_;
};
TORCH_MODULE(SyncBatchNorm);

struct ConvertSyncBatchNormOptions {
  /// Asked in each training forward of a layer, before it sends anything: whether this
  /// rank's rows count. Where they do not, they are normalised by the others'
  /// statistics and have no part in any gradient. Empty: they do.
  std::function<bool()> rows_count{};
};

/// The layers that a conversion found, for as long as it lives or until remove().
/// Movable.
class [[nodiscard]] SyncBatchNormConversion {
 public:
  SyncBatchNormConversion() = default;
  SyncBatchNormConversion(SyncBatchNormConversion&& other) noexcept;
  SyncBatchNormConversion& operator=(SyncBatchNormConversion&& other) noexcept;
  ~SyncBatchNormConversion();

  /// Names of the layers in the model; also on a rank alone, where they stay plain.
  const std::vector<std::string>& layers() const { return layers_; }
  /// The layers are torch's again, from the next forward on. Local.
  void remove() noexcept;

 private:
  friend SyncBatchNormConversion convert_sync_batchnorm(
      const std::shared_ptr<torch::nn::Module>& model, std::shared_ptr<Communicator> communicator,
      ConvertSyncBatchNormOptions options);
  std::vector<std::string> layers_{};
  std::vector<uint64_t> marks_{};
};

/// Makes the training forwards of every BatchNorm1d, 2d and 3d of `model` those of a
/// SyncBatchNorm. A model's typed members cannot be exchanged in C++, so layers stay
/// the objects they are: they are known by their running statistics, or by their
/// weight where they track none, and torch's batch_norm is diverted for these alone.
/// Nothing is registered with torch before the first conversion on several ranks;
/// after it batch_norm of other layers costs a look-up and is torch's to the bit.
/// Not seen: a clone() of the model, layers registered later, forwards under
/// c10::InferenceMode. torch checks its own layers' inputs first and throws where a
/// rank has one value a channel: SyncBatchNorm does not mind.
/// `communicator`: as in SyncBatchNormImpl. Collective, blocking: ranks compare the
/// layers' names, channels, eps, momentum and dtypes. Cost: two messages.
/// Throws InputError on every rank: for layers that differ, naming the first; for a
/// layer that has neither running statistics nor a weight, or was converted before.
SyncBatchNormConversion convert_sync_batchnorm(const std::shared_ptr<torch::nn::Module>& model,
                                               std::shared_ptr<Communicator> communicator,
                                               ConvertSyncBatchNormOptions options = {});

/// The same for a ModuleHolder.
template <typename Holder>
  requires requires(const Holder& holder) { holder.ptr(); }
SyncBatchNormConversion convert_sync_batchnorm(const Holder& model,
                                               std::shared_ptr<Communicator> communicator,
                                               ConvertSyncBatchNormOptions options = {}) {
  return convert_sync_batchnorm(std::shared_ptr<torch::nn::Module>(model.ptr()),
                                std::move(communicator), std::move(options));
}

} // namespace hasten
