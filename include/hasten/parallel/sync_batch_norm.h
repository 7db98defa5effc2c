// Batch normalisation over the samples of all ranks. In training, mean and variance are those of
// the joined batch, as if one process had all its samples, even if ranks have different numbers of
// samples or none. Use it for small batches per rank: with many samples a rank's own statistics are
// nearly the same and cost no communication.
//
//   hasten::SyncBatchNorm norm(torch::nn::BatchNormOptions(64), communicator);
//
// or, for a model that has torch's layers,
//
//   const auto synced = hasten::convert_sync_batchnorm(model, communicator);
//
// The Accelerator converts models if AcceleratorOptions::sync_batchnorm is set.
//
// A training forward and its backward are collective. Every rank runs the same layers in the same
// order on its own batch, which may be empty. Accumulated batches are not joined: each forward has
// its own statistics. Evaluation, worlds of one rank and layers that were not converted send
// nothing.
// Cost per layer with C channels: forward gathers 2 C + 1 elements and backward sums 2 C, in fp64.
// Each is waited for, so ranks run in lockstep.
// Statistics are computed in fp32 for 16-bit and fp32 inputs, in fp64 for fp64 inputs, and joined
// in fp64. Every rank gets the same bits. Channels-last inputs stay channels-last.
// A forward that activation checkpointing recomputes sends nothing and updates no buffer.
// A backward with create_graph through a layer throws InputError. A forward throws InputError on
// every rank if a rank's input holds NaN or infinity, naming that rank.
// Threading: one thread per model. Design: docs/guides/memory.md
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hasten/comm/communicator.h"

namespace hasten {

namespace detail {
struct SyncLayer;
struct BatchNormMark;

/// A module that is none of torch's, but calls torch's batch_norm with its own tensors: an exported one.
class CallsBatchNorm {
 public:
  CallsBatchNorm() = default;
  CallsBatchNorm(const CallsBatchNorm&) = default;
  CallsBatchNorm& operator=(const CallsBatchNorm&) = default;
  virtual ~CallsBatchNorm() = default;
  /// running_mean, or the weight if there is none. Undefined: it calls none.
  virtual at::Tensor batch_norm_identity() const = 0;
  /// What must be equal on all ranks, in words.
  virtual std::string batch_norm_settings() const = 0;
};
} // namespace detail

/// Parameters, buffers and their names are those of torch's BatchNorm layers, so state dicts are
/// interchangeable.
class SyncBatchNormImpl
    : public torch::nn::NormImplBase<1, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  /// The communicator may be a group of some ranks (Communicator::new_group). Give the layers a
  /// communicator of their own: nothing else may use it while a backward runs. A clone() shares it.
  /// Collective over it, blocking: ranks compare options.
  /// Throws InputError, on every rank, if they differ.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options,
                    std::shared_ptr<Communicator> communicator);

  /// x: [N, C] or [N, C, …] up to 5 dimensions, N ≥ 0; the result has its shape and dtype.
  /// Collective in training, local in evaluation. Blocks until every rank has called it, at most
  /// the communicator's timeout.
  /// Throws InputError for another shape, and on every rank if all ranks together have only one
  /// value per channel.
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const at::Tensor& x) override;

 private:
  std::shared_ptr<const detail::SyncLayer> layer_;
};
TORCH_MODULE(SyncBatchNorm);

struct ConvertSyncBatchNormOptions {
  /// A layer calls it in each training forward, before the layer sends anything. Returns whether
  /// this rank's samples count. If not, they are normalised by the other ranks' statistics and
  /// contribute to no gradient. Empty: they count.
  std::function<bool()> rows_count{};
};

/// A conversion, which lasts as long as its marks, or a copy of them.
struct [[nodiscard]] SyncBatchNormConversion {
  /// Names of the layers in the model. With one rank, too, where they stay plain.
  std::vector<std::string> layers{};
  /// Each keeps one layer converted.
  std::vector<std::shared_ptr<const detail::BatchNormMark>> marks{};

  /// Restores torch's layers from the next forward on. Local.
  void remove() noexcept { marks.clear(); }
};

/// Synchronises the training forwards of every BatchNorm1d, 2d and 3d of `model`, exported ones
/// (exported_module.h) too. C++ cannot
/// replace a model's typed members, so layers stay the same objects. They are identified by their
/// running statistics, or by their weight if they track none, and torch's batch_norm is redirected
/// for these layers only. Nothing is registered with torch before the first conversion on several
/// ranks. After it, batch_norm of other layers costs a look-up and equals torch's bit for bit.
/// Not covered: a clone() of the model, layers registered later, forwards under c10::InferenceMode.
/// torch checks inputs first and throws if one rank has one value per channel; SyncBatchNorm
/// accepts that.
/// `communicator`: as in SyncBatchNormImpl. Collective, blocking: ranks compare the layers' names,
/// channels, eps, momentum and dtypes. Cost: two messages.
/// Throws InputError on every rank: for layers that differ, naming the first; for a layer that has
/// neither running statistics nor a weight, or was converted before.
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
