// Training of docs/guides/side-by-side.md with the Trainer, and gradient checkpointing in the
// Trainer and in a loop.
//
//   side_by_side_trainer
//   hasten launch --nproc 2 side_by_side_trainer
#include <torch/torch.h>

#include "hasten/accelerator/accelerator.h"
#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/trainer/losses.h"
#include "hasten/trainer/trainer.h"
#include "side_by_side.h"

namespace side_by_side {

// [model]
struct NetWithLossImpl : NetImpl {
  hasten::LossOutput forward(const hasten::Batch& batch) {
    return hasten::cross_entropy_output(NetImpl::forward(batch["inputs"]), batch["labels"]);
  }
};
TORCH_MODULE(NetWithLoss);
// [/model]

double loss_of(hasten::Trainer& trainer, const Data& data) {
  const double loss = trainer.evaluate(*data).at("eval_loss").get<double>();
  trainer.accelerator().end_training();
  return loss;
}

double with_trainer(const Data& train) {
  const Data eval = samples(64, 2);
  // [trainer]
  NetWithLoss model;
  hasten::TrainingArguments arguments{
      .num_train_epochs = kEpochs,
      .per_device_train_batch_size = 8,
      .learning_rate = 0.02,
      .eval_strategy = hasten::IntervalStrategy::epoch,
      .save_strategy = hasten::SaveStrategy::no,
      .disable_tqdm = true,
  };
  hasten::Trainer trainer({
      .model = model,
      .args = arguments,
      .train_dataset = train,
      .eval_dataset = eval,
      .compute_metrics = hasten::classification_metrics(4),
  });
  trainer.train();
  // [/trainer]
  return loss_of(trainer, train);
}

double with_checkpointed_trainer(const Data& train) {
  const Data eval = samples(64, 2);
  NetWithLoss model;
  hasten::TrainingArguments arguments{
      .num_train_epochs = kEpochs,
      .per_device_train_batch_size = 8,
      .gradient_checkpointing = true,
      .learning_rate = 0.02,
      .save_strategy = hasten::SaveStrategy::no,
      .disable_tqdm = true,
  };
  hasten::Trainer trainer({
      .model = model,
      .args = arguments,
      .train_dataset = train,
      .eval_dataset = eval,
  });
  trainer.train();
  return loss_of(trainer, train);
}

double with_checkpointed_loop(const Data& train) {
  hasten::Accelerator accelerator({.gradient_accumulation_steps = 4});
  Net net;
  hasten::gradient_checkpointing_enable(net);
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
  return final_loss(net, train);
}

} // namespace side_by_side

int main() {
  return hasten::record([] {
    side_by_side::run("Trainer", side_by_side::with_trainer);
    side_by_side::run("Trainer, checkpointed", side_by_side::with_checkpointed_trainer);
    side_by_side::run("loop, checkpointed", side_by_side::with_checkpointed_loop);
  });
}
