// LocalSGD with on_peer_failure: ranks are killed in every phase of a synchronisation.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>

#include "local_sgd/local_sgd_survivors_rig.h"
#include "support/rounding_hook.h"
#include "support/temporary_folder.h"

namespace hasten::accelerator_test {

using testing_support::FaultRank;
using testing_support::RankReport;
using testing_support::spawn;

static LocalSGDOptions every_third(PeerFailure failure) {
  LocalSGDOptions options{.local_sgd_steps = 3, .on_peer_failure = failure};
  options.average.slice_mb = 2e-4; // 26 numbers: several slices
  return options;
}

static std::map<std::string, Scenario> survivor_scenarios() {
  const LocalSGDOptions plain = every_third(PeerFailure::survivors);
  LocalSGDOptions outer = plain;
  outer.average.outer =
      std::make_shared<DiLoCo>(DiLoCoOptions{.lr = 0.7, .momentum = 0.5, .nesterov = false});
  using enum Phase;
  return {
      {"one after the other",
       {.world = 4,
        .deaths = {{3, 1, before_snapshot}, {1, 2, mid_reduce}, {2, 3, before_vote}},
        .options = plain,
        .steps = 14}},
      {"unheard commit",
       {.world = 3, .deaths = {{1, 2, after_vote}, {2, 3, between_rounds}}, .options = plain}},
      {"unheard commit, outer step",
       {.world = 3, .deaths = {{1, 2, after_vote}}, .options = outer}},
      {"outer step", {.world = 3, .deaths = {{2, 2, mid_reduce}}, .options = outer}},
      {"two at once",
       {.world = 4, .deaths = {{1, 2, mid_reduce}, {2, 1, at_recovery}}, .options = plain}},
      {"one is left", {.world = 2, .deaths = {{1, 2, mid_reduce}}, .options = plain}},
  };
}

HASTEN_RANK_FUNCTION(SurvivesAScenario) {
  const std::string name = std::getenv("SCENARIO");
  Scenario how = survivor_scenarios().at(name);
  SurvivorsRun run(rank, how);
  run.save_to = std::getenv("FOLDER");
  run.train(0.3);
  if (name == "two at once") {
    how.deaths[1].round = 2; // the second rank dies in its first recovery
  }
  const bool outer = how.options.average.outer != nullptr;
  const auto simulated =
      simulate_survivors(how, run.batches, 0.3, outer ? 0.7 : 0, outer ? 0.5 : 0);
  const auto own = std::find(simulated.living.begin(), simulated.living.end(), run.rank);
  ASSERT_NE(own, simulated.living.end());
  EXPECT_LE(largest_difference(*run.net, *simulated.nets[static_cast<size_t>(run.rank)]), 1e-10);
  expect_equal_on_ranks(*run.accelerator, run.net);
  EXPECT_EQ(run.accelerator->num_processes(), static_cast<int>(simulated.living.size()));
  EXPECT_EQ(run.accelerator->process_index(), static_cast<int>(own - simulated.living.begin()));
  EXPECT_EQ(run.report.rounds, (how.steps + 2) / 3);
  run.accelerator->end_training();
  run.world->close();
  rank.report("ended", true);
}

static void expect_survived(const std::string& scenario, const std::string& save_to = "") {
  const Scenario how = survivor_scenarios().at(scenario);
  const auto ranks = spawn(how.world, "SurvivesAScenario", {},
                           {.environment = {{"SCENARIO", scenario}, {"FOLDER", save_to}}});
  std::set<int> dead;
  for (const Death& death : how.deaths) {
    dead.insert(death.rank);
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    const bool died = dead.count(static_cast<int>(i)) > 0;
    EXPECT_FALSE(ranks[i].timed_out) << scenario << ", rank " << i;
    EXPECT_EQ(ranks[i].end.signal, died ? SIGKILL : 0) << "rank " << i;
    EXPECT_EQ(ranks[i].values.value("ended", false), !died)
        << scenario << ", rank " << i << ": " << ranks[i].error;
  }
}

TEST(LocalSGDSurvivors, DeathsBeforeTheVoteAreInNoMeanFromThatRoundOn) {
  expect_survived("one after the other");
}

TEST(LocalSGDSurvivors, ARoundThatOneRankHasCompletedCountsForAll) {
  expect_survived("unheard commit");
  expect_survived("unheard commit, outer step");
}

TEST(LocalSGDSurvivors, AnchorAndMomentumAreThoseOfTheLastAverage) {
  const testing_support::TemporaryFolder scratch; // the remaining ranks also save here
  expect_survived("outer step", (scratch / "state").string());
}

TEST(LocalSGDSurvivors, TwoDeathsInOneRoundAndARankOfItsOwn) {
  expect_survived("two at once");
  expect_survived("one is left");
}

// A synchronisation in progress, a hierarchy, moments, running statistics. Each is averaged over the
// remaining ranks at the right step, and is then equal on these ranks.
HASTEN_RANK_FUNCTION(SurvivesInOtherForms) {
  const std::string form = std::getenv("SCENARIO");
  Scenario how{.world = 4,
               .deaths = {{3, 2, Phase::before_vote}},
               .options = every_third(PeerFailure::survivors),
               .steps = 16};
  if (form == "delay") {
    how.options.delay = 2;
    how.deaths = {{3, 2, Phase::before_vote}};
  } else if (form == "delay, death at the start") {
    how.options.delay = 2;
    how.deaths = {{3, 2, Phase::mid_reduce}};
  } else if (form == "fragments") {
    how.options.average.fragments = 2;
    how.deaths = {{3, 3, Phase::mid_reduce}};
  } else if (form == "groups") {
    how.options.local_sgd_steps = 4;
    how.options.inner_steps = 2;
    how.options.group = std::to_string(rank.world().rank / 2);
    how.deaths = {{3, 3, Phase::before_snapshot}};
  } else if (form == "hook") {
    how.options.average.comm_hook = std::make_shared<testing_support::RoundingHook>();
  } else if (form == "moments") {
    how.options.moments = MomentPolicy::average;
    how.deaths = {{3, 3, Phase::before_vote}};
  }
  SurvivorsRun run(rank, how);
  run.train(0.1);
  expect_equal_on_ranks(*run.accelerator, run.net);
  EXPECT_EQ(run.accelerator->num_processes(), 3);
  EXPECT_EQ(run.report.steps, how.steps);
  run.accelerator->end_training();
  run.world->close();
  rank.report("ended", true);
}

TEST(LocalSGDSurvivors, EveryFormOfARoundGoesOnAndEndsEqual) {
  for (const char* form :
       {"delay", "delay, death at the start", "fragments", "groups", "hook", "moments"}) {
    const auto ranks = spawn(4, "SurvivesInOtherForms", {}, {.environment = {{"SCENARIO", form}}});
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(ranks[i].values.value("ended", false))
          << form << ", rank " << i << ": " << ranks[i].error;
    }
    EXPECT_EQ(ranks[3].end.signal, SIGKILL) << form;
  }
}

