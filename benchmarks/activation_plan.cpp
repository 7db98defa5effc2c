// Plans under a budget compared with simple rules, run and measured, one thread.
//   activation_plan [--model bert-base] [--batch 8x128] [--rounds N] [--smoke]
// Prints one JSON line per case: {"case", "unit", "ours", "other"}: ours and the
// rule that the case names.
#include <malloc.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>

#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/activation_checkpoint/planner.h"
#include "hasten/base/error.h"
#include "hasten/core/block_call.h"
#include "hasten/core/memory.h"
#include "hasten/core/random.h"
#include "hasten/models/auto_model.h"

namespace hasten {

using at::Tensor;
using Plan = std::shared_ptr<const ActivationPlan>;
using Loss = std::function<Tensor()>;

// A transformer's feed-forward block, of one of several inner widths.
struct UnequalImpl : torch::nn::Module {
  UnequalImpl(int64_t width, int64_t inner)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, inner))),
        down(register_module("down", torch::nn::Linear(inner, width))) {}
  Tensor forward(const Tensor& x) { return x + down(at::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Unequal);

struct UnequalChainImpl : torch::nn::Module {
  explicit UnequalChainImpl(int64_t width) {
    for (int64_t i = 0; i < 24; ++i) {
      blocks.emplace_back(width, width * (1 + (i * 7) % 8) / 2);
      register_module("block" + std::to_string(i), blocks.back());
    }
  }
  Tensor forward(Tensor x) {
    for (Unequal& block : blocks) {
      x = call_block(block, x);
    }
    return x;
  }
  std::vector<Unequal> blocks;
};
TORCH_MODULE(UnequalChain);

// Peaks, and times of plans run in turn: the least of each one's rounds, since what
// else the machine does only adds, and a step of seconds gives few rounds.
class PlanBench {
 public:
  PlanBench(std::shared_ptr<torch::nn::Module> model, Loss loss, int rounds)
      : model_(std::move(model)),
        loss_(std::move(loss)),
        rounds_(rounds),
        profile(profile_activations(model_, loss_)) {}

  int64_t peak(const Plan& plan) const {
    gradient_checkpointing_enable(model_, {.plan = plan});
    return observe_peak(model_, loss_);
  }
  std::vector<double> seconds(const std::vector<Plan>& plans) const {
    std::vector<double> least(plans.size(), std::numeric_limits<double>::infinity());
    for (int round = -1; round < rounds_; ++round) {
      for (size_t i = 0; i < plans.size(); ++i) {
        gradient_checkpointing_enable(model_, {.plan = plans[i]});
        model_->zero_grad(false);
        const auto start = std::chrono::steady_clock::now();
        loss_().backward();
        const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
        if (round >= 0) {
          least[i] = std::min(least[i], time.count());
        }
      }
    }
    return least;
  }
  Plan within(int64_t bytes) const {
    return enable_within_budget(model_, loss_, "budget:" + std::to_string(bytes));
  }
  // Null below the least.
  Plan if_within(int64_t bytes) const {
    try {
      return within(bytes);
    } catch (const InputError&) {
      return nullptr;
    }
  }

 private:
  std::shared_ptr<torch::nn::Module> model_;
  Loss loss_;
  int rounds_;

 public:
  const ChainProfile profile;
};

static void print_pair(const std::string& name, const char* unit, double ours, double other) {
  std::printf("{\"case\": \"%s\", \"unit\": \"%s\", \"ours\": %.9g, \"other\": %.9g}\n",
              name.c_str(), unit, ours, other);
  std::fflush(stdout);
}

static void compare(const std::string& name, const PlanBench& bench) {
  const ChainProfile& profile = bench.profile;
  const auto blocks = static_cast<int64_t>(profile.blocks.size());
  const auto bytes = [](int64_t value) { return static_cast<double>(value); };
  const Plan full = make_plan(profile, keep_all_regions(blocks));
  const int64_t full_peak = bench.peak(full);
  for (const int percent : {20, 30, 50}) {
    const int64_t budget = full_peak * percent / 100;
    const std::string text = name + "_peak_at_" + std::to_string(percent);
    try {
      print_pair(text, "bytes", bytes(bench.within(budget)->observed_peak_bytes), bytes(budget));
    } catch (const InputError&) { // below the least: reported, not hidden
      print_pair(text + "_least", "bytes", bytes(least_budget(profile)), bytes(budget));
    }
  }
  const Plan sqrt = make_plan(profile, sqrt_regions(blocks));
  const Plan each = make_plan(profile, each_block_regions(blocks));
  const int64_t sqrt_peak = bench.peak(sqrt);
  const Plan at_sqrt = bench.if_within(sqrt_peak);
  const Plan at_each = bench.if_within(bench.peak(each));
  const Plan half = bench.if_within(full_peak / 2);
  const Plan half_blocks = half ? plan_whole_blocks(profile, full_peak / 2) : nullptr;
  // Half of what the rule takes, or the least that works.
  Plan small = bench.if_within(sqrt_peak / 2);
  if (!small) {
    small = bench.if_within(least_budget(profile) * 101 / 100);
  }
  std::vector<Plan> plans = {full, sqrt, at_sqrt, each, at_each, half, half_blocks, small};
  const std::vector<Plan> found = plans;
  std::replace(plans.begin(), plans.end(), Plan(), full);
  const std::vector<double> times = bench.seconds(plans);
  const auto print_times = [&](const char* row, size_t ours, size_t other) {
    if (found[ours] && found[other]) { // else there is no such plan
      print_pair(name + row, "s/step", times[ours], times[other]);
    }
  };
  print_times("_time_at_sqrt_peak", 2, 1);
  print_times("_time_at_each_peak", 4, 3);
  print_times("_time_with_ops_at_50", 5, 6);
  print_times("_time_of_small_peak", 7, 1);
  print_times("_time_at_50", 5, 0);
  print_pair(name + "_small_peak", "bytes", bytes(bench.peak(small)), bytes(sqrt_peak));
}

} // namespace hasten

