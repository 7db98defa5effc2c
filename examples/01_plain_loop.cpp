// A plain LibTorch training loop on one process. Each further example changes a few lines, which
// are marked with the example's number, as in "// 02".
//
//   01_plain_loop examples/reviews.csv
//
//   epoch 1  loss 0.6879  accuracy 0.8462
//   …
#include <torch/torch.h>

#include <iostream>
#include <tuple>

#include "hasten/optim/schedule.h"
#include "reviews.h"

namespace examples {

constexpr int64_t kEpochs = 6;
constexpr int64_t kBatch = 16; // samples per batch

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
  const int64_t updates = (rows + kBatch - 1) / kBatch; // per epoch

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
    for (const hasten::Batch& batch : loader) {
      auto logits = model->forward(batch["input_ids"], batch["attention_mask"]);
      auto loss = torch::nn::functional::cross_entropy(logits, batch["labels"]);
      loss_sum += loss.item<double>() * batch.rows();
      loss.backward();
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
