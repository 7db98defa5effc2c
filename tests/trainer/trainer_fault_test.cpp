// Runs that a signal stops.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <cstdlib>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/process.h"
#include "hasten/base/world.h"
#include "hasten/trainer/resume.h"
#include "hasten/trainer/trainer.h"
#include "support/spawn.h"
#include "support/temporary_folder.h"
#include "trainer/toy_text.h"

namespace hasten {

namespace detail {

/// Trains without end. The ranks in `signalled` get SIGINT in their third micro-batch.
void train_until_interrupted(testing_support::FaultRank& rank, const std::vector<int>& signalled) {
  install_interrupt_handlers();
  auto model = std::make_shared<toy::Classifier>();
  const auto loss = toy::loss_function(model);
  TrainingArguments arguments = toy::arguments();
  arguments.max_steps = 1'000'000;
  int calls = 0;
  Trainer trainer(
      model,
      [&](const Batch& batch) {
        const int me = rank.world().rank;
        if (++calls == 3 && std::find(signalled.begin(), signalled.end(), me) != signalled.end()) {
          rank.fault_here(); // the clock of seconds_after_fault starts
          std::raise(SIGINT);
        }
        return loss(batch);
      },
      arguments, std::make_shared<toy::Texts>(64));
  trainer.train();
}

} // namespace detail

HASTEN_RANK_FUNCTION(TrainerInterruptedOnAllRanks) {
  detail::train_until_interrupted(rank, {0, 1});
}

HASTEN_RANK_FUNCTION(TrainerInterruptedOnRankOne) { detail::train_until_interrupted(rank, {1}); }

/// Only rank 1 gets SIGTERM, in its third micro-batch. The run writes to `HASTEN_TEST_FOLDER`.
HASTEN_RANK_FUNCTION(TrainerTerminatedOnRankOne) {
  install_interrupt_handlers();
  auto model = std::make_shared<toy::Classifier>();
  const auto loss = toy::loss_function(model);
  TrainingArguments arguments = toy::arguments();
  arguments.output_dir = std::getenv("HASTEN_TEST_FOLDER");
  arguments.max_steps = 1'000'000;
  arguments.gradient_accumulation_steps = 2;
  if (std::getenv("HASTEN_TEST_LOCAL_SGD") != nullptr) {
    arguments.local_sgd_steps = 3;
  }
  int calls = 0;
  Trainer trainer(
      model,
      [&](const Batch& batch) {
        if (++calls == 3 && rank.world().rank == 1) {
          rank.fault_here();
          std::raise(SIGTERM);
        }
        return loss(batch);
      },
      arguments, std::make_shared<toy::Texts>(640));
  trainer.train();
}

TEST(TrainerFault, SigtermOfOneRankMakesAllSaveBehindOneUpdate) {
  for (const bool local : {false, true}) {
    SCOPED_TRACE(local);
    const testing_support::TemporaryFolder folder;
    std::vector<std::pair<std::string, std::string>> environment{
        {"HASTEN_TEST_FOLDER", folder / "out"}};
    if (local) {
      environment.emplace_back("HASTEN_TEST_LOCAL_SGD", "1");
    }
    const auto ranks =
        testing_support::spawn(2, "TrainerTerminatedOnRankOne", {}, {.environment = environment});
    for (const auto& rank : ranks) {
      EXPECT_FALSE(rank.timed_out);
      EXPECT_NE(rank.error_type.find("Interrupted"), std::string::npos)
          << rank.error_type << ": " << rank.error;
    }
    // In step 2's first micro-batch; with Local SGD behind the next round.
    TrainingArguments arguments;
    arguments.output_dir = (folder / "out").string();
    arguments.resume_from_checkpoint = "latest";
    const ResumePoint point = find_resume_point(arguments, /*verify_checksums=*/true);
    EXPECT_EQ(point.folder.filename().string(), local ? "checkpoint-3" : "checkpoint-2");
  }
}

TEST(TrainerFault, CtrlCStopsEveryRankWithItsSignal) {
  const auto ranks = testing_support::spawn(2, "TrainerInterruptedOnAllRanks", {});
  for (const auto& rank : ranks) {
    EXPECT_FALSE(rank.timed_out);
    EXPECT_NE(rank.error_type.find("Interrupted"), std::string::npos)
        << rank.error_type << ": " << rank.error;
  }
}

TEST(TrainerFault, SignalThatReachesOneRankEndsTheOthersWithItsReason) {
  const auto ranks = testing_support::spawn(2, "TrainerInterruptedOnRankOne", {});
  EXPECT_NE(ranks[1].error_type.find("Interrupted"), std::string::npos) << ranks[1].error;
  EXPECT_FALSE(ranks[0].timed_out);
  EXPECT_NE(ranks[0].error.find("stopped by signal 2"), std::string::npos) << ranks[0].error;
}

HASTEN_RANK_FUNCTION(TrainsWithoutLocalRanks) {
  Accelerator accelerator;
  rank.report("threads", at::get_num_threads());
  rank.report("local_process_index", accelerator.local_process_index());
  accelerator.end_training();
}

TEST(TrainerFault, RanksThatTheLauncherDoesNotCountShareTheCoresOfTheirHost) {
  const auto ranks = testing_support::spawn(
      2, "TrainsWithoutLocalRanks", {},
      {.environment = {{"LOCAL_RANK", ""}, {"LOCAL_WORLD_SIZE", ""}, {"OMP_NUM_THREADS", ""}}});
  for (int rank = 0; rank < 2; ++rank) {
    const testing_support::RankReport& report = ranks[static_cast<size_t>(rank)];
    EXPECT_EQ(report.error, "");
    EXPECT_EQ(report.values.value("threads", 0), std::max(1, allowed_cores() / 2));
    EXPECT_EQ(report.values.value("local_process_index", -1), rank);
  }
}

} // namespace hasten
