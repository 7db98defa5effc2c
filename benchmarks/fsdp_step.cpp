// Training steps of a GPT-2-shaped model under a strategy, one thread a rank. Its products are
// fast_linear(), as in the models of hasten.
// Peer: peers/fsdp_step.py.
//   fsdp_step [--strategy ddp|zero1|zero2|fsdp|alone] [--layers N] [--width N]
//     [--words N] [--rows N] [--tokens N] [--steps N]
// alone: every rank trains its own model, without a word to the others.
// Rank 0 prints one JSON line: median seconds of a step (forward, backward, AdamW), of
// its forward and backward, and that it waited for messages; and of the largest rank: bytes of tensors
// between steps, at the most, elements of parameters and of the largest block.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "hasten/accelerator/accelerator.h"
#include "hasten/core/block_call.h"
#include "hasten/core/linear.h"
#include "hasten/core/memory.h"
#include "hasten/optim/adamw.h"
#include "median.h"

namespace hasten {

static at::Tensor product(const torch::nn::Linear& layer, const at::Tensor& x) {
  return fast_linear(x, layer->weight, layer->bias);
}

struct GptBlockImpl : torch::nn::Module {
  explicit GptBlockImpl(int64_t width) {
    const std::vector<int64_t> row{width};
    norm1 = register_module("norm1", torch::nn::LayerNorm(row));
    norm2 = register_module("norm2", torch::nn::LayerNorm(row));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  at::Tensor forward(const at::Tensor& x) {
    const int64_t rows = x.size(0), tokens = x.size(1), width = x.size(2);
    const auto parts = product(qkv, norm1->forward(x))
                           .view({rows, tokens, 3, width / 64, 64})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    const at::Tensor heads =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    const at::Tensor y = x + product(out, heads.transpose(1, 2).reshape({rows, tokens, width}));
    return y + product(down, at::gelu(product(up, norm2->forward(y)), "tanh"));
  }
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(GptBlock);

struct GptImpl : torch::nn::Module {
  GptImpl(int64_t layers, int64_t width, int64_t vocabulary, int64_t tokens) {
    words = register_module("words", torch::nn::Embedding(vocabulary, width));
    places = register_module("places", torch::nn::Embedding(tokens, width));
    for (int64_t i = 0; i < layers; ++i) {
      blocks->push_back(GptBlock(width));
    }
    register_module("blocks", blocks);
    norm = register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{width}));
  }
  at::Tensor forward(const at::Tensor& ids) {
    at::Tensor x = words->forward(ids) + places->forward(at::arange(ids.size(1)));
    for (const auto& block : *blocks) {
      x = call_block(*block->as<GptBlockImpl>(), x);
    }
    return fast_linear(norm->forward(x), words->weight);
  }
  torch::nn::Embedding words{nullptr}, places{nullptr};
  torch::nn::ModuleList blocks{};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Gpt);

struct Request {
  std::string strategy = "fsdp";
  int64_t layers = 6;
  int64_t width = 384;
  int64_t words = 2048;
  int64_t rows = 4;
  int64_t tokens = 128;
  int64_t steps = 20;
};

static Strategy strategy_of(const std::string& name) {
  for (const Strategy strategy :
       {Strategy::ddp, Strategy::zero1, Strategy::zero2, Strategy::fsdp}) {
    if (name == strategy_name(strategy)) {
      return strategy;
    }
  }
  if (name == "alone") {
    return Strategy::ddp;
  }
  std::fprintf(stderr, "--strategy: ddp, zero1, zero2, fsdp or alone\n");
  std::exit(2);
}

static int64_t elements_of(const torch::nn::Module& module) {
  int64_t count = 0;
  for (const at::Tensor& parameter : module.parameters()) {
    count += parameter.numel();
  }
  return count;
}

static void run(const Request& request) {
  install_memory_meter();
  const World world = world_from_environment();
  const bool alone = request.strategy == "alone";
  Accelerator accelerator({.device = "cpu", .strategy = strategy_of(request.strategy)},
                          Communicator::create(alone ? World{} : world));
  at::set_num_threads(1);
  torch::manual_seed(1);
  Gpt model(request.layers, request.width, request.words, request.tokens);
  const int64_t elements = elements_of(*model);
  const int64_t block = elements_of(*model->blocks->ptr(0));
  AdamW adamw(model->parameters(), torch::optim::AdamWOptions(1e-4));
  auto [net, optimizer] = accelerator.prepare(model, adamw);
  const auto ids = torch::randint(0, request.words, {request.rows, request.tokens});
  const auto labels = torch::randint(0, request.words, {request.rows * request.tokens});
  std::vector<double> seconds, gradients, exposed;
  constexpr int64_t kWarmUp = 3;
  for (int64_t step = -kWarmUp; step < request.steps; ++step) {
    if (step == 0) {
      accelerator.wait_for_everyone();
      reset_peak_memory();
    }
    const auto start = std::chrono::steady_clock::now();
    {
      auto window = accelerator.accumulate(net);
      accelerator.backward(
          torch::nn::functional::cross_entropy(net->forward(ids).flatten(0, 1), labels),
          static_cast<double>(request.rows));
    }
    const std::chrono::duration<double> derived = std::chrono::steady_clock::now() - start;
    optimizer.step();
    optimizer.zero_grad();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    if (step >= 0) {
      seconds.push_back(time.count());
      gradients.push_back(derived.count());
      exposed.push_back(accelerator.last_window().exposed_seconds);
    }
  }
  const auto largest = [&](int64_t bytes) {
    return static_cast<long long>(
        accelerator.reduce(torch::tensor({bytes}), ReduceOp::MAX).item<int64_t>());
  };
  const long long rest = largest(memory_stats().live_bytes);
  const long long peak = largest(memory_stats().peak_bytes);
  if (world.rank == 0) {
    std::printf(
        "{\"seconds\": %.6f, \"gradient_seconds\": %.6f, "
        "\"exposed_seconds\": %.6f, \"rest_bytes\": %lld, "
        "\"peak_bytes\": %lld, \"elements\": %lld, \"block\": %lld}\n",
        median_of(seconds), median_of(gradients), median_of(exposed), rest, peak,
        static_cast<long long>(elements), static_cast<long long>(block));
  }
  accelerator.end_training();
  accelerator.communicator()->close();
}

} // namespace hasten

int main(int argc, char** argv) {
  hasten::Request request;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    int64_t* const number = flag == "--layers"   ? &request.layers
                            : flag == "--width"  ? &request.width
                            : flag == "--words"  ? &request.words
                            : flag == "--rows"   ? &request.rows
                            : flag == "--tokens" ? &request.tokens
                            : flag == "--steps"  ? &request.steps
                                                 : nullptr;
    if (number != nullptr) {
      *number = std::atoll(argv[i + 1]);
    } else if (flag == "--strategy") {
      request.strategy = argv[i + 1];
    } else {
      std::fprintf(stderr, "fsdp_step: unknown flag %s\n", argv[i]);
      return 2;
    }
  }
  try {
    hasten::run(request);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
