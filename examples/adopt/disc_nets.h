// The networks of the disc finder.
#pragma once

#include <torch/torch.h>

#include <cstdint>

constexpr int64_t kSide = 24; // pixels
constexpr int64_t kTargets = 3; // x, y, radius, each about -1 to 1

struct ConvBlockImpl : torch::nn::Module {
  ConvBlockImpl(int64_t in, int64_t out) {
    conv = register_module(
        "conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm2d(out));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::max_pool2d(torch::relu(norm(conv(x))), 2);
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
};
TORCH_MODULE(ConvBlock);

// Measures: images to targets.
struct DiscNetImpl : torch::nn::Module {
  DiscNetImpl() {
    block1 = register_module("block1", ConvBlock(1, 8));
    block2 = register_module("block2", ConvBlock(8, 16));
    block3 = register_module("block3", ConvBlock(16, 32));
    hidden = register_module("hidden", torch::nn::Linear(32 * 9, 48));
    head = register_module("head", torch::nn::Linear(48, kTargets));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = block3(block2(block1(x)));
    return head(torch::relu(hidden(x.flatten(1))));
  }
  ConvBlock block1{nullptr}, block2{nullptr}, block3{nullptr};
  torch::nn::Linear hidden{nullptr}, head{nullptr};
};
TORCH_MODULE(DiscNet);

// Judges: images to the logarithm of the variance to expect of the other one.
struct DoubtNetImpl : torch::nn::Module {
  DoubtNetImpl() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 5).stride(2)));
    out = register_module("out", torch::nn::Linear(16, kTargets));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto features = torch::relu(conv(x)).flatten(2);
    return out(torch::cat({features.mean(2), features.std(2)}, 1));
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear out{nullptr};
};
TORCH_MODULE(DoubtNet);
