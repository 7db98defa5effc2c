// What callbacks and the loss's arguments do on several ranks. Worlds 1 to 4.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/trainer/losses.h"
#include "hasten/trainer/trainer.h"
#include "support/communicator.h"
#include "support/world.h"
#include "trainer/toy_text.h"

namespace hasten::trainer_control_world_test {

/// Asks in one on_step_end, and notes at which steps evaluations came.
struct Asker : TrainerCallback {
  int64_t step = 0; // 0: no request
  bool any_rank = false;
  bool stop = false;
  std::vector<int64_t> evaluations{};

  void on_step_end(const StepProgress& progress) override {
    if (progress.global_step == step) {
      (stop ? control().should_training_stop : control().should_evaluate) = true;
      control().any_rank = any_rank;
    }
  }
  void on_evaluate(const nlohmann::json& record) override {
    evaluations.push_back(record.at("step").get<int64_t>());
  }
};

struct AskedRun {
  explicit AskedRun(TrainingArguments a, std::shared_ptr<TrainerCallback> callback, bool add = true,
                    int64_t rows_a_rank = 8) {
    AcceleratorOptions options;
    options.gradient_accumulation_steps = a.gradient_accumulation_steps;
    options.strategy = a.strategy;
    trainer = std::make_unique<Trainer>(
        model, toy::loss_function(model), a,
        std::make_shared<toy::Texts>(rows_a_rank * testing_support::test_world().world_size + 1),
        std::make_shared<toy::Texts>(5), ComputeMetrics{},
        std::make_shared<Accelerator>(options, testing_support::fresh_communicator()));
    if (add) {
      trainer->add_callback(std::move(callback));
    }
    trainer->train();
  }
  std::shared_ptr<toy::Classifier> model = std::make_shared<toy::Classifier>();
  std::unique_ptr<Trainer> trainer;
};

/// Five steps an epoch: four of 2 rows a rank, and one of a single row in all.
TrainingArguments asked_arguments() {
  TrainingArguments a = toy::arguments();
  a.num_train_epochs = 2;
  a.per_device_train_batch_size = 2;
  return a;
}

int last_rank() { return testing_support::test_world().world_size - 1; }
bool is_last_rank() { return testing_support::test_world().rank == last_rank(); }

TEST(TrainerControlWorld, WhatOneRankAsksAllDoBehindTheNextUpdate) {
  // 4: goes with the epoch's last step, in which most ranks have no row.
  // 5: the asking rank has no row there; it goes with the next epoch's first.
  for (const auto& [step, done] : {std::pair(2, 3), {4, 5}, {5, 6}}) {
    SCOPED_TRACE(step);
    auto asker = std::make_shared<Asker>();
    asker->step = testing_support::test_world().rank == 0 ? step : 0;
    asker->any_rank = true;
    const AskedRun run(asked_arguments(), asker);
    EXPECT_EQ(asker->evaluations, (std::vector<int64_t>{done}));
  }
}

TEST(TrainerControlWorld, ACallbackOfOneRankAloneIsHeardByAll) {
  auto asker = std::make_shared<Asker>();
  asker->step = 2;
  asker->stop = true;
  const AskedRun run(asked_arguments(), asker, is_last_rank());
  const int64_t expected = testing_support::test_world().world_size == 1 ? 2 : 3;
  EXPECT_EQ(run.trainer->state().global_step, expected);
}

TEST(TrainerControlWorld, WithLocalSGDItIsDoneAtTheNextRound) {
  TrainingArguments a = asked_arguments();
  a.local_sgd_steps = 3;
  auto asker = std::make_shared<Asker>();
  asker->step = is_last_rank() ? 1 : 0;
  asker->any_rank = true;
  const AskedRun run(a, asker);
  const bool alone = testing_support::test_world().world_size == 1;
  EXPECT_EQ(asker->evaluations, (std::vector<int64_t>{alone ? 2 : 3}));
}

TEST(TrainerControlWorld, EarlyStoppingEndsEveryRankBehindOneUpdate) {
  for (const Strategy strategy : {Strategy::ddp, Strategy::fsdp}) {
    SCOPED_TRACE(strategy_name(strategy));
    TrainingArguments a = asked_arguments();
    a.strategy = strategy;
    a.eval_strategy = IntervalStrategy::steps;
    a.eval_steps = 1;
    a.learning_rate = 0; // no evaluation is better than the first
    a.early_stopping_patience = 3;
    auto asker = std::make_shared<Asker>();
    const AskedRun run(a, asker);
    EXPECT_EQ(asker->evaluations, (std::vector<int64_t>{1, 2, 3, 4}));
    EXPECT_EQ(run.trainer->state().global_step, 4);
  }
}

TEST(TrainerControlWorld, ARateThatNotEveryRankSetsIsRefused) {
  if (testing_support::test_world().world_size == 1) {
    return; // there is no other rank
  }
  struct SetRate : TrainerCallback {
    void on_step_end(const StepProgress&) override { control().learning_rate = 0.1; }
  };
  try {
    const AskedRun run(asked_arguments(), std::make_shared<SetRate>(), is_last_rank());
    FAIL() << "trained on";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("that not every rank has"), std::string::npos)
        << error.what();
  }
}

