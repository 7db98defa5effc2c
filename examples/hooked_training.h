// What the examples of communication hooks share: a training of the reviews with a hook, and a
// measurement of what the hook loses.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>

#include "hasten/accelerator/accelerator.h"
#include "hasten/parallel/comm_hook.h"
#include "reviews.h"

namespace examples {

using MakeHook = std::function<std::shared_ptr<hasten::CommHook>(bool error_feedback)>;

// Sums one gradient many times, as a training does in its steps. Returns the part of a number that
// is missing in all sums together, as a mean over the numbers.
inline double missing(hasten::Communicator& ranks, const MakeHook& make_hook, bool error_feedback) {
  constexpr int kSums = 400;
  const auto hook = make_hook(error_feedback);
  torch::manual_seed(1);
  torch::Tensor gradient = torch::randn({32, 32}).sign(); // -1 or 1
  gradient.select(1, 0).mul_(1000); // next to these, ones are small
  torch::Tensor all = torch::zeros_like(gradient);
  for (int i = 0; i < kSums; ++i) {
    torch::Tensor buffer = gradient * (ranks.rank() + 1.0);
    auto step = hook->reduce(ranks, {0, true, buffer.view(-1), {{"weight", buffer}}});
    while (step()) {
    }
    all += buffer;
  }
  const double ranks_sum = ranks.world_size() * (ranks.world_size() + 1) / 2.0;
  return (1 - all / (gradient * kSums * ranks_sum)).abs().mean().item<double>();
}

inline void train_with_hook(const std::string& csv, const std::string& save_to,
                            const MakeHook& make_hook) {
  constexpr int64_t kEpochs = 6, kBatch = 16; // samples per batch, over all processes
  hasten::Accelerator accelerator;
  const Reviews reviews = read_reviews(csv);
  torch::manual_seed(42);
  ReviewClassifier classifier(reviews.vocab_size, reviews.num_labels);
  torch::optim::AdamW adamw(classifier->parameters(), torch::optim::AdamWOptions(1e-2));
  hasten::DataLoader batches(reviews.train, {.batch_size = kBatch / accelerator.num_processes()});

  auto [model, optimizer, loader] = accelerator.prepare(classifier, adamw, batches);
  const auto hook = make_hook(true);
  accelerator.register_comm_hook(model, hook); // the only line for the hook
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    loader.set_epoch(epoch);
    double loss_sum = 0;
    for (const hasten::Batch& batch : loader) {
      auto logits = model->forward(batch["input_ids"], batch["attention_mask"]);
      auto loss = torch::nn::functional::cross_entropy(logits, batch["labels"]);
      loss_sum += loss.item<double>() * batch.rows();
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
    }
    loss_sum = accelerator.reduce(torch::tensor(loss_sum)).item<double>();
    accelerator.print("epoch " + std::to_string(epoch + 1) + "  loss " +
                      std::to_string(loss_sum / static_cast<double>(reviews.train->size())));
  }
  save(model, accelerator.is_main_process() ? save_to : "");
  hasten::Communicator& ranks = *accelerator.communicator();
  const double with = missing(ranks, make_hook, true);
  const double without = missing(ranks, make_hook, false);
  accelerator.print("sent " + std::to_string(hook->bytes_per_number()) +
                    " bytes per number instead of 4");
  accelerator.print("missing " + std::to_string(with) + " of the sums, without feedback " +
                    std::to_string(without));
  accelerator.end_training();
}

} // namespace examples
