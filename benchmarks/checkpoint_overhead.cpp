// What a region costs beyond its recomputation, and what whole models pay, one
// thread. Peer: peers/checkpoint_overhead.py (torch.utils.checkpoint).
//   checkpoint_overhead [--smoke]
// Prints one JSON line per case: {"case", "unit", "value"}; times are medians.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>

#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/activation_checkpoint/planner.h"
#include "hasten/core/memory.h"
#include "hasten/core/random.h"
#include "hasten/models/auto_model.h"
#include "median.h"

namespace hasten {

using at::Tensor;

static double median_seconds(int rounds, const std::function<void()>& run) {
  std::vector<double> seconds;
  for (int round = -1; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    if (round >= 0) {
      seconds.push_back(time.count());
    }
  }
  return median_of(seconds);
}

static void print_value(const char* name, const char* unit, double value) {
  std::printf("{\"case\": \"%s\", \"unit\": \"%s\", \"value\": %.9g}\n", name, unit, value);
  std::fflush(stdout);
}

// A hundred regions of a tiny layer: with, without, and the forward that is run
// again.
static void region_overhead(bool smoke) {
  constexpr int kRegions = 100;
  const int rounds = smoke ? 2 : 60;
  torch::nn::Linear layer(4, 4);
  const Tensor x = torch::randn({2, 4}).requires_grad_();
  const auto fn = [&](const Tensor& in) { return at::relu(layer(in)); };
  const auto derive = [&](bool region) {
    std::vector<Tensor> outputs;
    for (int i = 0; i < kRegions; ++i) {
      outputs.push_back(region ? activation_checkpoint(fn, x) : fn(x));
    }
    at::stack(outputs).sum().backward();
  };
  const double plain = median_seconds(rounds, [&] { derive(false); });
  const double again = median_seconds(rounds, [&] {
    std::vector<Tensor> outputs;
    for (int i = 0; i < kRegions; ++i) {
      outputs.push_back(fn(x));
    }
  });
  const double region = median_seconds(rounds, [&] { derive(true); });
  print_value("region_overhead", "us/region", 1e6 * (region - plain - again) / kRegions);
  print_value("region", "us/region", 1e6 * region / kRegions);
}

// Multiplications that save two tensors each, before and after our engine is there.
static double multiplication_seconds(int rounds) {
  const Tensor a = torch::randn({4, 4}).requires_grad_();
  return median_seconds(rounds, [&] {
    Tensor x = a;
    for (int i = 0; i < 1000; ++i) {
      x = x * a;
    }
  });
}

static void whole_models(bool smoke) {
  set_seed(1);
  const int64_t rows = smoke ? 2 : 16;
  const int64_t tokens = smoke ? 16 : 128;
  auto model = AutoModelForSequenceClassification::from_config(
      AutoConfig::from_shape(smoke ? "bert-tiny" : "bert-mini"));
  const Tensor ids = torch::randint(1, 30'000, {rows, tokens});
  const Tensor labels = torch::randint(0, 2, {rows});
  const auto loss = [&] {
    return torch::nn::functional::cross_entropy(model->forward({ids}).logits, labels);
  };
  for (const char* mode : {"none", "full", "ops"}) {
    gradient_checkpointing_enable(model, {.mode = mode});
    const double seconds = median_seconds(smoke ? 1 : 9, [&] {
      model->zero_grad(false);
      loss().backward();
    });
    print_value(("bert_mini_" + std::string(mode)).c_str(), "s/step", seconds);
    print_value(("bert_mini_" + std::string(mode) + "_peak").c_str(), "bytes",
                static_cast<double>(observe_peak(model.ptr(), loss)));
  }
}

} // namespace hasten

int main(int argc, char** argv) {
  const bool smoke = argc == 2 && std::strcmp(argv[1], "--smoke") == 0;
  if (argc > 1 && !smoke) {
    std::fprintf(stderr, "usage: checkpoint_overhead [--smoke]\n");
    return 2;
  }
  at::set_num_threads(1);
  hasten::install_memory_meter();
  const double before = hasten::multiplication_seconds(smoke ? 2 : 40);
  hasten::region_overhead(smoke);
  const double after = hasten::multiplication_seconds(smoke ? 2 : 40);
  hasten::print_value("no_region_before", "us/op", 1e3 * before);
  hasten::print_value("no_region_after", "us/op", 1e3 * after);
  hasten::whole_models(smoke);
  return 0;
}
