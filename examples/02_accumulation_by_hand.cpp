// Gradient accumulation by hand: one optimizer step for kSteps batches, whose gradients add up in
// .grad. The steps equal those with batches kSteps times as large.
//
//   02_accumulation_by_hand examples/reviews.csv
#include <torch/torch.h>

#include <algorithm> // 02
#include <iostream>
#include <tuple>

#include "hasten/optim/schedule.h"
#include "reviews.h"

namespace examples {

constexpr int64_t kEpochs = 6;
constexpr int64_t kBatch = 16; // samples per batch
constexpr int64_t kSteps = 4; // 02: batches per optimizer step
constexpr int64_t kWindow = kSteps * kBatch; // 02: samples per optimizer step

double accuracy(ReviewClassifier& model, auto& loader) {
  torch::NoGradGuard no_grad;
  model->eval();
  int64_t right = 0, seen = 0;
  for (const hasten::Batch& batch : loader) {
    auto logits = model->forward(batch["input_ids"], batch["attention_mask"]);
    torch::Tensor hits = logits.argmax(1) == batch["labels"];
    right += hits.sum().item<int64_t>();
    seen += hits.size(0);
  }
  return static_cast<double>(right) / static_cast<double>(seen);
}

void train(const std::string& csv, const std::string& save_to) {
  const Reviews reviews = read_reviews(csv);
  const int64_t rows = reviews.train->size();
  const int64_t updates = (rows + kWindow - 1) / kWindow; // 02: per epoch

  torch::manual_seed(42);
  ReviewClassifier classifier(reviews.vocab_size, reviews.num_labels);
  torch::optim::AdamW adamw(classifier->parameters(),
                            torch::optim::AdamWOptions(1e-2).weight_decay(0));
  hasten::DataLoader batches(reviews.train, {.batch_size = kBatch, .group_by_length = false});
  hasten::DataLoader held_out(reviews.eval, {.shuffle = false});
  hasten::LRScheduler linear(adamw, hasten::linear_schedule(0, kEpochs * updates));

  // [loop]
  auto [model, optimizer, loader, scheduler, eval_loader] =
      std::tie(classifier, adamw, batches, linear, held_out);
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    model->train();
    loader.set_epoch(epoch);
    double loss_sum = 0;
    int64_t done = 0; // 02: samples of this epoch so far
    for (const hasten::Batch& batch : loader) {
      auto logits = model->forward(batch["input_ids"], batch["attention_mask"]);
      auto loss = torch::nn::functional::cross_entropy(logits, batch["labels"]);
      loss_sum += loss.item<double>() * batch.rows();
      // [accumulate]
      // The samples of this window; the last window of an epoch may be smaller.
      const auto window = std::min(kWindow, rows - done + done % kWindow); // 02
      (loss * batch.rows() / window).backward(); // 02
      done += batch.rows(); // 02
      if (done % kWindow != 0 && done != rows) { // 02
        continue; // 02
      } // 02
      // [/accumulate]
      torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
    }
    const double right = accuracy(model, eval_loader);
    std::cout << epoch_line(epoch + 1, loss_sum / rows, right) << std::endl;
  }
  save(model, save_to);
  // [/loop]
}

} // namespace examples

int main(int argc, char** argv) { return examples::run_example(argc, argv, examples::train); }
