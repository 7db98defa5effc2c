// One step of AdamW, one thread: BERT-base's shapes (110 M numbers), and 2000
// tensors of 256.
//   optimizer_step [--steps N] [--smoke]
// Prints one JSON line per case: {"case", "numbers", "step", "step_8bit", "all", "torch",
// "stream"}: median seconds of processor time of a step alone; of AdamW8bit's, in
// turns; of clipping by norm, scaling, step and zeroed gradients together; of
// torch::optim::AdamW's step; and of streaming the 28 bytes a number that a step of
// AdamW must move.
#include <time.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "hasten/optim/adamw.h"
#include "hasten/optim/gradient_norm.h"
#include "median.h"

namespace hasten {

using Shapes = std::vector<std::vector<int64_t>>;

Shapes bert_base() {
  constexpr int64_t kHidden = 768;
  Shapes shapes = {{30522, kHidden}, {512, kHidden}, {2, kHidden}, {kHidden}, {kHidden}};
  for (int layer = 0; layer < 12; ++layer) {
    for (int i = 0; i < 4; ++i) { // query, key, value, output
      shapes.push_back({kHidden, kHidden});
      shapes.push_back({kHidden});
    }
    for (const auto& shape : Shapes{{kHidden},
                                    {kHidden},
                                    {4 * kHidden, kHidden},
                                    {4 * kHidden},
                                    {kHidden, 4 * kHidden},
                                    {kHidden},
                                    {kHidden},
                                    {kHidden}}) {
      shapes.push_back(shape);
    }
  }
  shapes.push_back({kHidden, kHidden}); // pooler
  shapes.push_back({kHidden});
  return shapes;
}

std::vector<at::Tensor> parameters_of(const Shapes& shapes) {
  torch::manual_seed(1);
  std::vector<at::Tensor> parameters;
  for (const auto& shape : shapes) {
    parameters.push_back(torch::randn(shape).mul_(0.02).requires_grad_());
    parameters.back().mutable_grad() = torch::randn(shape).mul_(1e-3);
  }
  return parameters;
}

// The thread's own: what others do on the machine does not count.
double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Of each act; the acts take turns.
std::vector<double> median_seconds(int steps, const std::vector<std::function<void()>>& acts) {
  std::vector<std::vector<double>> seconds(acts.size());
  for (int step = -2; step < steps; ++step) {
    for (size_t i = 0; i < acts.size(); ++i) {
      const double start = thread_seconds();
      acts[i]();
      if (step >= 0) {
        seconds[i].push_back(thread_seconds() - start);
      }
    }
  }
  std::vector<double> medians;
  for (const auto& list : seconds) {
    medians.push_back(median_of(list));
  }
  return medians;
}

double median_seconds(int steps, const std::function<void()>& act) {
  return median_seconds(steps, std::vector{act})[0];
}

// A step's traffic without its arithmetic: three arrays read and written, one read.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("O3"), target_clones("avx512f", "avx2", "default")))
#endif
void add_to_three(
    float* __restrict a,
    float* __restrict b,
    float* __restrict c,
    const float* __restrict d,
    int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    a[i] += d[i];
    b[i] += d[i];
    c[i] += d[i];
  }
}

void measure(const char* name, const Shapes& shapes, int steps, int slow) {
  double step = 0, step_8bit = 0, all = 0, torchs = 0, stream = 0;
  int64_t numbers = 0;
  const torch::optim::AdamWOptions options(1e-5);
  {
    auto parameters = parameters_of(shapes);
    for (const at::Tensor& parameter : parameters) {
      numbers += parameter.numel();
    }
    AdamW optimizer(parameters, options);
    AdamW8bit eight(parameters, options);
    const auto medians = median_seconds(steps, {[&] { optimizer.step(); }, [&] { eight.step(); }});
    step = medians[0];
    step_8bit = medians[1];
    all = median_seconds(steps, [&] {
      std::vector<at::Tensor> gradients;
      for (const at::Tensor& parameter : parameters) {
        gradients.push_back(parameter.grad());
      }
      // As the accelerator does: one number for the mean, the scale and the clip.
      const double norm = gradient_norm(gradients, 2) * 0.5;
      optimizer.step_and_zero(0.5 * std::min(1.0, 1 / (norm + 1e-6)));
      gradients[0].view({-1})[0] = 1; // the next has something to do
    });
  }
  {
    torch::optim::AdamW optimizer(parameters_of(shapes), options);
    torchs = median_seconds(slow, [&] { optimizer.step(); });
  }
  {
    const auto one = torch::zeros({numbers / 4 * 4});
    const auto two = torch::zeros_like(one), three = torch::zeros_like(one);
    const auto four = torch::zeros_like(one);
    const int64_t count = one.numel();
    float* a = one.data_ptr<float>();
    float* b = two.data_ptr<float>();
    float* c = three.data_ptr<float>();
    const float* d = four.data_ptr<float>();
    stream = median_seconds(steps, [=] { add_to_three(a, b, c, d, count); });
  }
  std::printf(
      "{\"case\": \"%s\", \"numbers\": %lld, \"step\": %.9f, \"step_8bit\": %.9f, "
      "\"all\": %.9f, "
      "\"torch\": %.9f, \"stream\": %.9f}\n",
      name, static_cast<long long>(numbers), step, step_8bit, all, torchs, stream);
  std::fflush(stdout);
}

} // namespace hasten

int main(int argc, char** argv) {
  int steps = 15;
  bool smoke = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--smoke") == 0) {
      smoke = true;
    } else if (std::strcmp(argv[i], "--steps") == 0 && i + 1 < argc) {
      steps = std::max(1, std::atoi(argv[++i]));
    } else {
      std::fprintf(stderr, "usage: optimizer_step [--steps N] [--smoke]\n");
      return 2;
    }
  }
  at::set_num_threads(1);
  if (!smoke) {
    hasten::measure("bert_base", hasten::bert_base(), steps, 3);
  }
  hasten::measure("small_tensors", hasten::Shapes(2000, {256}), smoke ? 2 : 20 * steps,
                  smoke ? 2 : 20);
  return 0;
}
