// Averages optimizers' moments over ranks that trained independently.
#pragma once

#include <memory>
#include <vector>

#include "accelerator/accelerator_core.h"
#include "hasten/local_sgd/averager.h"

namespace hasten::detail {
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
