// Training steps of bert-mini where the link is what costs: DDP and Local SGD.
// One thread a rank; the ranks are started by bench.py, each in its own network
// with a shaped link between them.
//   local_sgd_link ddp|alone|blocking|overlapped [--every H] [--windows N]
// Rank 0 prints one JSON line: seconds of a step, over N times H steps after as many
// to warm up (ddp, alone: over N steps), and bytes of the parameters. alone: no
// communication at all, the rank's own steps.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>

#include "hasten/accelerator/accelerator.h"
#include "hasten/local_sgd/local_sgd.h"
#include "hasten/models/auto_model.h"
#include "hasten/optim/adamw.h"

namespace hasten {

struct Request {
  std::string mode{};
  int64_t every = 8;
  int64_t windows = 3;
};

static void run(const Request& request) {
  constexpr int64_t kRows = 8, kTokens = 64;
  Accelerator accelerator({.device = "cpu"});
  at::set_num_threads(1);
  auto model = AutoModelForSequenceClassification::from_config(AutoConfig::from_shape("bert-mini"));
  model->train();
  AdamW adamw(model->parameters(), torch::optim::AdamWOptions(1e-4));
  auto [net, optimizer] = accelerator.prepare(model, adamw);
  const auto ids = torch::randint(1, 30'000, {kRows, kTokens});
  const auto mask = torch::ones({kRows, kTokens}, torch::kLong);
  const auto labels = torch::randint(0, 2, {kRows});
  const bool ddp = request.mode == "ddp", alone = request.mode == "alone";
  std::optional<LocalSGD> local_sgd;
  if (!ddp) {
    LocalSGDOptions options;
    options.local_sgd_steps = alone ? int64_t{1} << 40 : request.every;
    options.delay = request.mode == "overlapped" ? request.every - 1 : 0;
    local_sgd.emplace(accelerator, net, options);
  }
  const auto step = [&, &optimizer = optimizer, &net = net] {
    {
      auto window = accelerator.accumulate(net);
      accelerator.backward(
          torch::nn::functional::cross_entropy(
              net->forward({ids, mask}).logits, labels,
              torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum)),
          kRows);
    }
    optimizer.step();
    optimizer.zero_grad();
    if (local_sgd) {
      local_sgd->step();
    }
  };
  const int64_t in_a_window = ddp || alone ? 1 : request.every;
  for (int64_t i = 0; i < (ddp || alone ? 2 : in_a_window); ++i) {
    step();
  }
  if (!alone) {
    accelerator.wait_for_everyone();
  }
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < request.windows * in_a_window; ++i) {
    step();
  }
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
  if (local_sgd) {
    local_sgd->finish();
  }
  int64_t bytes = 0;
  for (const at::Tensor& parameter : model->parameters()) {
    bytes += static_cast<int64_t>(parameter.nbytes());
  }
  if (accelerator.is_main_process()) {
    std::printf("{\"seconds\": %.6f, \"bytes\": %lld}\n",
                time.count() / static_cast<double>(request.windows * in_a_window),
                static_cast<long long>(bytes));
  }
  accelerator.end_training();
}

} // namespace hasten

int main(int argc, char** argv) {
  hasten::Request request;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--every") == 0 && i + 1 < argc) {
      request.every = std::atoll(argv[++i]);
    } else if (std::strcmp(argv[i], "--windows") == 0 && i + 1 < argc) {
      request.windows = std::atoll(argv[++i]);
    } else {
      request.mode = argv[i];
    }
  }
  if (request.mode != "ddp" && request.mode != "alone" && request.mode != "blocking" &&
      request.mode != "overlapped") {
    std::fprintf(stderr,
                 "usage: local_sgd_link ddp|alone|blocking|overlapped [--every H] [--windows N]\n");
    return 2;
  }
  try {
    hasten::run(request);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
