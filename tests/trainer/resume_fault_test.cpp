// Writers that are killed in the middle of a save.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>

#include "hasten/accelerator/accelerator.h"
#include "hasten/io/commit.h"
#include "hasten/trainer/resume.h"
#include "hasten/trainer/trainer.h"
#include "support/spawn.h"
#include "support/temporary_folder.h"
#include "trainer/toy_text.h"

namespace hasten::resume_fault_test {

TrainingArguments killed_arguments(const std::string& folder) {
  TrainingArguments a = toy::arguments();
  a.output_dir = folder;
  a.per_device_train_batch_size = 2;
  a.num_train_epochs = 1;
  a.save_strategy = SaveStrategy::steps;
  a.save_steps = 1;
  a.save_total_limit = 1; // removes the previous checkpoint after the next one is complete
  a.resume_from_checkpoint = "auto";
  return a;
}

/// Trains. The faulty rank dies in the third save. If it is rank 0, half of the model's file is on
/// disk; another rank dies while rank 0 writes.
HASTEN_RANK_FUNCTION(TrainerKilledWhileSaving) {
  auto model = std::make_shared<toy::Classifier>();
  Trainer trainer(model, toy::loss_function(model),
                  killed_arguments(std::getenv("HASTEN_TEST_FOLDER")),
                  std::make_shared<toy::Texts>(24));
  const ModelFiles whole = default_model_files(model);
  int saves = 0;
  struct CountSaves : TrainerCallback {
    explicit CountSaves(std::function<void()> f) : third(std::move(f)) {}
    void on_step_end(const StepProgress& progress) override {
      if (progress.global_step == 3) {
        third();
      }
    }
    std::function<void()> third;
  };
  if (rank.world().rank != 0) {
    trainer.add_callback(std::make_shared<CountSaves>([&] { rank.fault_here(); }));
  }
  trainer.set_model_files({.save =
                               [&](const std::filesystem::path& folder) {
                                 whole.save(folder);
                                 if (++saves == 3 && rank.is_faulty()) {
                                   std::filesystem::resize_file(folder / "model.safetensors", 100);
                                   rank.fault_here();
                                 }
                               },
                           .load = whole.load});
  trainer.train();
  rank.report("steps", trainer.state().global_step);
  rank.report("loss", toy::history(trainer, "loss"));
  trainer.accelerator().end_training();
}

/// Saves after every second step, averages after every fourth; the faulty rank
/// dies in its seventh, in the middle of a round.
HASTEN_RANK_FUNCTION(TrainerKilledInALocalRound) {
  auto model = std::make_shared<toy::Classifier>();
  const auto loss = toy::loss_function(model);
  TrainingArguments a = killed_arguments(std::getenv("HASTEN_TEST_FOLDER"));
  a.save_steps = 2;
  a.local_sgd_steps = 4;
  a.logging_steps = 100;
  int calls = 0;
  Trainer trainer(
      model,
      [&](const Batch& batch) {
        if (++calls == 7) {
          rank.fault_here();
        }
        return loss(batch);
      },
      a, std::make_shared<toy::Texts>(60));
  trainer.train();
}

TEST(TrainerFault, PeerKilledInARoundOfLocalSGDIsNamedAndNothingIsHalfWritten) {
  const testing_support::TemporaryFolder scratch;
  const auto ranks = testing_support::spawn(
      3, "TrainerKilledInALocalRound", {.kind = testing_support::FaultKind::kill, .rank = 1},
      {.environment = {{"HASTEN_TEST_FOLDER", (scratch / "run").string()}}});
  for (const size_t survivor : {size_t{0}, size_t{2}}) {
    EXPECT_FALSE(ranks[survivor].timed_out);
    EXPECT_EQ(ranks[survivor].error_type, "hasten::CommunicationError");
    EXPECT_NE(ranks[survivor].error.find("rank 1 died"), std::string::npos)
        << ranks[survivor].error;
    EXPECT_LT(ranks[survivor].seconds_after_fault, 8);
  }
  // The save of step 6 is the last that all ranks took part in.
  std::vector<std::string> saves;
  for (const auto& entry : std::filesystem::directory_iterator(scratch / "run")) {
    const std::string name = entry.path().filename().string();
    if (entry.is_directory() || name.find("tmp") != std::string::npos) {
      saves.push_back(name);
    }
  }
  EXPECT_EQ(saves, std::vector<std::string>{"checkpoint-6"});
  EXPECT_NO_THROW(verify_manifest(scratch / "run" / "checkpoint-6"));
}

TEST(TrainerFault, WriterKilledInASaveLeavesThePreviousCheckpointToGoOnFrom) {
  const testing_support::TemporaryFolder scratch;
  const auto run = [&](const std::string& name, const testing_support::Fault& fault) {
    return testing_support::spawn(
        2, "TrainerKilledWhileSaving", fault,
        {.environment = {{"HASTEN_TEST_FOLDER", (scratch / name).string()}}});
  };
  const auto expected = run("whole", {.kind = testing_support::FaultKind::none});
  ASSERT_EQ(expected[0].values.value("steps", 0), 6) << expected[0].error;
  for (const int killed : {0, 1}) {
    SCOPED_TRACE("rank " + std::to_string(killed));
    const std::string name = "killed-" + std::to_string(killed);
    run(name, {.kind = testing_support::FaultKind::kill, .rank = killed});
    const std::filesystem::path folder = scratch / name;
    EXPECT_FALSE(std::filesystem::exists(folder / "checkpoint-3"));
    EXPECT_NO_THROW(verify_manifest(folder / "checkpoint-2"));
    const ResumePoint point = find_resume_point(killed_arguments(folder.string()), true);
    EXPECT_EQ(point.folder, folder / "checkpoint-2");
    EXPECT_FALSE(point.finished);
    // Runs the same command again.
    const auto again = run(name, {});
    EXPECT_EQ(again[0].values.value("steps", 0), 6) << again[0].error;
    EXPECT_EQ(again[0].values.at("loss"), expected[0].values.at("loss"));
    EXPECT_TRUE(std::filesystem::exists(folder / "checkpoint-6"));
    EXPECT_FALSE(std::filesystem::exists(folder / "checkpoint-2"));
  }
}

} // namespace hasten::resume_fault_test
