// Ranks that fail or die inside a scope of LocalSGD.
#include <gtest/gtest.h>
#include <sched.h>
#include <torch/torch.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/local_sgd/local_sgd.h"
#include "support/spawn.h"

namespace hasten {

using testing_support::FaultKind;
using testing_support::FaultRank;
using testing_support::spawn;

// The fault is in the third step. Rounds are after the second step, the fourth, ….
HASTEN_RANK_FUNCTION(TrainsByLocalSGD) {
  AcceleratorOptions options;
  options.timeout = std::chrono::seconds(20);
  Accelerator accelerator(options,
                          Communicator::create(rank.world(), {.timeout = options.timeout}));
  torch::nn::Linear net(3, 1);
  torch::optim::SGD inner(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, inner);
  LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 2});
  for (int step = 0; step < 8; ++step) {
    if (step == 2) {
      rank.fault_here();
    }
    accelerator.backward(model->forward(torch::ones({2, 3})).mean());
    optimizer.step();
    optimizer.zero_grad();
    local_sgd.step();
  }
  local_sgd.finish();
  accelerator.communicator()->close();
}

// Two hosts with two ranks each, if this process may set its host name.
HASTEN_RANK_FUNCTION(AveragesInHosts) {
  const int own = rank.world().rank;
  const std::string name = "host" + std::to_string(own / 2);
  const bool named = ::unshare(CLONE_NEWUTS) == 0 && ::sethostname(name.data(), name.size()) == 0;
  auto world = Communicator::create(rank.world(), {.timeout = std::chrono::seconds(20)});
  for (const auto& other : world->all_gather_object(named, "may have names")) {
    if (!other.get<bool>()) {
      rank.report("unnamed", true);
      return;
    }
  }
  Accelerator accelerator(AcceleratorOptions{}, world);
  torch::nn::Linear net(3, 1);
  torch::optim::SGD inner(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, inner);
  LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 4, .inner_steps = 2});
  for (int step = 0; step < 4; ++step) {
    accelerator.backward((own + 1) * model->forward(torch::ones({2, 3})).sum());
    optimizer.step();
    optimizer.zero_grad();
    local_sgd.step();
    const auto all = accelerator.gather(net->bias.detach()); // [4]
    const auto equal = [&](int a, int b) { return all[a].item<float>() == all[b].item<float>(); };
    EXPECT_EQ(equal(0, 1), step % 2 == 1) << step;
    EXPECT_EQ(equal(2, 3), step % 2 == 1) << step;
    EXPECT_EQ(equal(1, 2), step == 3) << step;
  }
  local_sgd.finish();
  world->close();
}

TEST(LocalSGDFault, RanksOfOneHostNameAverageMoreOften) {
  const auto ranks = spawn(4, "AveragesInHosts");
  if (ranks[0].values.value("unnamed", false)) {
    GTEST_SKIP() << "a process may not have a host name of its own here";
  }
  for (const auto& report : ranks) {
    EXPECT_EQ(report.error, "");
  }
}

static void expect_error_naming(FaultKind kind, const std::string& text) {
  const auto ranks = spawn(3, "TrainsByLocalSGD", {.kind = kind, .rank = 1});
  for (const size_t survivor : {size_t{0}, size_t{2}}) {
    EXPECT_FALSE(ranks[survivor].timed_out);
    EXPECT_EQ(ranks[survivor].error_type, "hasten::CommunicationError");
    EXPECT_NE(ranks[survivor].error.find(text), std::string::npos) << ranks[survivor].error;
    EXPECT_LT(ranks[survivor].seconds_after_fault, 5);
  }
}

TEST(LocalSGDFault, AnExceptionInsideEndsThePeersWithAnErrorThatNamesTheRank) {
  expect_error_naming(FaultKind::fail, "rank 1 failed: an exception left the scope of LocalSGD");
}

TEST(LocalSGDFault, AKilledRankIsNamed) { expect_error_naming(FaultKind::kill, "rank 1 died"); }

} // namespace hasten
