// What a scope averages besides the parameters: a model's running statistics and the optimizers'
// moments.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "accelerator/accelerator_core.h"
#include "hasten/local_sgd/averager.h"

namespace hasten::detail {

// Floating-point buffers become their mean over ranks. A pair "x.running_mean",
// "x.running_var" is pooled: the variance is that of all ranks' samples together, mean(var +
// mean^2) - mean(mean)^2. Other buffers are rank 0's. Sums are fp64.
class AveragedBuffers {
 public:
  // Collective.
  AveragedBuffers(std::shared_ptr<Communicator> communicator, const torch::nn::Module& module);

  bool empty() const { return floats_.empty() && others_.empty(); }
  // Fetches the ranks' values; the module is unchanged. Collective.
  void reduce(double weight);
  // Puts them into the module. Local.
  void apply();

 private:
  struct Pooled {
    at::Tensor buffer{};
    at::Tensor mean_of{}; // of a variance: its mean's buffer
    at::Tensor staged{}; // fp64
    at::Tensor staged_mean{}; // of a variance: the mean's
  };
  std::shared_ptr<Communicator> communicator_;
  std::vector<Pooled> floats_{};
  std::vector<at::Tensor> others_{};
  at::Tensor packed_{}; // of `others_`
  std::unique_ptr<Averager> averager_{};
};

// The tensors that optimizers keep for their parameters.
class AveragedMoments {
 public:
  AveragedMoments(std::shared_ptr<Communicator> communicator,
                  std::vector<std::shared_ptr<OptimizerState>> optimizers, ParameterNames names)
      : communicator_(std::move(communicator)),
        optimizers_(std::move(optimizers)),
        names_(std::move(names)),
        averagers_(optimizers_.size()) {}

  // Moments become their mean over ranks, step counts the largest, so that equal
  // gradients make equal steps again. If the ranks' optimizers have different tensors (one has
  // never stepped), they stay unchanged, with a warning. Collective.
  void average(double weight);

 private:
  // The tensors of a synchronisation; the averager's buffers are kept for the next one.
  struct Kept {
    std::vector<const void*> tensors{}; // TensorImpl
    std::unique_ptr<Averager> averager{};
  };
  void average(size_t optimizer, double weight);

  std::shared_ptr<Communicator> communicator_;
  std::vector<std::shared_ptr<OptimizerState>> optimizers_;
  ParameterNames names_;
  std::vector<Kept> averagers_; // [optimizer]
};

} // namespace hasten::detail
