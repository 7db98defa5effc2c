// Local SGD by torch's operators only, with all replicas in one process. The ranks of a scope must
// equal these replicas.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "accelerator/accelerator_rig.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/local_sgd/local_sgd.h"
#include "support/communicator.h"

namespace hasten::accelerator_test {

inline Accelerator local_accelerator(int64_t accumulation = 1) {
  AcceleratorOptions options{.gradient_accumulation_steps = accumulation};
  options.seed.reset();
  return Accelerator(options, testing_support::fresh_communicator());
}

template <typename Optimizer>
struct Replica {
  template <typename Options>
  explicit Replica(const Options& options)
      : optimizer(net->parameters(), options), decay(optimizer) {}
  Net net = net_of_seed(1);
  Optimizer optimizer;
  Decay decay;
  double weight = 0; // since the last average
  std::vector<Tensor> snapshot{};
};

template <typename Optimizer>
using Replicas = std::vector<std::unique_ptr<Replica<Optimizer>>>;

struct Simulation {
  int64_t accumulation = 1;
  int epochs = 1;
  std::function<int64_t(int64_t)> h{}; // length of the round that begins after a step
  int64_t start = 0; // plain steps (joined batch) before the first round
  int64_t delay = 0;
  bool by_rows = false;
  std::optional<double> alpha{}; // of a delayed correction
};

// [parameter]; empty if no rank has stepped.
template <typename Optimizer>
std::vector<Tensor> take_mean(Replicas<Optimizer>& all, bool by_rows) {
  std::vector<Tensor> means;
  double total = 0;
  for (const auto& replica : all) {
    replica->weight = by_rows ? replica->weight : static_cast<double>(replica->weight > 0);
    total += replica->weight;
  }
  for (size_t p = 0; total > 0 && p < all[0]->net->parameters().size(); ++p) {
    Tensor sum = torch::zeros_like(all[0]->net->parameters()[p]);
    for (const auto& replica : all) {
      sum += replica->weight * replica->net->parameters()[p];
    }
    means.push_back(sum / total);
  }
  for (const auto& replica : all) {
    replica->weight = 0;
  }
  return means;
}

template <typename Optimizer>
void average_replicas(Replicas<Optimizer>& all, bool by_rows) {
  torch::NoGradGuard no_grad;
  const auto means = take_mean(all, by_rows);
  for (const auto& replica : all) {
    for (size_t p = 0; p < means.size(); ++p) {
      replica->net->parameters()[p].copy_(means[p]);
    }
  }
}

template <typename Optimizer>
void mix_replicas(Replicas<Optimizer>& all, const std::vector<Tensor>& means, double alpha) {
  torch::NoGradGuard no_grad;
  for (const auto& replica : all) {
    for (size_t p = 0; p < means.size(); ++p) {
      Tensor parameter = replica->net->parameters()[p];
      parameter.mul_(alpha).add_(means[p], 1 - alpha);
    }
  }
}

// The joined rows of window w on these ranks. Undefined if they have none.
inline Pair rows_of_window(const std::vector<Pair>& batches, int world, int64_t k, int64_t w,
                           int first, int last) {
  std::vector<Tensor> x, y;
  for (int rank = first; rank < last; ++rank) {
    for (int64_t turn = w * k; turn < (w + 1) * k; ++turn) {
      const auto b = static_cast<size_t>(turn * world + rank);
      if (b < batches.size()) {
        x.push_back(batches[b].first);
        y.push_back(batches[b].second);
      }
    }
  }
  return x.empty() ? Pair{} : Pair{torch::cat(x), torch::cat(y)};
}

// Distributes the batches round-robin and clips each window's gradients at 0.2. Averages after every
// H steps of the rank with the most steps, and at the end. Returns [rank].
template <typename Optimizer, typename Options>
Replicas<Optimizer> simulate_local_sgd(const std::vector<Pair>& batches, const Options& options,
                                       int world, const Simulation& how) {
  Replicas<Optimizer> all;
  for (int rank = 0; rank < world; ++rank) {
    all.push_back(std::make_unique<Replica<Optimizer>>(options));
  }
  int64_t clock = 0;
  int64_t due = how.start + how.h(how.start);
  int64_t correct_at = -1;
  std::vector<Tensor> means;
  for (int epoch = 0; epoch < how.epochs; ++epoch) {
    for (int64_t w = 0; w * how.accumulation * world < std::ssize(batches); ++w) {
      const bool joined = clock < how.start;
      for (int rank = 0; rank < world; ++rank) {
        const Pair rows = rows_of_window(batches, world, how.accumulation, w, joined ? 0 : rank,
                                         joined ? world : rank + 1);
        if (!rows.first.defined()) {
          continue;
        }
        auto& mine = *all[static_cast<size_t>(rank)];
        mine.optimizer.zero_grad();
        mean_loss(mine.net, rows).backward();
        torch::nn::utils::clip_grad_norm_(mine.net->parameters(), 0.2);
        mine.optimizer.step();
        mine.decay.step();
        if (!joined) {
          mine.weight += static_cast<double>(rows.first.size(0));
        }
      }
      torch::NoGradGuard no_grad;
      ++clock;
      if (clock == correct_at) {
        for (const auto& replica : all) {
          for (size_t p = 0; p < means.size(); ++p) {
            Tensor parameter = replica->net->parameters()[p];
            parameter.copy_(how.alpha ? *how.alpha * parameter + (1 - *how.alpha) * means[p]
                                      : parameter + means[p] - replica->snapshot[p]);
          }
        }
      }
      if (clock < due) {
        continue;
      }
      due += how.h(due);
      if (how.delay == 0) {
        average_replicas(all, how.by_rows);
        continue;
      }
      for (const auto& replica : all) {
        replica->snapshot.clear();
        for (const auto& parameter : replica->net->parameters()) {
          replica->snapshot.push_back(parameter.detach().clone());
        }
      }
      means = take_mean(all, how.by_rows);
      correct_at = clock + how.delay;
    }
    for (const auto& replica : all) {
      while (replica->decay.ticks < all[0]->decay.ticks) {
        replica->decay.step(); // all schedules advance
      }
    }
  }
  if (correct_at > clock && how.alpha) { // otherwise the average does not change
    mix_replicas(all, means, *how.alpha);
  }
  if (correct_at >= clock) { // a correction is pending: correct, then average
    for (const auto& replica : all) {
      replica->weight = std::max(replica->weight, 1.0);
    }
  }
  average_replicas(all, how.by_rows);
  return all;
}

// The same training in a scope of LocalSGD, with the loop that its header shows.
template <typename Optimizer, typename Options>
Net train_local_sgd(Accelerator& accelerator, const std::vector<Pair>& batches,
                    const Options& options, int epochs, LocalSGDOptions local) {
  Net net = net_of_seed(static_cast<uint64_t>(accelerator.process_index()) + 1);
  Optimizer inner(net->parameters(), options);
  Decay decay(inner);
  auto range = batches;
  auto [scheduler, model, loader, optimizer] = accelerator.prepare(decay, net, range, inner);
  LocalSGD local_sgd(accelerator, model, std::move(local));
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, batch));
      accelerator.clip_grad_norm_(model, 0.2);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
      local_sgd.step();
    }
  }
  local_sgd.finish();
  return net;
}

// Expects that every rank has rank 0's parameters.
inline void expect_equal_on_ranks(Accelerator& accelerator, Net& net) {
  for (const auto& parameter : net->parameters()) {
    Tensor first = parameter.detach().clone();
    accelerator.communicator()->broadcast(first, 0, "rank 0's parameters");
    EXPECT_TRUE(torch::equal(first, parameter));
  }
}

} // namespace hasten::accelerator_test
