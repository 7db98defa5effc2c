// Ranks of Local SGD that die in a chosen phase of a chosen synchronisation, and the algorithm in
// torch's operators with the remaining ranks.
#pragma once

#include <csignal>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "hasten/base/error.h"
#include "local_sgd/local_sgd_rig.h"
#include "support/spawn.h"
#include "support/watched_communicator.h"

namespace hasten::accelerator_test {

enum class Phase {
  before_snapshot, // has not announced the round
  mid_reduce, // has sent its first slice
  before_vote, // has the sum
  after_vote, // the round is complete; another rank has not heard of it
  between_rounds, // one step after the round
  after_end, // the data's end is complete; another rank has not heard of it
  at_recovery, // while the others recover from another rank's death
};

struct Death {
  int rank = 0;
  int round = 1;
  Phase phase = Phase::before_snapshot;
};

struct Scenario {
  int world = 3;
  std::vector<Death> deaths{}; // in the order of the deaths
  LocalSGDOptions options{};
  int64_t steps = 12;
  /// In Phase::after_vote: the ranks that do not learn that the synchronisation is complete.
  int deaf = 2;
};

/// A communicator through which one rank dies, or misses a message, as its scenario says.
inline std::shared_ptr<Communicator> doomed(std::shared_ptr<Communicator> inner,
                                            const Scenario& scenario, int own) {
  auto watched = std::make_shared<testing_support::WatchedCommunicator>(inner);
  struct Counts {
    int announced = 0, voted = 0, sliced = 0, shrunk = 0, ended = 0;
  };
  const auto counts = std::make_shared<Counts>();
  const auto dies = [own, deaths = scenario.deaths](Phase phase, int round) {
    for (const Death& death : deaths) {
      if (death.rank == own && death.phase == phase && death.round == round) {
        std::raise(SIGKILL);
      }
    }
  };
  watched->before = [=](std::string_view name) {
    if (name == "window control") {
      dies(Phase::before_snapshot, ++counts->announced);
    } else if (name == "vote on an average") {
      dies(Phase::before_vote, ++counts->voted);
    }
  };
  watched->after = [=](std::string_view name, Work& handle) {
    if (name == "average slice 0") {
      dies(Phase::mid_reduce, ++counts->sliced);
    }
    counts->ended += name == "steps of the ranks";
    for (const Death& death : scenario.deaths) {
      const bool vote = death.phase == Phase::after_vote && name == "vote on an average" &&
                        death.round == counts->voted;
      const bool end = death.phase == Phase::after_end && name == "steps of the ranks" &&
                       death.round == counts->ended;
      if (vote || end) {
        handle.wait();
        dies(death.phase, death.round);
        if (own == scenario.deaf) {
          inner->all_gather_object(0, "never received"); // throws
        }
      }
    }
  };
  watched->before_shrink = [=] { dies(Phase::at_recovery, ++counts->shrunk); };
  return watched;
}

inline const Pair& batch_of(const std::vector<Pair>& batches, int world, int64_t step, int rank) {
  return batches[static_cast<size_t>((step * world + rank) % std::ssize(batches))];
}

struct SurvivorsSimulation {
  std::vector<Net> nets{}; // [rank], only of living ranks
  std::vector<int> living{};
};

/// Without delay and fragments: H steps of each rank, then the mean of the living ranks. A rank
/// that dies after the vote of a synchronisation is in its mean. With an outer step: SGD with
/// momentum on anchor - mean.
inline SurvivorsSimulation simulate_survivors(const Scenario& how, const std::vector<Pair>& batches,
                                              double rate, double outer_lr = 0,
                                              double outer_momentum = 0) {
  SurvivorsSimulation all;
  std::vector<std::unique_ptr<torch::optim::SGD>> optimizers;
  for (int rank = 0; rank < how.world; ++rank) {
    all.nets.push_back(net_of_seed(1));
    all.living.push_back(rank);
    optimizers.push_back(std::make_unique<torch::optim::SGD>(
        all.nets.back()->parameters(), torch::optim::SGDOptions(rate).momentum(0.9)));
  }
  std::vector<Tensor> anchor, velocity;
  for (const auto& parameter : net_of_seed(1)->parameters()) {
    anchor.push_back(parameter.detach().clone());
    velocity.push_back(torch::zeros_like(parameter));
  }
  const auto bury = [&](int round, std::set<Phase> phases) {
    for (const Death& death : how.deaths) {
      if (phases.count(death.phase) > 0 && death.round == round) {
        std::erase(all.living, death.rank);
      }
    }
  };
  const auto average = [&] {
    torch::NoGradGuard no_grad;
    for (size_t p = 0; p < anchor.size(); ++p) {
      Tensor mean = torch::zeros_like(anchor[p]);
      for (const int rank : all.living) {
        mean += all.nets[static_cast<size_t>(rank)]->parameters()[p];
      }
      mean /= static_cast<double>(all.living.size());
      if (outer_lr > 0) {
        velocity[p] = outer_momentum * velocity[p] + (anchor[p] - mean);
        mean = anchor[p] - outer_lr * velocity[p];
      }
      anchor[p].copy_(mean);
      for (const int rank : all.living) {
        all.nets[static_cast<size_t>(rank)]->parameters()[p].copy_(mean);
      }
    }
  };
  int round = 0;
  bool stepped = false;
  for (int64_t step = 0; step < how.steps; ++step) {
    for (const int rank : all.living) {
      const auto r = static_cast<size_t>(rank);
      optimizers[r]->zero_grad();
      mean_loss(all.nets[r], batch_of(batches, how.world, step, rank)).backward();
      optimizers[r]->step();
    }
    stepped = true;
    if ((step + 1) % how.options.local_sgd_steps == 0) {
      ++round;
      bury(round,
           {Phase::before_snapshot, Phase::mid_reduce, Phase::before_vote, Phase::at_recovery});
      average();
      bury(round, {Phase::after_vote, Phase::between_rounds});
      stepped = false;
    }
  }
  if (stepped) {
    average();
  }
  return all;
}

/// A rank's loop in the scenario. It throws the exceptions of the scope.
struct SurvivorsRun {
  explicit SurvivorsRun(testing_support::FaultRank& fault_rank, const Scenario& scenario)
      : rank(fault_rank.world().rank),
        world(Communicator::create(fault_rank.world(), {.timeout = std::chrono::seconds(20)})),
        how(scenario),
        batches(make_batches(24)) {}

