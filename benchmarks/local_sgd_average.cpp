// One average of a model's parameters over the ranks, nothing else: one thread a
// rank. Started by `hasten launch`. Peer: peers/local_sgd_average.py.
//   local_sgd_average bert-base|eleven-million|small-tensors [--rounds N]
//                     [--in-place]
// Rank 0 prints one JSON line: median seconds of an average as the slowest rank
// sees it, the same of one copy of as many bytes, bytes of the parameters.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "hasten/accelerator/accelerator.h"
#include "hasten/local_sgd/averager.h"
#include "median.h"

namespace hasten {

using Shapes = std::vector<std::vector<int64_t>>;

// Query, key, value, output, two norms and the two layers between them.
static void add_encoder_layers(Shapes& shapes, int layers, int64_t h) {
  for (int layer = 0; layer < layers; ++layer) {
    for (int i = 0; i < 4; ++i) {
      shapes.insert(shapes.end(), {{h, h}, {h}});
    }
    shapes.insert(shapes.end(), {{4 * h, h}, {4 * h}, {h, 4 * h}, {h}});
    shapes.insert(shapes.end(), {{h}, {h}, {h}, {h}});
  }
}

static Shapes shapes_of(const std::string& name) {
  Shapes shapes;
  if (name == "bert-base") { // 199 tensors, 109.48 M
    shapes = {{30522, 768}, {512, 768}, {2, 768}, {768}, {768}};
    add_encoder_layers(shapes, 12, 768);
    shapes.insert(shapes.end(), {{768, 768}, {768}});
  } else if (name == "eleven-million") { // 193 tensors
    shapes = {{5948, 256}};
    add_encoder_layers(shapes, 12, 256);
  } else if (name == "small-tensors") {
    shapes.assign(2000, {1024});
  }
  return shapes;
}

// Median over rounds of what the slowest rank takes.
template <typename Action>
double seconds_of(Accelerator& accelerator, int rounds, const Action& action) {
  std::vector<double> seconds;
  for (int round = -2; round < rounds; ++round) {
    accelerator.wait_for_everyone();
    const auto start = std::chrono::steady_clock::now();
    action();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    const double slowest =
        accelerator.reduce(torch::tensor({time.count()}, torch::kDouble), ReduceOp::MAX)
            .item<double>();
    if (round >= 0) {
      seconds.push_back(slowest);
    }
  }
  return median_of(seconds);
}

static void run(const Shapes& shapes, int rounds, bool in_place) {
  Accelerator accelerator({.device = "cpu"});
  at::set_num_threads(1);
  Averager::NamedTensorList tensors;
  int64_t bytes = 0;
  for (const auto& shape : shapes) {
    tensors.emplace_back("t" + std::to_string(tensors.size()),
                         torch::full(shape, accelerator.process_index() + 1.0));
    bytes += static_cast<int64_t>(tensors.back().second.nbytes());
  }
  const auto source = torch::ones({bytes / 4});
  auto target = torch::zeros_like(source);
  const double copy = seconds_of(accelerator, rounds, [&] { target.copy_(source); });
  Averager averager(accelerator.communicator(), tensors, {.transactional = !in_place});
  const double average = seconds_of(accelerator, rounds, [&] { averager.average(); });
  const int world = accelerator.num_processes();
  for (const auto& entry : tensors) {
    const double sample = entry.second.view({-1})[-1].item<double>();
    TORCH_CHECK(sample == (world + 1) / 2.0, "not the mean: ", sample);
  }
  if (accelerator.is_main_process()) {
    std::printf("{\"seconds\": %.7f, \"copy_seconds\": %.7f, \"bytes\": %lld}\n", average, copy,
                static_cast<long long>(bytes));
  }
  accelerator.end_training();
}

} // namespace hasten

int main(int argc, char** argv) {
  int rounds = 10;
  bool in_place = false;
  std::string name;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--rounds") == 0 && i + 1 < argc) {
      rounds = std::max(1, std::atoi(argv[++i]));
    } else if (std::strcmp(argv[i], "--in-place") == 0) {
      in_place = true;
    } else {
      name = argv[i];
    }
  }
  const auto shapes = hasten::shapes_of(name);
  if (shapes.empty()) {
    std::fprintf(stderr,
                 "usage: local_sgd_average bert-base|eleven-million|small-tensors "
                 "[--rounds N] [--in-place]\n");
    return 2;
  }
  try {
    hasten::run(shapes, rounds, in_place);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
