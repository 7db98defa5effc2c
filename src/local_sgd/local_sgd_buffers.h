// Averages a model's running statistics over ranks that train independently.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hasten/local_sgd/averager.h"

namespace torch::nn {
class Module;
}

namespace hasten::detail {

// Floating-point buffers become their mean over ranks. A pair "x.running_mean",
// "x.running_var" is pooled: the variance is that of all ranks' samples together, mean(var +
// mean^2) - mean(mean)^2. Other buffers are rank 0's. Sums are fp64.
class AveragedBuffers {
 public:
  // Collective.
  AveragedBuffers(std::shared_ptr<Communicator> communicator, const torch::nn::Module& module);

  bool empty() const { return floats_.empty() && others_.empty(); }
  int64_t nbytes() const;
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

} // namespace hasten::detail
