// What the features change: the model, its samples, the accelerator's options.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/sharded_rig.h"
#include "support/on_device.h"

namespace hasten::combinations_test {

using namespace sharded_test;
using Rows = std::pair<Tensor, Tensor>;
using Features = std::set<std::string>;

constexpr int64_t kNoLabel = -100; // torch's ignore_index

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const Features& features) {
    stack = register_module("stack", Stack(3));
    if (features.count("SyncBatchNorm") > 0) {
      norm = register_module("norm", torch::nn::BatchNorm1d(3));
    }
    if (features.count("channels last") > 0) {
      conv =
          register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 3, 3).padding(1)));
      conv->weight.set_data(conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    }
  }
  void add_integer_buffers() {
    steps = register_buffer("steps", on_device::zeros({1}, torch::kLong));
    seen = register_buffer("seen", on_device::zeros({13}, torch::kBool));
  }
  Tensor forward(const Tensor& ids) {
    if (steps.defined()) { // each rank has other token ids
      const torch::NoGradGuard no_grad;
      steps += 1;
      seen.index_fill_(0, ids.flatten(), true);
    }
    Tensor logits = stack->forward(ids);
    if (conv) {
      logits = conv->forward(logits.unsqueeze(2).unsqueeze(3)).flatten(1);
    }
    return norm ? norm->forward(logits) : logits;
  }
  Stack stack{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Conv2d conv{nullptr};
  Tensor steps{}, seen{};
};
TORCH_MODULE(Net);

// Batches of two rows. In an epoch each rank has two windows of three batches. With the feature
// "empty rank" each fifth batch has no label: its mean loss is NaN and has weight 0.
inline std::vector<Rows> rows_of(int world, const Features& features) {
  std::vector<Rows> all;
  for (int64_t b = 0; b < 6 * world; ++b) {
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(300 + b));
    all.emplace_back(on_device::randint(0, 13, {2, 4}, generator, torch::kLong),
                     on_device::randint(0, 3, {2}, generator, torch::kLong));
    if (features.count("empty rank") > 0 && b % 5 == 4) {
      all.back().second.fill_(kNoLabel);
    }
  }
  return all;
}

// Single samples, as torch's loaders need them.
struct SingleRows : torch::data::datasets::BatchDataset<SingleRows, Rows> {
  explicit SingleRows(const std::vector<Rows>& batches) {
    for (const Rows& batch : batches) {
      all.first = torch::cat({all.first, batch.first});
      all.second = torch::cat({all.second, batch.second});
    }
  }
  Rows get_batch(at::ArrayRef<size_t> rows) override {
    const Tensor index = on_device::tensor(std::vector<int64_t>(rows.begin(), rows.end()));
    return {all.first.index_select(0, index), all.second.index_select(0, index)};
  }
  torch::optional<size_t> size() const override { return static_cast<size_t>(all.second.size(0)); }
  Rows all{on_device::empty({0, 4}, torch::kLong), on_device::empty({0}, torch::kLong)};
};

// Joins the batches of `count` ranks.
inline std::vector<Rows> joined(const std::vector<Rows>& all, size_t count) {
  std::vector<Rows> result;
  for (size_t first = 0; first < all.size(); first += count) {
    std::vector<Tensor> ids;
    std::vector<Tensor> labels;
    for (size_t i = first; i < first + count; ++i) {
      ids.push_back(all[i].first);
      labels.push_back(all[i].second);
    }
    result.emplace_back(torch::cat(ids), torch::cat(labels));
  }
  return result;
}

inline Strategy strategy_of(const Features& features) {
  for (const Strategy strategy :
       {Strategy::zero1, Strategy::zero2, Strategy::fsdp, Strategy::hsdp}) {
    if (features.count(strategy_name(strategy)) > 0) {
      return strategy;
    }
  }
  return Strategy::ddp;
}

inline AcceleratorOptions options_for(const Features& features, int world) {
  AcceleratorOptions options;
  options.device = testing_support::run_device().str();
  options.seed = 12;
  options.strategy = strategy_of(features);
  if (options.strategy == Strategy::hsdp && world > 1) {
    options.shard_size = world / 2;
  }
  options.gradient_accumulation_steps = features.count("accumulation") ? 3 : 1;
  options.mixed_precision = features.count("bf16")   ? Precision::bf16
                            : features.count("fp16") ? Precision::fp16
                                                     : Precision::no;
  options.grad_scaler.init_scale = 128;
  options.sync_batchnorm = features.count("SyncBatchNorm") > 0;
  options.static_graph = features.count("static graph") > 0;
  return options;
}

inline bool narrow(const Features& features) {
  return features.count("bf16") + features.count("fp16") > 0;
}

} // namespace hasten::combinations_test
