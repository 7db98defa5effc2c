// Loops of docs/guides/side-by-side.md on several processes: DDP, FSDP, synchronised batch norm.
//
//   side_by_side_parallel
//   hasten launch --nproc 2 side_by_side_parallel
#include <torch/torch.h>

#include "hasten/accelerator/accelerator.h"
#include "side_by_side.h"

namespace side_by_side {

double with_ddp(const Data& train) {
  // [ddp]
  hasten::Accelerator accelerator;
  Net net;
  torch::optim::SGD sgd(net->parameters(), 0.5);
  hasten::DataLoader batches(train, {.batch_size = 32, .shuffle = false});
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    for (const auto& batch : loader) {
      auto outputs = model(batch["inputs"]);
      auto loss = F::cross_entropy(outputs, batch["labels"]);
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  accelerator.end_training();
  // [/ddp]
  return final_loss(net, train);
}

double with_fsdp(const Data& train) {
  // [fsdp]
  hasten::Accelerator accelerator({.strategy = hasten::Strategy::fsdp, .shard_units = {"hidden"}});
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
  // [/fsdp]
  double loss = 0;
  {
    const auto unsharded = accelerator.forward_scope(model);
    loss = final_loss(net, train);
  }
  accelerator.end_training();
  return loss;
}

struct NormNetImpl : torch::nn::Module {
  NormNetImpl()
      : hidden(register_module("hidden", torch::nn::Linear(8, 16))),
        norm(register_module("norm", torch::nn::BatchNorm1d(16))),
        output(register_module("output", torch::nn::Linear(16, 4))) {}
  Tensor forward(const Tensor& inputs) {
    return output(torch::relu(norm->forward(hidden(inputs))));
  }
  torch::nn::Linear hidden;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear output;
};
TORCH_MODULE(NormNet);

double with_sync_batch_norm(const Data& train) {
  hasten::Accelerator accelerator({.sync_batchnorm = true});
  NormNet net;
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
    side_by_side::run("DDP", side_by_side::with_ddp);
    side_by_side::run("FSDP", side_by_side::with_fsdp);
    side_by_side::run("SyncBatchNorm", side_by_side::with_sync_batch_norm);
  });
}