// With a prepared loader and uneven data. Rank 1 dies in the third synchronisation, or when all ranks
// wait after the first pass. A pass that begins later is distributed over the
// remaining ranks. In the second case rank 0 has begun its second pass before it learns of the death.
HASTEN_RANK_FUNCTION(SurvivesWithALoader) {
  const bool at_end = std::string(std::getenv("SCENARIO")) == "end";
  Scenario how{.deaths = {at_end ? Death{1, 1, Phase::after_end} : Death{1, 3, Phase::before_vote}},
               .options = every_third(PeerFailure::survivors)};
  SurvivorsRun run(rank, how);
  AcceleratorOptions options;
  options.seed.reset();
  Accelerator accelerator(options, doomed(run.world, how, run.rank));
  torch::optim::SGD inner(run.net->parameters(), 0.1);
  Decay decay(inner);
  auto batches = make_batches(26); // the ranks get 9, 9 and 8; the two that remain get 13 each
  auto [model, optimizer, loader, scheduler] = accelerator.prepare(run.net, inner, batches, decay);
  LocalSGD local_sgd(accelerator, model, how.options);
  std::vector<int> seen;
  for (int epoch = 0; epoch < 2; ++epoch) {
    seen.push_back(0);
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, batch));
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
      local_sgd.step();
      ++seen.back();
    }
    local_sgd.synchronize();
  }
  local_sgd.finish();
  expect_equal_on_ranks(accelerator, run.net);
  rank.report("batches", seen);
  rank.report("ticks", decay.ticks);
  accelerator.end_training();
  run.world->close();
}

