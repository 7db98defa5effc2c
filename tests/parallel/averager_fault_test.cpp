// A rank that dies, in every phase of a round: the others are left with their own
// parameters or with the mean, in all tensors one or the other.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/parallel/averager.h"
#include "support/spawn.h"

namespace hasten {

using testing_support::FaultKind;
using testing_support::FaultRank;
using testing_support::spawn;

/// Runs the planted fault before, or right after, an operation has been started.
class PhaseFault final : public Communicator {
 public:
  PhaseFault(
      std::shared_ptr<Communicator> inner, FaultRank& rank, std::string phase)
      : inner_(std::move(inner)),
        rank_(rank),
        after_(phase.starts_with("after ")),
        phase_(after_ ? phase.substr(6) : std::move(phase)) {}
  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  const CommunicatorOptions& options() const override {
    return inner_->options();
  }
  CommHandle all_reduce_async(
      at::Tensor tensor, ReduceOp op, std::string_view name) override {
    if (name == phase_ && !after_) {
      rank_.fault_here();
    }
    CommHandle handle = inner_->all_reduce_async(std::move(tensor), op, name);
    if (name == phase_ && after_) {
      rank_.fault_here();
    }
    return handle;
  }
  CommHandle broadcast_async(at::Tensor t, int s, std::string_view n) override {
    return inner_->broadcast_async(std::move(t), s, n);
  }
  CommHandle all_gather_async(
      at::Tensor o, at::Tensor i, std::string_view n) override {
    return inner_->all_gather_async(std::move(o), std::move(i), n);
  }
  CommHandle gather_async(
      at::Tensor o, at::Tensor i, int root, std::string_view n) override {
    return inner_->gather_async(std::move(o), std::move(i), root, n);
  }
  CommHandle all_to_all_async(
      at::Tensor o, at::Tensor i, std::string_view n) override {
    return inner_->all_to_all_async(std::move(o), std::move(i), n);
  }
  at::Tensor all_gather_rows(
      const at::Tensor& rows, std::string_view name) override {
    return inner_->all_gather_rows(rows, name);
  }
  std::vector<nlohmann::json> gather_json(
      const nlohmann::json& value, std::string_view name) override {
    return inner_->gather_json(value, name);
  }
  nlohmann::json broadcast_json(
      const nlohmann::json& value, std::string_view name) override {
    return inner_->broadcast_json(value, name);
  }
  void barrier(std::string_view name) override { inner_->barrier(name); }
  void abandon(std::string_view reason) noexcept override {
    inner_->abandon(reason);
  }
  void close() noexcept override { inner_->close(); }
  std::shared_ptr<Communicator> duplicate(
      const CommunicatorOptions& options) override {
    return inner_->duplicate(options);
  }
  std::shared_ptr<Communicator> new_group(
      const std::vector<int>& ranks,
      const CommunicatorOptions& options) override {
    return inner_->new_group(ranks, options);
  }

 private:
  std::shared_ptr<Communicator> inner_;
  FaultRank& rank_;
  bool after_;
  std::string phase_;
};

/// Rank r's tensors hold r + 1, their mean over 3 ranks is 2.
static void average_in_phase(FaultRank& rank, const std::string& phase) {
  auto world = Communicator::create(
      rank.world(), {.timeout = std::chrono::milliseconds(20'000)});
  world->barrier("meet");
  auto faulty = std::make_shared<PhaseFault>(world, rank, phase);
  Averager::NamedTensorList list;
  for (int i = 0; i < 6; ++i) {
    list.emplace_back(
        "t" + std::to_string(i),
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

HASTEN_RANK_FUNCTION(AveragesDeadAtFirstSlice) {
  average_in_phase(rank, "average slice 0");
}
HASTEN_RANK_FUNCTION(AveragesDeadAfterFirstSlice) {
  average_in_phase(rank, "after average slice 0");
}
HASTEN_RANK_FUNCTION(AveragesDeadAtMiddleSlice) {
  average_in_phase(rank, "average slice 4");
}
HASTEN_RANK_FUNCTION(AveragesDeadAtVote) {
  average_in_phase(rank, "vote on an average");
}
HASTEN_RANK_FUNCTION(AveragesDeadAfterVote) {
  average_in_phase(rank, "after vote on an average");
}
HASTEN_RANK_FUNCTION(AveragesDeadAtSpread) {
  average_in_phase(rank, "spread of an average");
}

/// What the survivors hold: their own, or the mean where that is `allowed` too.
static void expect_whole(const std::string& function, bool own, bool mean) {
  const auto ranks = spawn(3, function, {.kind = FaultKind::kill, .rank = 1});
  for (const int survivor : {0, 2}) {
    const auto& report = ranks[static_cast<size_t>(survivor)];
    EXPECT_FALSE(report.timed_out) << function;
    const auto values = report.values.at("values");
    ASSERT_EQ(values.size(), 1) << function << ": a mixture " << values;
    const float value = values[0].get<float>();
    EXPECT_TRUE(
        (own && value == static_cast<float>(survivor + 1)) ||
        (mean && value == 2))
        << function << ", rank " << survivor << " has " << value;
    const std::string error = report.values.value("error", "");
    EXPECT_NE(error.find("rank 1 died"), std::string::npos)
        << function << ": " << error;
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

} // namespace hasten
