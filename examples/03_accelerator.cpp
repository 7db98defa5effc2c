// The loop of 01 on any number of processes. When backward() returns, every gradient is that of
// the joined batch of all processes. So torch's clipping and optimizer need no change.
//
//   03_accelerator examples/reviews.csv
//   hasten launch --nproc 2 03_accelerator examples/reviews.csv
//
// Both print the same numbers up to rounding.
#include <torch/torch.h>

#include <tuple>

#include "hasten/accelerator/accelerator.h" // 03
#include "hasten/optim/schedule.h"
#include "reviews.h"

namespace examples {

constexpr int64_t kEpochs = 6;
constexpr int64_t kBatch = 16; // samples per batch, over all processes

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
  hasten::Accelerator accelerator; // 03
  // [/accelerator]
  const Reviews reviews = read_reviews(csv);
  const int64_t rows = reviews.train->size();
  const int64_t updates = (rows + kBatch - 1) / kBatch; // per epoch

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
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    model->train();
    loader.set_epoch(epoch);
    double loss_sum = 0;
    for (const hasten::Batch& batch : loader) {
      auto logits = model->forward(batch["input_ids"], batch["attention_mask"]);
      auto loss = torch::nn::functional::cross_entropy(logits, batch["labels"]);
      loss_sum += loss.item<double>() * batch.rows();
      accelerator.backward(loss); // 03: the joined batch's gradient
      torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
    }
    loss_sum = accelerator.reduce(torch::tensor(loss_sum)).item<double>(); // 03
    const double right = accuracy(accelerator, model, eval_loader); // 03
    accelerator.print(epoch_line(epoch + 1, loss_sum / rows, right)); // 03
  }
  save(model, accelerator.is_main_process() ? save_to : ""); // 03
  accelerator.end_training(); // 03
  // [/loop]
}

} // namespace examples

int main(int argc, char** argv) { return examples::run_example(argc, argv, examples::train); }