  void train(double rate) {
    AcceleratorOptions options;
    options.seed.reset();
    accelerator.emplace(options, doomed(world, how, rank));
    torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(rate).momentum(0.9));
    auto [model, optimizer] = accelerator->prepare(net, inner);
    LocalSGD local_sgd(*accelerator, model, how.options);
    for (int64_t step = 0; step < how.steps; ++step) {
      for (const Death& death : how.deaths) {
        if (death.rank == rank && death.phase == Phase::between_rounds &&
            step == death.round * how.options.local_sgd_steps + 1) {
          std::raise(SIGKILL);
        }
      }
      accelerator->backward(mean_loss(model, batch_of(batches, how.world, step, rank)));
      optimizer.step();
      optimizer.zero_grad();
      own = copies();
      local_sgd.step();
      if (step + 1 == 2 * how.options.local_sgd_steps) {
        second = copies();
      }
    }
    if (!save_to.empty()) {
      save_and_load();
    }
    local_sgd.finish();
    report = local_sgd.report();
  }

  /// A state is one of the remaining ranks.
  void save_and_load() {
    accelerator->save_state(save_to);
    const std::vector<Tensor> before = copies();
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) {
        parameter.zero_();
      }
    }
    accelerator->load_state(save_to);
    const std::vector<Tensor> after = copies();
    for (size_t p = 0; p < before.size(); ++p) {
      EXPECT_TRUE(torch::equal(before[p], after[p]));
    }
  }

  std::vector<Tensor> copies() const {
    std::vector<Tensor> all;
    for (const auto& parameter : net->parameters()) {
      all.push_back(parameter.detach().clone());
    }
    return all;
  }

  int rank;
  std::shared_ptr<Communicator> world;
  Scenario how;
  std::vector<Pair> batches;
  Net net = net_of_seed(1);
  std::string save_to{}; // a folder: before finish()
  std::optional<Accelerator> accelerator{};
  std::vector<Tensor> own{}; // before the last step()
  std::vector<Tensor> second{}; // after the second round, if the rank reached it
  LocalSGDReport report{};
};

} // namespace hasten::accelerator_test
