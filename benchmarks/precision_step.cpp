// A training step (forward, backward, AdamW) of BERT-base, 8 samples of 128 tokens, in
// fp32 and in bf16, one thread; the peak of its activations; and the largest batch
// whose activations fit into a limit. Peer: peers/precision_step.py.
//   precision_step [--smoke]
// Prints one JSON line per case: {"case", "unit", "value"}; times are medians, the two
// precisions in turn.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstring>

#include "hasten/core/autocast.h"
#include "hasten/core/memory.h"
#include "hasten/core/random.h"
#include "hasten/models/auto_model.h"
#include "hasten/optim/adamw.h"
#include "median.h"

namespace hasten {

constexpr int64_t kTokens = 128;

struct Rows {
  explicit Rows(int64_t rows)
      : ids(torch::randint(1, 30'000, {rows, kTokens})),
        mask(torch::ones({rows, kTokens}, torch::kLong)),
        labels(torch::randint(0, 2, {rows})) {}
  at::Tensor ids, mask, labels;
};

struct Subject {
  explicit Subject(const char* shape)
      : model(AutoModelForSequenceClassification::from_config(AutoConfig::from_shape(shape))) {
    model->train();
    for (const auto& parameter : model->parameters()) {
      parameter.mutable_grad() = torch::zeros_like(parameter);
    }
  }
  void derive(const Rows& rows, bool bf16) {
    at::Tensor loss;
    {
      const Autocast autocast({.enabled = bf16});
      loss = torch::cross_entropy_loss(model->forward({rows.ids, rows.mask}).logits, rows.labels);
    }
    loss.backward();
  }
  // Bytes that forward and backward hold at once, in addition to gradients.
  int64_t peak(const Rows& rows, bool bf16) {
    const int64_t before = memory_stats().live_bytes;
    reset_peak_memory();
    derive(rows, bf16);
    return memory_stats().peak_bytes - before;
  }
  PreTrainedModel model;
};

static void print_value(const std::string& name, const char* unit, double v) {
  std::printf("{\"case\": \"%s\", \"unit\": \"%s\", \"value\": %.9g}\n", name.c_str(), unit, v);
  std::fflush(stdout);
}

// The largest batch within `limit` bytes of activations, to a sample.
static int64_t largest_batch(Subject& subject, bool bf16, int64_t limit) {
  int64_t fits = 0, over = 1;
  while (subject.peak(Rows(over), bf16) <= limit) {
    fits = over;
    over *= 2;
  }
  while (over - fits > 1) {
    const int64_t middle = (fits + over) / 2;
    (subject.peak(Rows(middle), bf16) <= limit ? fits : over) = middle;
  }
  return fits;
}

static void measure(bool smoke) {
  const char* shape = smoke ? "bert-tiny" : "bert-base";
  const int rounds = smoke ? 1 : 5;
  set_seed(1);
  Subject subject(shape);
  const Rows rows(8);
  AdamW optimizer(subject.model->parameters(), torch::optim::AdamWOptions(1e-5));
  std::vector<double> seconds[2];
  for (int round = -1; round < rounds; ++round) {
    for (const bool bf16 : {false, true}) {
      const auto start = std::chrono::steady_clock::now();
      subject.derive(rows, bf16);
      optimizer.step_and_zero();
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      if (round >= 0) {
        seconds[bf16 ? 1 : 0].push_back(time.count());
      }
    }
  }
  for (const bool bf16 : {false, true}) {
    const std::string name = bf16 ? "_bf16" : "_fp32";
    print_value("step" + name, "s/step", median_of(seconds[bf16 ? 1 : 0]));
    print_value("peak" + name, "bytes", static_cast<double>(subject.peak(rows, bf16)));
  }
  Subject small("bert-mini");
  const int64_t limit = smoke ? 32 << 20 : 512 << 20;
  for (const bool bf16 : {false, true}) {
    print_value(std::string("largest_batch") + (bf16 ? "_bf16" : "_fp32"), "rows",
                static_cast<double>(largest_batch(small, bf16, limit)));
  }
}

} // namespace hasten

int main(int argc, char** argv) {
  at::set_num_threads(1);
  hasten::install_memory_meter();
  hasten::measure(argc > 1 && std::strcmp(argv[1], "--smoke") == 0);
  return 0;
}
