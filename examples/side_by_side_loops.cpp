// Loops of docs/guides/side-by-side.md: accumulation by hand and with the Accelerator, Local SGD.
//
//   side_by_side_loops
//   hasten launch --nproc 2 side_by_side_loops
#include <torch/torch.h>

#include "hasten/accelerator/accelerator.h"
#include "hasten/local_sgd/local_sgd.h"
#include "side_by_side.h"

namespace side_by_side {

double by_hand(const Data& train) {
  // [by_hand]
  Net model;
  torch::optim::SGD optimizer(model->parameters(), 0.5);
  hasten::DataLoader loader(train, {.batch_size = 8, .shuffle = false});
  const int64_t accumulation_steps = 4;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    for (int64_t i = 0; const auto& batch : loader) {
      auto outputs = model(batch["inputs"]);
      auto loss = F::cross_entropy(outputs, batch["labels"]) / accumulation_steps;
      loss.backward();
      if (++i % accumulation_steps == 0) {
        optimizer.step();
        optimizer.zero_grad();
      }
    }
  }
  // [/by_hand]
  return final_loss(model, train);
}

double with_accelerator(const Data& train) {
  // [accelerator]
  hasten::Accelerator accelerator({.gradient_accumulation_steps = 4});
  Net net;
  torch::optim::SGD sgd(net->parameters(), 0.5);
  hasten::DataLoader batches(train, {.batch_size = 8, .shuffle = false});
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
  // [/accelerator]
  return final_loss(net, train);
}

double with_local_sgd(const Data& train) {
  // [local_sgd]
  hasten::Accelerator accelerator({.gradient_accumulation_steps = 4});
  Net net;
  torch::optim::SGD sgd(net->parameters(), 0.5);
  hasten::DataLoader batches(train, {.batch_size = 8, .shuffle = false});
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  hasten::LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 2});
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      auto outputs = model(batch["inputs"]);
      auto loss = F::cross_entropy(outputs, batch["labels"]);
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      local_sgd.step();
    }
  }
  local_sgd.finish();
  accelerator.end_training();
  // [/local_sgd]
  return final_loss(net, train);
}

} // namespace side_by_side

int main() {
  return hasten::record([] {
    side_by_side::run("by hand", side_by_side::by_hand);
    side_by_side::run("Accelerator", side_by_side::with_accelerator);
    side_by_side::run("LocalSGD", side_by_side::with_local_sgd);
  });
}
