// Loops of docs/guides/side-by-side.md in 16 bits: fp16 with a GradScaler, bf16 with the
// Accelerator.
//
//   side_by_side_precision
//   hasten launch --nproc 2 side_by_side_precision
#include <torch/torch.h>

#include "hasten/accelerator/accelerator.h"
#include "hasten/amp/grad_scaler.h"
#include "hasten/core/autocast.h"
#include "side_by_side.h"

namespace side_by_side {

double in_fp16(const Data& train) {
  // [fp16]
  Net model;
  torch::optim::SGD optimizer(model->parameters(), 0.5);
  hasten::DataLoader loader(train, {.batch_size = 32, .shuffle = false});
  hasten::GradScaler scaler;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    for (const auto& batch : loader) {
      Tensor loss;
      {
        const hasten::Autocast autocast({.dtype = torch::kHalf});
        auto outputs = model(batch["inputs"]);
        loss = F::cross_entropy(outputs, batch["labels"]);
      }
      scaler.scale(loss).backward();
      scaler.clip_grad_norm_(optimizer, 1.0);
      scaler.step(optimizer);
      scaler.update();
      optimizer.zero_grad();
    }
  }
  // [/fp16]
  return final_loss(model, train);
}

double in_bf16(const Data& train) {
  hasten::Accelerator accelerator({.mixed_precision = hasten::Precision::bf16});
  Net net;
  torch::optim::SGD sgd(net->parameters(), 0.5);
  hasten::DataLoader batches(train, {.batch_size = 32, .shuffle = false});
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      auto outputs = model(batch["inputs"]);
      auto loss = F::cross_entropy(outputs, batch["labels"]);
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  accelerator.end_training();
  return final_loss(net, train);
}

} // namespace side_by_side

int main() {
  return hasten::record([] {
    side_by_side::run("fp16", side_by_side::in_fp16);
    side_by_side::run("bf16", side_by_side::in_bf16);
  });
}
