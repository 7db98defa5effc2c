// The whole loop: accumulation, activation checkpointing and Local SGD, 07 and 08b
// together.
//
//   08c_whole_loop examples/reviews.csv
//   hasten launch --nproc 2 08c_whole_loop examples/reviews.csv
#include <torch/torch.h>

#include <tuple>

#include "hasten/accelerator/accelerator.h" // 03
#include "hasten/activation_checkpoint/gradient_checkpointing.h" // 08
#include "hasten/local_sgd/local_sgd.h" // 07
#include "hasten/optim/schedule.h"
#include "reviews.h"

namespace examples {

constexpr int64_t kEpochs = 6;
constexpr int64_t kBatch = 16; // samples per batch, over all processes
constexpr int64_t kSteps = 4; // 04: batches per optimizer step
constexpr int64_t kWindow = kSteps * kBatch; // 04: samples per optimizer step
constexpr int64_t kAverage = 8; // 07: steps between synchronisations

double accuracy(auto& accelerator, auto& model, auto& loader) { // 03
  torch::NoGradGuard no_grad;
  model->eval();
  int64_t right = 0, seen = 0;
  for (const hasten::Batch& batch : loader) {
    auto logits = model->forward(batch["input_ids"], batch["attention_mask"]);
    torch::Tensor hits = logits.argmax(1) == batch["labels"];
    hits = accelerator.gather_for_metrics(hits); // 03: each sample once
    right += hits.sum().item<int64_t>();
    seen += hits.size(0);
  }
  return static_cast<double>(right) / static_cast<double>(seen);
}

void train(const std::string& csv, const std::string& save_to) {
  // [accelerator]
  hasten::Accelerator accelerator({.gradient_accumulation_steps = kSteps}); // 04
  // [/accelerator]
  const Reviews reviews = read_reviews(csv);
  const int64_t rows = reviews.train->size();
  const int64_t updates = (rows + kWindow - 1) / kWindow; // 04: per epoch

  torch::manual_seed(42);
  ReviewClassifier classifier(reviews.vocab_size, reviews.num_labels);
  torch::optim::AdamW adamw(classifier->parameters(),
                            torch::optim::AdamWOptions(1e-2).weight_decay(0));
  const int64_t share = kBatch / accelerator.num_processes(); // 03
  hasten::DataLoader batches(reviews.train, {.batch_size = share, .group_by_length = false}); // 03
  hasten::DataLoader held_out(reviews.eval, {.shuffle = false});
  hasten::LRScheduler linear(adamw, hasten::linear_schedule(0, kEpochs * updates));

  // [loop]
  auto [model, optimizer, loader, scheduler, eval_loader] =
      accelerator.prepare(classifier, adamw, batches, linear, held_out); // 03
  hasten::gradient_checkpointing_enable(model); // 08
  hasten::LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = kAverage}); // 07
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    model->train();
    loader.set_epoch(epoch);
    double loss_sum = 0;
    // [batch]
    for (const hasten::Batch& batch : loader) {
      auto window = accelerator.accumulate(model); // 04
      auto logits = model->forward(batch["input_ids"], batch["attention_mask"]);
      auto loss = torch::nn::functional::cross_entropy(logits, batch["labels"]);
      loss_sum += loss.item<double>() * batch.rows();
      accelerator.backward(loss); // 03
      accelerator.clip_grad_norm_(model, 1.0); // 04: these four do nothing
      optimizer.step(); // until the window is complete
      scheduler.step();
      optimizer.zero_grad();
      local_sgd.step(); // 07: does nothing inside a window
    }
    // [/batch]
    local_sgd.synchronize(); // 07: so that all evaluate one model
    loss_sum = accelerator.reduce(torch::tensor(loss_sum)).item<double>(); // 03
    const double right = accuracy(accelerator, model, eval_loader); // 03
    accelerator.print(epoch_line(epoch + 1, loss_sum / rows, right)); // 03
  }
  local_sgd.finish(); // 07
  save(model, accelerator.is_main_process() ? save_to : ""); // 03
  accelerator.end_training(); // 03
  // [/loop]
}

} // namespace examples

int main(int argc, char** argv) { return examples::run_example(argc, argv, examples::train); }
