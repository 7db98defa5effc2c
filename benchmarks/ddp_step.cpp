// Forward, backward and the reduction of gradients, nothing else: one thread a
// rank, no optimizer, no data. Started by `hasten launch`, or alone as one process.
// Peer: peers/ddp_step.py.
//   ddp_step bert-mini|small-tensors [--steps N] [--keep] [--batch ROWS]
// --keep: gradients are set to zero after a step, not freed. --batch: samples a rank, of
// bert-mini, 8 unless given.
// Rank 0 prints one JSON line: median seconds of a step, most bytes of tensors
// alive on any rank while stepping, bytes of the gradients, median seconds of
// communication and of the exposed part of it.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "hasten/accelerator/accelerator.h"
#include "hasten/core/memory.h"
#include "hasten/models/auto_model.h"
#include "median.h"

namespace hasten {

// 2000 parameters of 64 elements: all overhead, no arithmetic.
struct SmallTensorsImpl : torch::nn::Module {
  SmallTensorsImpl() {
    for (int i = 0; i < 2000; ++i) {
      parts.push_back(register_parameter("part" + std::to_string(i), torch::randn({64})));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (const at::Tensor& part : parts) {
      y = torch::addcmul(y, x, part);
    }
    return y;
  }
  std::vector<at::Tensor> parts{};
};
TORCH_MODULE(SmallTensors);

struct Request {
  std::string model{};
  int steps = 60;
  bool keep = false;
  int64_t batch = 8;
};

// `loss`: a sum over `weight` samples.
template <typename Model>
void measure_steps(Model model, const Request& request, double weight,
                   const std::function<at::Tensor()>& loss) {
  Accelerator accelerator({.device = "cpu"});
  accelerator.prepare(model);
  constexpr int kWarmUp = 5;
  std::vector<double> seconds, communication, exposed;
  for (int step = -kWarmUp; step < request.steps; ++step) {
    if (step == 0) {
      accelerator.wait_for_everyone();
      reset_peak_memory();
    }
    const auto start = std::chrono::steady_clock::now();
    {
      auto window = accelerator.accumulate(model);
      accelerator.backward(loss(), weight);
    }
    model->zero_grad(!request.keep);
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    if (step >= 0) {
      seconds.push_back(time.count());
      communication.push_back(accelerator.last_window().communication_seconds);
      exposed.push_back(accelerator.last_window().exposed_seconds);
    }
  }
  const auto peak_bytes =
      accelerator.reduce(torch::tensor({memory_stats().peak_bytes}), ReduceOp::MAX).item<int64_t>();
  int64_t gradient_bytes = 0;
  for (const at::Tensor& parameter : model->parameters()) {
    gradient_bytes += static_cast<int64_t>(parameter.nbytes());
  }
  if (accelerator.is_main_process()) {
    std::printf(
        "{\"seconds\": %.6f, \"peak_bytes\": %lld, \"gradient_bytes\": %lld, "
        "\"communication_seconds\": %.6f, \"exposed_seconds\": %.6f}\n",
        median_of(seconds), static_cast<long long>(peak_bytes),
        static_cast<long long>(gradient_bytes), median_of(communication), median_of(exposed));
  }
  accelerator.end_training();
}

static void run_bert_mini(const Request& request) {
  const int64_t rows = request.batch;
  constexpr int64_t kTokens = 64;
  torch::manual_seed(1);
  auto model = AutoModelForSequenceClassification::from_config(AutoConfig::from_shape("bert-mini"));
  model->train();
  const auto ids = torch::randint(1, 30'000, {rows, kTokens});
  const auto mask = torch::ones({rows, kTokens}, torch::kLong);
  const auto labels = torch::randint(0, 2, {rows});
  measure_steps(model, request, static_cast<double>(rows), [&] {
    return torch::nn::functional::cross_entropy(
        model->forward({ids, mask}).logits, labels,
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
  });
}

static void run_small_tensors(const Request& request) {
  torch::manual_seed(1);
  SmallTensors model;
  const auto x = torch::randn({64});
  measure_steps(model, request, 1, [&] { return model->forward(x).sum(); });
}

} // namespace hasten

int main(int argc, char** argv) {
  hasten::Request request;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--steps") == 0 && i + 1 < argc) {
      request.steps = std::max(1, std::atoi(argv[++i]));
    } else if (std::strcmp(argv[i], "--keep") == 0) {
      request.keep = true;
    } else if (std::strcmp(argv[i], "--batch") == 0 && i + 1 < argc) {
      request.batch = std::max(1, std::atoi(argv[++i]));
    } else {
      request.model = argv[i];
    }
  }
  const std::string& name = request.model;
  if (name != "bert-mini" && name != "small-tensors") {
    std::fprintf(stderr,
                 "usage: ddp_step bert-mini|small-tensors [--steps N] [--keep] [--batch ROWS]\n");
    return 2;
  }
  hasten::install_memory_meter();
  at::set_num_threads(1);
  try {
    name == "bert-mini" ? hasten::run_bert_mini(request) : hasten::run_small_tensors(request);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
