// Iterations of Local SGD to a target: K workers, H steps between averages, as in
// Stich, "Local SGD Converges Fast and Communicates Little" (ICLR 2019), figure of
// section 5: logistic regression with L2 regularisation of 1/n on a sparse data
// set, each worker draws batches of b samples with replacement from all samples.
//   local_sgd_w8a DATA [--batch B] [--smoke]   K and H varied, simulated in turn
//   local_sgd_w8a DATA --check                 under `hasten launch --nproc K`
// DATA: libsvm text. Prints one JSON line a (K, H, target): the least iterations over
// the step sizes tried, constant ones and min(32, c n / (t + 1)); median of three
// seeds. --check runs K processes with Averager and compares with the simulation, bit for bit.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "hasten/accelerator/accelerator.h"
#include "hasten/local_sgd/averager.h"

namespace hasten {

// Rows of zeros and ones, labels of -1 and 1.
struct SparseRows {
  std::vector<int32_t> columns{};
  std::vector<size_t> begins{0}; // [row], and the end
  std::vector<double> labels{};
  int32_t width = 0;
  size_t count() const { return labels.size(); }
};

static SparseRows read_libsvm(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK(file, "cannot read ", path);
  SparseRows rows;
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    double label = 0;
    if (!(fields >> label)) {
      continue; // a blank line
    }
    for (std::string field; fields >> field;) {
      const int column = std::atoi(field.c_str()) - 1;
      const size_t colon = field.find(':');
      TORCH_CHECK(column >= 0 && colon != field.npos &&
                      std::strtod(field.c_str() + colon + 1, nullptr) == 1,
                  "not a row of ones: ", line);
      rows.columns.push_back(column);
      rows.width = std::max(rows.width, column + 1);
    }
    rows.begins.push_back(rows.columns.size());
    rows.labels.push_back(label > 0 ? 1 : -1);
  }
  return rows;
}

static double margin_of(const SparseRows& rows, size_t row, const std::vector<double>& x) {
  double sum = 0;
  for (size_t i = rows.begins[row]; i < rows.begins[row + 1]; ++i) {
    sum += x[static_cast<size_t>(rows.columns[i])];
  }
  return sum * rows.labels[row];
}

static double objective(const SparseRows& rows, const std::vector<double>& x) {
  double loss = 0, square = 0;
  for (size_t row = 0; row < rows.count(); ++row) {
    const double m = margin_of(rows, row, x);
    loss += m > 0 ? std::log1p(std::exp(-m)) : std::log1p(std::exp(m)) - m;
  }
  for (const double value : x) {
    square += value * value;
  }
  return (loss + square / 2) / static_cast<double>(rows.count());
}

// Constant where `decay` is false.
struct StepSize {
  double c = 1;
  bool decay = false;
  double at(int64_t t, size_t n) const {
    return decay ? std::min(32.0, c * static_cast<double>(n) / static_cast<double>(t + 1)) : c;
  }
};

// One worker's parameters and its own draws.
class Worker {
 public:
  Worker(const SparseRows& rows, int rank, int batch, int seed = 0)
      : rows_(rows),
        batch_(batch),
        draws_(static_cast<uint64_t>(rank + 1000 * seed) + 1),
        x_(static_cast<size_t>(rows.width)) {}

  void step(double size) {
    const double n = static_cast<double>(rows_.count());
    picked_.clear();
    for (int i = 0; i < batch_; ++i) {
      const size_t row = draws_() % rows_.count();
      const double slope = -rows_.labels[row] / (1 + std::exp(margin_of(rows_, row, x_))) / batch_;
      picked_.emplace_back(row, slope);
    }
    for (double& value : x_) {
      value *= 1 - size / n;
    }
    for (const auto& [row, slope] : picked_) {
      for (size_t i = rows_.begins[row]; i < rows_.begins[row + 1]; ++i) {
        x_[static_cast<size_t>(rows_.columns[i])] -= size * slope;
      }
    }
  }
  std::vector<double>& x() { return x_; }

 private:
  const SparseRows& rows_;
  int batch_;
  std::mt19937_64 draws_;
  std::vector<double> x_;
  std::vector<std::pair<size_t, double>> picked_{};
};

static void average(std::vector<Worker>& workers) {
  std::vector<double> sum = workers[0].x();
  for (size_t k = 1; k < workers.size(); ++k) {
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] += workers[k].x()[i];
    }
  }
  for (double& value : sum) {
    value /= static_cast<double>(workers.size());
  }
  for (Worker& worker : workers) {
    worker.x() = sum;
  }
}

struct Setting {
  int workers = 1;
  int64_t steps = 1; // H
  int batch = 16;
  int seed = 0;
};

// First iterations, multiples of H seen at every 4 %, at which the objective is at
// most each target; -1 where it is not within `most`. [target], falling
static std::vector<int64_t> iterations_to(const SparseRows& rows, const Setting& setting,
                                          const StepSize& size, const std::vector<double>& targets,
                                          int64_t most) {
  std::vector<Worker> workers;
  for (int k = 0; k < setting.workers; ++k) {
    workers.emplace_back(rows, k, setting.batch, setting.seed);
  }
  std::vector<int64_t> reached(targets.size(), -1);
  int64_t look = setting.steps;
  for (int64_t t = 0; t < most;) {
    for (int64_t end = t + setting.steps; t < end; ++t) {
      for (Worker& worker : workers) {
        worker.step(size.at(t, rows.count()));
      }
    }
    average(workers);
    if (t < look) {
      continue;
    }
    look = std::max(t + 1, t + t / 25);
    const double f = objective(rows, workers[0].x());
    for (size_t i = 0; i < targets.size(); ++i) {
      if (f <= targets[i] && reached[i] < 0) {
        reached[i] = t;
      }
    }
    if (reached.back() >= 0 || !(f < 4)) {
      break;
    }
  }
  return reached;
}