TEST(LocalSGDSurvivors, TheNextPassIsDistributedOverThoseThatAreLeft) {
  for (const char* place : {"round", "end"}) {
    const auto ranks = spawn(3, "SurvivesWithALoader", {}, {.environment = {{"SCENARIO", place}}});
    SCOPED_TRACE(place);
    ASSERT_EQ(ranks[0].error + ranks[2].error, "");
    const int second = std::string(place) == "end" ? 9 : 13;
    EXPECT_EQ(ranks[0].values.at("batches"), (std::vector<int>{9, second}));
    EXPECT_EQ(ranks[2].values.at("batches").at(1), 13);
    EXPECT_EQ(ranks[0].values.at("ticks"), 22);
    EXPECT_EQ(ranks[2].values.at("ticks"), 22);
  }
}

HASTEN_RANK_FUNCTION(StopsInAScenario) {
  const auto phase = static_cast<Phase>(std::atoi(std::getenv("PHASE")));
  const Scenario how{.world = rank.world().world_size,
                     .deaths = {{1, 2, phase}},
                     .options = every_third(PeerFailure::stop),
                     .deaf = rank.world().world_size - 1};
  SurvivorsRun run(rank, how);
  const auto committed = simulate_survivors( // with all ranks
      {.world = how.world, .options = how.options, .steps = 6}, run.batches, 0.3);
  std::string error;
  try {
    run.train(0.3);
  } catch (const CommunicationError& caught) {
    error = caught.what();
  }
  rank.report("error", error);
  bool own = true;
  bool mean = !run.second.empty();
  for (size_t p = 0; p < run.own.size(); ++p) {
    own = own && torch::equal(run.net->parameters()[p], run.own[p]);
    mean = mean && torch::allclose(run.second[p], committed.nets[0]->parameters()[p], 1e-12, 1e-12);
  }
  rank.report("own", own);
  rank.report("mean", mean);
}

// Ranks that know of the second synchronisation's end have its mean and continue by themselves
// until the third; the others stop with the parameters from before it.
TEST(LocalSGDSurvivors, WhoStopsHasItsOwnParametersOrTheLastAverage) {
  using enum Phase;
  const std::vector<std::pair<Phase, int>> cases{
      {before_snapshot, 2}, {before_snapshot, 4}, {mid_reduce, 2},
      {mid_reduce, 3},      {mid_reduce, 4},      {before_vote, 3},
      {after_vote, 3},      {after_vote, 4},      {between_rounds, 3}};
  for (const auto& [phase, world] : cases) {
    const auto number = std::to_string(static_cast<int>(phase));
    const auto ranks = spawn(world, "StopsInAScenario", {}, {.environment = {{"PHASE", number}}});
    for (int i = 0; i < world; ++i) {
      if (i == 1) {
        continue;
      }
      const RankReport& report = ranks[static_cast<size_t>(i)];
      SCOPED_TRACE(testing::Message() << "phase " << number << ", rank " << i << " of " << world);
      EXPECT_FALSE(report.timed_out);
      EXPECT_NE(report.values.value("error", "").find("rank 1 died"), std::string::npos)
          << report.values.value("error", "");
      const bool heard = phase == between_rounds || (phase == after_vote && i != world - 1);
      EXPECT_TRUE(report.values.value("own", false));
      EXPECT_EQ(report.values.value("mean", false), heard);
    }
  }
}

} // namespace hasten::accelerator_test
