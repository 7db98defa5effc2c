// A loop of one's own that runs on any number of processes, with gradients that
// are those of the joined batch whatever the split:
//
//   03_accelerator examples/reviews.csv
//   hasten launch --nproc 2 03_accelerator examples/reviews.csv
//
// Both print the same losses up to rounding: 2 processes × 8 rows × 2 batches a
// step here, 1 × 16 × 2 there, and no dropout.
#include <torch/nn/functional/loss.h>

#include <iostream>
#include <string>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/data/loader.h"
#include "hasten/data/text_classification.h"
#include "hasten/data/tokenized_dataset.h"
#include "hasten/models/bert.h"
#include "hasten/optim/adamw.h"
#include "hasten/optim/schedule.h"

namespace hasten_example {

using hasten::Batch;

// The rows of a file as batches of 16 over all processes, and the vocabulary.
struct Reviews {
  std::shared_ptr<hasten::TokenizedDataset> rows{};
  int64_t vocab_size = 0;
};

Reviews read_reviews(const std::string& path) {
  const auto data =
      hasten::load_text_classification({.train_file = path, .table = {}});
  hasten::WordPieceTokenizer tokenizer(
      hasten::build_wordpiece_vocab(data.train.texts, {}), {});
  const auto texts =
      hasten::tokenize_texts(tokenizer, data.train.texts, /*max_length=*/32);
  return {
      std::make_shared<hasten::TokenizedDataset>(texts.ids, data.train.labels),
      tokenizer.vocab_size()};
}

int run(const std::string& path) {
  constexpr int64_t kEpochs = 6;
  hasten::Accelerator accelerator({.gradient_accumulation_steps = 2});
  const Reviews reviews = read_reviews(path);

  auto config = hasten::BertConfig::from_shape("bert-tiny", reviews.vocab_size);
  config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0;
  hasten::BertForSequenceClassification classifier(config);
  hasten::AdamW adamw(
      classifier->parameters(), torch::optim::AdamWOptions(1e-3));
  const int64_t batch_size = 16 / accelerator.num_processes();
  hasten::DataLoader batches(reviews.rows, {.batch_size = batch_size});
  hasten::LrScheduler linear(
      adamw,
      hasten::linear_schedule(4, kEpochs * (reviews.rows->size() + 31) / 32));

  // [loop]
  auto [model, optimizer, loader, scheduler] =
      accelerator.prepare(classifier, adamw, batches, linear);
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    loader.set_epoch(epoch);
    for (const Batch& batch : loader) {
      auto window = accelerator.accumulate(model);
      auto logits = model->forward(batch["input_ids"], batch["attention_mask"]);
      auto loss = torch::nn::functional::cross_entropy(logits, batch["labels"]);
      accelerator.backward(loss); // the joined batch's gradient, on every rank
      accelerator.clip_grad_norm_(model, 1.0);
      optimizer.step(); // does nothing until the window is complete
      scheduler.step();
      optimizer.zero_grad();
    }
    accelerator.print(
        "epoch " + std::to_string(epoch + 1) + " loss " +
        std::to_string(accelerator.last_window().loss));
  }
  accelerator.finish();
  // [/loop]
  return 0;
}

} // namespace hasten_example

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: 03_accelerator reviews.csv\n";
    return 2;
  }
  try {
    return hasten_example::run(argv[1]);
  } catch (const hasten::Error& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}
