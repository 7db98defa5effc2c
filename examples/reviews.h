// The code that all examples share: reading the reviews of a CSV file as token ids, a small
// classifier, saving, and main().
#pragma once

#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <string>

#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/core/block_call.h"
#include "hasten/data/loader.h"
#include "hasten/io/safetensors.h"
#include "hasten/text/token_cache.h"
#include "hasten/text/tokenized_dataset.h"

namespace examples {

struct Reviews {
  std::shared_ptr<hasten::TokenizedDataset> train{}; // four fifths of the samples
  std::shared_ptr<hasten::TokenizedDataset> eval{}; // the others
  int64_t vocab_size = 0;
  int64_t num_labels = 0;
};

// Reads a CSV with columns text and label, and learns the vocabulary from the texts.
inline Reviews read_reviews(const std::string& path) {
  const auto data = hasten::tokenize_text_classification(
      hasten::TextFile::open(path), {}, {.texts = {.eval_split = 0.2}, .max_length = 128});
  const auto dataset = [](const hasten::TokenTable& rows) {
    return std::make_shared<hasten::TokenizedDataset>(rows);
  };
  return {dataset(data.train), dataset(data.eval), data.tokenizer.vocab_size(),
          static_cast<int64_t>(data.label_names.size())};
}

// The mean of the tokens' embeddings, one hidden layer, one logit for each label.
struct ReviewClassifierImpl : torch::nn::Module {
  ReviewClassifierImpl(int64_t vocab_size, int64_t num_labels)
      : embedding(register_module("embedding", torch::nn::Embedding(vocab_size, 32))),
        hidden(register_module("hidden", torch::nn::Linear(32, 32))),
        output(register_module("output", torch::nn::Linear(32, num_labels))) {}

  // ids, mask: [B, T]. Returns logits, [B, num_labels].
  torch::Tensor forward(const torch::Tensor& ids, const torch::Tensor& mask) {
    const auto weight = mask.unsqueeze(2).to(torch::kFloat);
    const auto mean = (embedding(ids) * weight).sum(1) / weight.sum(1);
    return output(torch::relu(hasten::call_block(hidden, mean)));
  }

  torch::nn::Embedding embedding;
  torch::nn::Linear hidden, output;
};
TORCH_MODULE(ReviewClassifier);

// Does nothing if `path` is empty.
inline void save(const ReviewClassifier& model, const std::string& path) {
  if (!path.empty()) {
    hasten::NamedTensors tensors;
    for (const auto& parameter : model->named_parameters()) {
      tensors[parameter.key()] = parameter.value().detach();
    }
    hasten::write_safetensors(path, tensors);
  }
}

inline std::string epoch_line(int64_t epoch, double loss, double accuracy) {
  char line[80];
  std::snprintf(line, sizeof line, "epoch %ld  loss %.4f  accuracy %.4f", static_cast<long>(epoch),
                loss, accuracy);
  return line;
}

// Parses NAME reviews.csv [model.safetensors]. Returns the exit code.
inline int run_example(int argc, char** argv,
                       void (*train)(const std::string& csv, const std::string& save_to)) {
  return hasten::record([&] {
    if (argc != 2 && argc != 3) {
      throw hasten::InputError("examples::main", std::to_string(argc - 1) + " arguments",
                               std::string(argv[0]) + " reviews.csv [model.safetensors]");
    }
    train(argv[1], argc == 3 ? argv[2] : "");
  });
}

} // namespace examples