/// The reference: the loss of all `total` rows of a step at once, by torch.
struct WeightedRun {
  std::vector<double> losses{};
  std::shared_ptr<toy::Classifier> model = std::make_shared<toy::Classifier>();
};

WeightedRun joined_batches(const TrainingArguments& a, int64_t rows, int64_t total) {
  WeightedRun run;
  const toy::Texts texts(rows);
  const at::Tensor weights = at::tensor(class_weight_numbers(a.class_weights), at::kDouble);
  torch::optim::SGD optimizer(run.model->parameters(), torch::optim::SGDOptions(a.learning_rate));
  for (int64_t first = 0; first < rows; first += total) {
    std::vector<int64_t> of_update;
    for (int64_t i = first; i < std::min(rows, first + total); ++i) {
      of_update.push_back(i);
    }
    const Batch batch = texts.collate(of_update);
    optimizer.zero_grad();
    const at::Tensor loss = at::cross_entropy_loss(
        run.model->forward(batch["input_ids"], batch["attention_mask"]), batch["labels"], weights,
        at::Reduction::Mean, -100, a.label_smoothing_factor);
    loss.backward();
    optimizer.step();
    run.losses.push_back(loss.item<double>());
  }
  return run;
}

TEST(TrainerControlWorld, ClassWeightsAndSmoothingAreTorchsOfTheJoinedBatch) {
  TrainingArguments a = toy::arguments();
  a.num_train_epochs = 1;
  a.optim = OptimizerType::sgd;
  a.weight_decay = 0;
  a.max_grad_norm = 0;
  a.warmup_steps = 0;
  a.lr_scheduler_type = "constant";
  a.label_smoothing_factor = 0.2;
  a.class_weights = "0.25,4,1.5"; // a rank's batches have different weights
  const int64_t rows = 26, total = 12;
  const WeightedRun reference = joined_batches(a, rows, total);
  const int world_size = testing_support::test_world().world_size;
  for (const Strategy strategy : {Strategy::ddp, Strategy::zero1, Strategy::fsdp}) {
    for (const int64_t window : {1, 2, 4}) {
      if (total % (window * world_size) != 0) {
        continue;
      }
      SCOPED_TRACE(std::string(strategy_name(strategy)) + " x " + std::to_string(window));
      a.strategy = strategy;
      a.gradient_accumulation_steps = window;
      a.per_device_train_batch_size = total / (window * world_size);
      AcceleratorOptions options;
      options.gradient_accumulation_steps = window;
      options.strategy = strategy;
      auto model = std::make_shared<toy::Classifier>();
      auto accelerator =
          std::make_shared<Accelerator>(options, testing_support::fresh_communicator());
      Trainer trainer(model, toy::loss_function(model), a, std::make_shared<toy::Texts>(rows),
                      nullptr, ComputeMetrics{}, accelerator);
      trainer.train();
      const auto losses = toy::history(trainer, "loss");
      ASSERT_EQ(losses.size(), reference.losses.size());
      for (size_t i = 0; i < losses.size(); ++i) {
        EXPECT_NEAR(losses[i], reference.losses[i], 1e-10) << i;
      }
      double difference = 0;
      accelerator->summon_full_params(
          [&] { difference = toy::largest_difference(*model, *reference.model); }, model);
      EXPECT_LE(difference, 1e-9);
    }
  }
}

TEST(TrainerControlWorld, LocalSGDSRecordsAreWeighedByClassOverAllRanks) {
  TrainingArguments a = asked_arguments();
  a.num_train_epochs = 1;
  a.class_weights = "0.25,4,1.5";
  a.local_sgd_steps = 2;
  auto asker = std::make_shared<Asker>();
  const AskedRun run(a, asker);
  const auto losses = toy::history(*run.trainer, "loss");
  ASSERT_FALSE(losses.empty());
  // The first step's, over all ranks, before any parameter has changed.
  const World& world = testing_support::test_world();
  std::vector<int64_t> rows(static_cast<size_t>(2 * world.world_size));
  std::iota(rows.begin(), rows.end(), 0);
  auto fresh = std::make_shared<toy::Classifier>();
  const Batch batch = toy::Texts(8 * world.world_size + 1).collate(rows);
  const double expected =
      at::cross_entropy_loss(fresh->forward(batch["input_ids"], batch["attention_mask"]),
                             batch["labels"], at::tensor({0.25, 4.0, 1.5}, at::kDouble))
          .item<double>();
  EXPECT_NEAR(losses[0], expected, 1e-10);
}

} // namespace hasten::trainer_control_world_test
