// A rank dies in each phase of a round. The others keep their own parameters or have the mean, the
// same choice in all tensors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/local_sgd/averager.h"
#include "support/spawn.h"
#include "support/watched_communicator.h"

namespace hasten {

using testing_support::FaultKind;
using testing_support::FaultRank;
using testing_support::spawn;
using testing_support::WatchedCommunicator;

/// Plants the fault directly before the operation `phase`, or, if `phase` is "after NAME", directly
/// after the start of the operation NAME.
static std::shared_ptr<WatchedCommunicator> faulty_communicator(std::shared_ptr<Communicator> inner,
                                                                FaultRank& rank,
                                                                const std::string& phase) {
  auto faulty = std::make_shared<WatchedCommunicator>(std::move(inner));
  faulty->before = [&rank, phase](std::string_view name) {
    if (name == phase) {
      rank.fault_here();
    }
  };
  faulty->after = [&rank, phase](std::string_view name, Work&) {
    if (phase.starts_with("after ") && name == phase.substr(6)) {
      rank.fault_here();
    }
  };
  return faulty;
}

/// Rank r's tensors hold r + 1. Their mean over 3 ranks is 2.
static void average_in_phase(FaultRank& rank, const std::string& phase) {
  auto world = Communicator::create(rank.world(), {.timeout = std::chrono::milliseconds(20'000)});
  world->barrier("meet");
  auto faulty = faulty_communicator(world, rank, phase);
  Averager::NamedTensorList list;
  for (int i = 0; i < 6; ++i) {
    list.emplace_back("t" + std::to_string(i),
                      torch::full({300'000}, world->rank() + 1, torch::kFloat));
  }
  Averager averager(faulty, list, {.slice_mb = 1});
  try {
    averager.average();
    averager.report();
  } catch (const CommunicationError& error) {
    rank.report("error", error.what());
  }
  std::set<float> values;
  for (const auto& [name, tensor] : list) {
    values.insert(tensor.min().item<float>());
    values.insert(tensor.max().item<float>());
  }
  rank.report("values", std::vector<float>(values.begin(), values.end()));
}

HASTEN_RANK_FUNCTION(AveragesDeadAtFirstSlice) { average_in_phase(rank, "average slice 0"); }
HASTEN_RANK_FUNCTION(AveragesDeadAfterFirstSlice) {
  average_in_phase(rank, "after average slice 0");
}
HASTEN_RANK_FUNCTION(AveragesDeadAtMiddleSlice) { average_in_phase(rank, "average slice 4"); }
HASTEN_RANK_FUNCTION(AveragesDeadAtVote) { average_in_phase(rank, "vote on an average"); }
HASTEN_RANK_FUNCTION(AveragesDeadAfterVote) { average_in_phase(rank, "after vote on an average"); }
HASTEN_RANK_FUNCTION(AveragesDeadAtSpread) { average_in_phase(rank, "spread of an average"); }

/// Checks the survivors' values: their own, or the mean if it is `allowed`.
static void expect_whole(const std::string& function, bool own, bool mean) {
  const auto ranks = spawn(3, function, {.kind = FaultKind::kill, .rank = 1});
  for (const int survivor : {0, 2}) {
    const auto& report = ranks[static_cast<size_t>(survivor)];
    EXPECT_FALSE(report.timed_out) << function;
    const auto values = report.values.at("values");
    ASSERT_EQ(values.size(), 1) << function << ": a mixture " << values;
    const float value = values[0].get<float>();
    EXPECT_TRUE((own && value == static_cast<float>(survivor + 1)) || (mean && value == 2))
        << function << ", rank " << survivor << " has " << value;
    const std::string error = report.values.value("error", "");
    EXPECT_NE(error.find("rank 1 died"), std::string::npos) << function << ": " << error;
  }
}

TEST(AveragerFault, BeforeTheVoteEverySurvivorKeepsItsOwnParameters) {
  expect_whole("AveragesDeadAtFirstSlice", true, false);
  expect_whole("AveragesDeadAfterFirstSlice", true, false);
  expect_whole("AveragesDeadAtMiddleSlice", true, false);
  expect_whole("AveragesDeadAtVote", true, false);
}

TEST(AveragerFault, InTheVoteASurvivorHasItsOwnOrTheMeanNeverAMixture) {
  expect_whole("AveragesDeadAfterVote", true, true);
}

TEST(AveragerFault, BehindTheVoteEverySurvivorHasTheMean) {
  expect_whole("AveragesDeadAtSpread", false, true);
}

/// Rank r's tensors hold (r + 1)^2: 1, 4, 9. The second average is over the remaining ranks, by a
/// driver with an outer step that takes half of the change.
static void recover_in_phase(FaultRank& rank, const std::string& phase) {
  auto world = Communicator::create(rank.world(), {.timeout = std::chrono::milliseconds(20'000)});
  auto faulty = faulty_communicator(world, rank, phase);
  const float own = static_cast<float>((world->rank() + 1) * (world->rank() + 1));
  Averager::NamedTensorList list;
  for (int i = 0; i < 3; ++i) {
    list.emplace_back("t" + std::to_string(i), torch::zeros({100'000}));
  }
  Averager averager(faulty, list,
                    {.slice_mb = 0.25,
                     .outer = std::make_shared<DiLoCo>(
                         DiLoCoOptions{.lr = 0.5, .momentum = 0.9, .nesterov = false}),
                     .sync = SyncStrategy::driver}); // its anchor: 0
  for (auto& [name, tensor] : list) {
    tensor.fill_(own);
  }
  RoundOutcome outcome = RoundOutcome::none;
  try {
    averager.average();
    averager.report();
  } catch (const CommunicationError&) {
    const auto left = faulty->shrink();
    EXPECT_EQ(left->ranks, (std::vector<int>{0, 2}));
    EXPECT_NE(left->cause.find("rank 1 died"), std::string::npos);
    outcome = averager.recover();
  }
  rank.report("outcome", static_cast<int>(outcome));
  rank.report("after the first", list[0].second[0].item<float>());
  averager.average();
  for (const auto& [name, tensor] : list) {
    EXPECT_EQ(tensor.min().item<float>(), tensor.max().item<float>());
  }
  rank.report("after the second", list[0].second[0].item<float>());
  world->close();
}

HASTEN_RANK_FUNCTION(RecoversFromTheFirstVote) { recover_in_phase(rank, "vote on an average"); }
HASTEN_RANK_FUNCTION(RecoversFromTheDriversSending) {
  recover_in_phase(rank, "parameters of the driver");
}

// The mean of 1 and 9, with half of the change from 0. A second round starts from there.
TEST(AveragerFault, ADroppedDriversRoundIsMadeAgainFromTheOldAnchor) {
  for (const char* phase : {"RecoversFromTheFirstVote", "RecoversFromTheDriversSending"}) {
    const auto ranks = spawn(3, phase, {.kind = FaultKind::kill, .rank = 1});
    for (const size_t survivor : {size_t{0}, size_t{2}}) {
      const auto& values = ranks[survivor].values;
      EXPECT_EQ(values.at("outcome"), static_cast<int>(RoundOutcome::dropped));
      EXPECT_EQ(values.at("after the first"), survivor == 0 ? 1 : 9) << phase;
      EXPECT_EQ(values.at("after the second"), 2.5) << phase;
    }
  }
}

} // namespace hasten
