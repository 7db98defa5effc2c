// Optimizers' moments over ranks that trained by themselves.
#pragma once

#include <memory>
#include <vector>

#include "accelerator_core.h"
#include "hasten/parallel/averager.h"

namespace hasten::detail {
// What the optimizers keep for their parameters.
class AveragedMoments {
 public:
  AveragedMoments(std::shared_ptr<Communicator> communicator,
                  std::vector<std::shared_ptr<OptimizerState>> optimizers, ParameterNames names)
      : communicator_(std::move(communicator)),
        optimizers_(std::move(optimizers)),
        names_(std::move(names)),
        averagers_(optimizers_.size()) {}

  // Moments become their mean over ranks, step counts the largest, so that equal
  // gradients make equal steps again. Ranks whose optimizers keep different things
  // (one has never stepped) leave them as they are, with a warning. Collective.
  void average(double weight);

 private:
  // The tensors of a round, averaged in the same buffers again and again.
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
