// Forward and backward of a BERT classifier in training mode, one thread, nothing
// else: no optimizer, no data. Peer: peers/bert_step.py.
//   bert_step [--rounds N] [--smoke]
// Prints one JSON line per case: {"case", "unit", "value"}, the median of N rounds
// in seconds per 1000 samples. Cases: shape, tokens a sample, with or without padding.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "hasten/core/random.h"
#include "hasten/models/auto_model.h"
#include "median.h"

namespace hasten {

struct StepCase {
  const char* shape;
  int64_t tokens;
  bool padding;
};

static PreTrainedConfig config_of(const std::string& shape) {
  if (AutoConfig::is_shape(shape)) {
    return AutoConfig::from_shape(shape);
  }
  PreTrainedConfig config; // MiniLM's
  config.num_hidden_layers = 6;
  config.hidden_size = 384;
  config.num_attention_heads = 12;
  config.intermediate_size = 1536;
  return config;
}

static double seconds_per_thousand(const StepCase& step, int rounds) {
  constexpr int64_t kRows = 16;
  set_seed(1);
  auto model = AutoModelForSequenceClassification::from_config(config_of(step.shape));
  const auto ids = torch::randint(1, 30'000, {kRows, step.tokens});
  auto mask = torch::ones({kRows, step.tokens}, torch::kLong);
  if (step.padding) {
    for (int64_t row = 1; row < kRows; row += 2) {
      mask[row].slice(0, step.tokens * 3 / 4).zero_();
    }
  }
  const auto labels = torch::randint(0, 2, {kRows});
  std::vector<double> seconds;
  for (int round = -2; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    model->zero_grad(false);
    torch::nn::functional::cross_entropy(model->forward({ids, mask}).logits, labels).backward();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    if (round >= 0) {
      seconds.push_back(time.count());
    }
  }
  return median_of(seconds) * 1000 / kRows;
}

} // namespace hasten

int main(int argc, char** argv) {
  int rounds = 15;
  bool smoke = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--smoke") == 0) {
      smoke = true;
      rounds = 1;
    } else if (std::strcmp(argv[i], "--rounds") == 0 && i + 1 < argc) {
      rounds = std::max(1, std::atoi(argv[++i]));
    } else {
      std::fprintf(stderr, "usage: bert_step [--rounds N] [--smoke]\n");
      return 2;
    }
  }
  at::set_num_threads(1);
  for (const char* shape : {"bert-mini", "6x384"}) {
    for (const int64_t tokens : {32, 64, 128}) {
      for (const bool padding : {false, true}) {
        if (smoke && (tokens > 32 || padding)) {
          continue;
        }
        const double value = hasten::seconds_per_thousand({shape, tokens, padding}, rounds);
        std::printf("{\"case\": \"%s, %ld tokens%s\", \"unit\": \"s/1000\", \"value\": %.6f}\n",
                    shape, static_cast<long>(tokens), padding ? ", padded" : "", value);
        std::fflush(stdout);
      }
    }
  }
  return 0;
}