int main(int argc, char** argv) {
  std::string shape = "bert-base";
  long rows = 8;
  long tokens = 128;
  int rounds = 7;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--smoke") == 0) {
      shape = "bert-tiny";
      rows = 2;
      tokens = 16;
      rounds = 1;
    } else if (std::strcmp(argv[i], "--model") == 0 && i + 1 < argc) {
      shape = argv[++i];
    } else if (std::strcmp(argv[i], "--rounds") == 0 && i + 1 < argc) {
      rounds = std::max(1, std::atoi(argv[++i]));
    } else if (std::strcmp(argv[i], "--batch") != 0 || i + 1 == argc ||
               std::sscanf(argv[++i], "%ldx%ld", &rows, &tokens) != 2) {
      std::fprintf(
          stderr,
          "usage: activation_plan [--model SHAPE] [--batch 8x128] [--rounds N] [--smoke]\n");
      return 2;
    }
  }
  // Memory that was in use once stays the process's: what the kernel takes to clear new
  // pages, in some rounds and not in others, is no plan's time.
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  at::set_num_threads(1);
  hasten::install_memory_meter();
  hasten::set_seed(1);
  const int64_t width = rounds == 1 ? 64 : 256;
  hasten::UnequalChain chain(width);
  const at::Tensor x = torch::randn({width * 2, width});
  hasten::compare(
      "unequal_24",
      hasten::PlanBench(chain.ptr(), [&] { return chain->forward(x).square().sum(); }, rounds));
  auto model = hasten::AutoModelForSequenceClassification::from_config(
      hasten::AutoConfig::from_shape(shape));
  const at::Tensor ids = torch::randint(1, 30'000, {rows, tokens});
  const at::Tensor labels = torch::randint(0, 2, {rows});
  hasten::compare("bert", hasten::PlanBench(
                              model.ptr(),
                              [&] {
                                return torch::nn::functional::cross_entropy(
                                    model->forward({ids}).logits, labels);
                              },
                              rounds));
  return 0;
}