// The least over step sizes, for each target; -1: none of them got there.
static std::vector<int64_t> least_iterations(const SparseRows& rows, const Setting& setting,
                                             const std::vector<StepSize>& sizes,
                                             const std::vector<double>& targets, int64_t most) {
  std::vector<int64_t> best(targets.size(), -1);
  for (const StepSize& size : sizes) {
    const auto reached = iterations_to(rows, setting, size, targets, most);
    for (size_t i = 0; i < targets.size(); ++i) {
      if (reached[i] >= 0 && (best[i] < 0 || reached[i] < best[i])) {
        best[i] = reached[i];
      }
    }
    if (best.back() >= 0) {
      most = best.back(); // no more than the best so far
    }
  }
  return best;
}

constexpr double kLeast = 0.12618; // of w8a, by Newton's method

static void sweep(const SparseRows& rows, int batch, bool smoke) {
  const std::vector<double> gaps = {0.005, 0.002};
  std::vector<double> targets;
  for (const double gap : gaps) {
    targets.push_back(kLeast + gap);
  }
  std::vector<StepSize> sizes;
  for (double c = 0.125; c <= 16; c *= 2) {
    sizes.push_back({c, false});
  }
  for (double c = 1.0 / 512; c <= 0.5; c *= 2) {
    sizes.push_back({c, true});
  }
  const std::vector<int> all_workers =
      smoke ? std::vector<int>{1, 2} : std::vector<int>{1, 2, 4, 8, 16};
  for (const int workers : all_workers) {
    for (int64_t steps = 1; steps <= (smoke ? 2 : 64); steps *= 2) {
      std::vector<std::vector<int64_t>> of_seeds(targets.size()); // [target]
      for (int seed = 0; seed < (smoke ? 1 : 3); ++seed) {
        const auto best = least_iterations(rows, {workers, steps, batch, seed}, sizes, targets,
                                           smoke ? 2'000 : 200'000 / workers + 8 * steps);
        for (size_t i = 0; i < targets.size(); ++i) {
          of_seeds[i].push_back(best[i]);
        }
      }
      for (size_t i = 0; i < targets.size(); ++i) {
        std::sort(of_seeds[i].begin(), of_seeds[i].end());
        std::printf(
            "{\"workers\": %d, \"steps\": %lld, \"batch\": %d, \"gap\": %g, \"iterations\": %lld}\n",
            workers, static_cast<long long>(steps), batch, gaps[i],
            static_cast<long long>(of_seeds[i][of_seeds[i].size() / 2]));
      }
      std::fflush(stdout);
    }
  }
}

static int check(const SparseRows& rows, int batch) {
  Accelerator accelerator({.device = "cpu"});
  const int world = accelerator.num_processes();
  Worker mine(rows, accelerator.process_index(), batch);
  std::vector<Worker> all;
  for (int k = 0; k < world; ++k) {
    all.emplace_back(rows, k, batch);
  }
  const auto x =
      torch::from_blob(mine.x().data(), {static_cast<int64_t>(mine.x().size())}, torch::kDouble);
  Averager averager(accelerator.communicator(), {{"x", x}});
  constexpr int kRounds = 100, kSteps = 8;
  for (int round = 0; round < kRounds; ++round) {
    for (int step = 0; step < kSteps; ++step) {
      mine.step(1);
      for (Worker& worker : all) {
        worker.step(1);
      }
    }
    averager.average();
    average(all);
  }
  const bool same = mine.x() == all[0].x();
  const bool everywhere =
      accelerator.reduce(torch::tensor({same ? 1 : 0}), ReduceOp::MIN).item<int>() == 1;
  if (accelerator.is_main_process()) {
    std::printf("{\"ranks\": %d, \"rounds\": %d, \"objective\": %.12g, \"equal_bits\": %s}\n",
                world, kRounds, objective(rows, mine.x()), everywhere ? "true" : "false");
  }
  accelerator.end_training();
  return everywhere ? 0 : 1;
}

} // namespace hasten

int main(int argc, char** argv) {
  int batch = 16;
  bool smoke = false, real = false;
  std::string path;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--batch") == 0 && i + 1 < argc) {
      batch = std::max(1, std::atoi(argv[++i]));
    } else if (std::strcmp(argv[i], "--smoke") == 0) {
      smoke = true;
    } else if (std::strcmp(argv[i], "--check") == 0) {
      real = true;
    } else {
      path = argv[i];
    }
  }
  if (path.empty()) {
    std::fprintf(stderr, "usage: local_sgd_w8a DATA [--batch B] [--smoke | --check]\n");
    return 2;
  }
  try {
    const auto rows = hasten::read_libsvm(path);
    if (real) {
      return hasten::check(rows, batch);
    }
    hasten::sweep(rows, batch, smoke);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
