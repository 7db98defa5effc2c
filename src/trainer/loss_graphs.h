// CUDA graphs of the Trainer's forward and backward (TrainingArguments::cuda_graphs).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "hasten/trainer/trainer.h"

namespace torch::nn {
class Module;
}

namespace hasten::detail {

struct CapturedLoss;

/// A loss function whose forward and backward are graphs, a pair for each shape of batch. Local.
class LossGraphs {
 public:
  /// Throws InputError if LibTorch has no graphs for the device.
  LossGraphs(LossFunction loss, std::shared_ptr<torch::nn::Module> model, const at::Device& device);
  LossGraphs(const LossGraphs&) = delete;
  LossGraphs& operator=(const LossGraphs&) = delete;
  ~LossGraphs();

  /// The loss function's result. Its backward adds to the gradients of the model's parameters. Of a
  /// shape's first batches it is that of the loss function itself, and then that of a graph, whose
  /// tensors the next call overwrites. Call it with the settings of autocast that all calls have.
  /// Throws InputError if the loss function cannot be captured.
  LossOutput operator()(const Batch& batch);

 private:
  std::shared_ptr<CapturedLoss> capture(const Batch& batch);

  LossFunction loss_;
  std::shared_ptr<torch::nn::Module> model_;
  at::Device device_;
  std::map<std::string, int64_t> seen_{}; // batches of a shape
  std::map<std::string, std::shared_ptr<CapturedLoss>> graphs_{};
};

} // namespace hasten::detail
