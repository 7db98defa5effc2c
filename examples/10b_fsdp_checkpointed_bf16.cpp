// 10a with less memory for activations, too, and matrix products in 16 bits.
//
//   10b_fsdp_checkpointed_bf16 examples/reviews.csv
//   hasten launch --nproc 2 10b_fsdp_checkpointed_bf16 examples/reviews.csv
#include <torch/torch.h>

#include <tuple>

#include "hasten/accelerator/accelerator.h"
#include "hasten/activation_checkpoint/gradient_checkpointing.h" // 08
#include "hasten/optim/schedule.h"
#include "reviews.h"

namespace examples {

constexpr int64_t kEpochs = 6;
constexpr int64_t kBatch = 16; // samples per batch, over all processes
constexpr int64_t kSteps = 4;
constexpr int64_t kWindow = kSteps * kBatch;

double accuracy(auto& accelerator, auto& model, auto& loader) {
  torch::NoGradGuard no_grad;
  const auto forward = accelerator.forward_scope(model); // 10
  const auto cast = accelerator.autocast(); // 10
  model->eval();
  int64_t right = 0, seen = 0;
  for (const hasten::Batch& batch : loader) {
    auto logits = model->forward(batch["input_ids"], batch["attention_mask"]);
    torch::Tensor hits = logits.argmax(1) == batch["labels"];
    hits = accelerator.gather_for_metrics(hits);
    right += hits.sum().item<int64_t>();
    seen += hits.size(0);
  }
  return static_cast<double>(right) / static_cast<double>(seen);
}

void train(const std::string& csv, const std::string& save_to) {
  hasten::Accelerator accelerator({.gradient_accumulation_steps = kSteps,
                                   .mixed_precision = hasten::Precision::bf16, // 10: products
                                   .strategy = hasten::Strategy::fsdp, // 10
                                   .shard_units = {"hidden"}}); // 10: a block of the model
  const Reviews reviews = read_reviews(csv);
  const int64_t rows = reviews.train->size();
  const int64_t updates = (rows + kWindow - 1) / kWindow;

  torch::manual_seed(42);
  ReviewClassifier classifier(reviews.vocab_size, reviews.num_labels);
  torch::optim::AdamW adamw(classifier->parameters(),
                            torch::optim::AdamWOptions(1e-2).weight_decay(0));
  const int64_t share = kBatch / accelerator.num_processes();
  hasten::DataLoader batches(reviews.train, {.batch_size = share, .group_by_length = false});
  hasten::DataLoader held_out(reviews.eval, {.shuffle = false});
  hasten::LRScheduler linear(adamw, hasten::linear_schedule(0, kEpochs * updates));

  // [loop]
  auto [model, optimizer, loader, scheduler, eval_loader] =
      accelerator.prepare(classifier, adamw, batches, linear, held_out);
  // [enable]
  hasten::gradient_checkpointing_enable(model); // 08
  // [/enable]
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    model->train();
    loader.set_epoch(epoch);
    double loss_sum = 0;
    // [batch]
    for (const hasten::Batch& batch : loader) {
      auto window = accelerator.accumulate(model);
      auto logits = model->forward(batch["input_ids"], batch["attention_mask"]);
      auto loss = torch::nn::functional::cross_entropy(logits, batch["labels"]);
      loss_sum += loss.item<double>() * batch.rows();
      accelerator.backward(loss);
      accelerator.clip_grad_norm_(model, 1.0);
      optimizer.step(); // until the window is complete
      scheduler.step();
      optimizer.zero_grad();
    }
    // [/batch]
    loss_sum = accelerator.reduce(torch::tensor(loss_sum)).item<double>();
    const double right = accuracy(accelerator, model, eval_loader);
    accelerator.print(epoch_line(epoch + 1, loss_sum / rows, right));
  }
  accelerator.summon_full_params([&] { save(model, save_to); }, model); // 10
  accelerator.end_training();
  // [/loop]
}

} // namespace examples

int main(int argc, char** argv) { return examples::run_example(argc, argv, examples::train); }
