// --optim and --lr-scheduler-type in a run.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/comm/communicator.h"
#include "hasten/optim/make_optimizer.h"
#include "hasten/optim/param_groups.h"
#include "hasten/optim/schedule.h"
#include "support/temporary_folder.h"
#include "trainer/toy_text.h"

namespace hasten::optimizer_choice_test {

constexpr int64_t kRows = 24;
constexpr int64_t kBatch = 4;

struct TrainedRun {
  std::shared_ptr<toy::Classifier> model = std::make_shared<toy::Classifier>();
  std::unique_ptr<Trainer> trainer{};
};

TrainedRun train(TrainingArguments arguments) {
  arguments.per_device_train_batch_size = kBatch;
  TrainedRun run;
  run.trainer = std::make_unique<Trainer>(
      run.model, toy::loss_function(run.model), arguments, std::make_shared<toy::Texts>(kRows),
      std::make_shared<toy::Texts>(6), ComputeMetrics{},
      std::make_shared<Accelerator>(AcceleratorOptions{}, Communicator::create(World{})));
  run.trainer->train();
  return run;
}

TEST(TrainerOptimizer, EachNameTrainsAsAPlainLoopOverItDoes) {
  toy::Texts texts(kRows);
  for (const auto& [name, type] : spellings<OptimizerType>()) {
    TrainingArguments a = toy::arguments();
    a.num_train_epochs = 2;
    a.max_grad_norm = 0;
    a.adam_beta2 = 0.98;
    a.optim = type;
    a.optim_args = name == "sgd" ? "momentum=0.9" : "";
    const TrainedRun run = train(a);

    const auto model = std::make_shared<toy::Classifier>();
    const auto loss_function = toy::loss_function(model);
    const auto optimizer = make_optimizer(
        name, decay_groups(*model, a.weight_decay),
        {.learning_rate = a.learning_rate, .adam_beta2 = a.adam_beta2, .args = a.optim_args});
    const int64_t updates = 2 * kRows / kBatch;
    LRScheduler schedule(*optimizer, linear_schedule(2, updates));
    for (int64_t update = 0; update < updates; ++update) {
      std::vector<int64_t> rows;
      for (int64_t i = 0; i < kBatch; ++i) {
        rows.push_back((update * kBatch + i) % kRows);
      }
      const LossOutput loss = loss_function(texts.collate(rows));
      optimizer->zero_grad();
      (loss.loss_sum / loss.weight.item()).backward();
      optimizer->step();
      schedule.step();
    }
    const auto ours = run.model->parameters(), plain = model->parameters();
    const auto start = toy::Classifier().parameters();
    for (size_t i = 0; i < ours.size(); ++i) {
      EXPECT_LE((ours[i].cpu() - plain[i]).abs().max().item<double>(), 1e-9) << name;
      EXPECT_GT((ours[i].cpu() - start[i]).abs().max().item<double>(), 1e-4) << name;
    }
  }
}

TEST(TrainerOptimizer, EachScheduleGivesItsRates) {
  const std::map<std::string, std::string> kwargs = {
      {"cosine_with_restarts", R"({"num_cycles": 2})"},
      {"cosine_with_min_lr", R"({"min_lr": 0.005})"},
      {"polynomial", R"({"power": 2, "lr_end": 0.01})"},
      {"warmup_stable_decay", R"({"num_decay_steps": 3})"}};
  for (const std::string& name : schedule_names()) {
    TrainingArguments a = toy::arguments();
    a.num_train_epochs = 2;
    a.lr_scheduler_type = name;
    a.lr_scheduler_kwargs = kwargs.contains(name) ? kwargs.at(name) : "";
    a.eval_strategy = IntervalStrategy::epoch;
    const TrainedRun run = train(a);
    const auto rates = toy::history(*run.trainer, "learning_rate");
    const auto expected =
        make_schedule(name, 2, 12, a.learning_rate,
                      a.lr_scheduler_kwargs.empty() ? nlohmann::json()
                                                    : nlohmann::json::parse(a.lr_scheduler_kwargs));
    ASSERT_EQ(rates.size(), 12U) << name;
    for (int64_t k = 0; k < 12; ++k) {
      EXPECT_NEAR(rates[static_cast<size_t>(k)], 0.05 * expected(k), 1e-15) << name << " " << k;
    }
  }
}

TEST(TrainerOptimizer, ARegisteredScheduleGivesItsRates) {
  register_schedule("every-third", [](const ScheduleRequest&) -> Schedule {
    return [](int64_t k) { return k % 3 == 0 ? 1.0 : 0.5; };
  });
  TrainingArguments a = toy::arguments();
  a.lr_scheduler_type = "every-third";
  const auto rates = toy::history(*train(a).trainer, "learning_rate");
  ASSERT_GE(rates.size(), 4U);
  for (size_t k = 0; k < rates.size(); ++k) {
    EXPECT_EQ(rates[k], k % 3 == 0 ? a.learning_rate : a.learning_rate / 2) << k;
  }
  a.lr_scheduler_type = "every-thrid";
  EXPECT_THROW(train(a), InputError);
}

TEST(TrainerOptimizer, RatesFallOnAPlateauAlsoAfterAResume) {
  const testing_support::TemporaryFolder folder;
  TrainingArguments a = toy::arguments();
  a.num_train_epochs = 4;
  a.warmup_steps = 0;
  a.lr_scheduler_type = "reduce_lr_on_plateau";
  // No later evaluation is better than the first.
  a.lr_scheduler_kwargs = R"({"factor": 0.5, "patience": 0, "threshold": 1})";
  a.eval_strategy = IntervalStrategy::epoch;
  a.save_strategy = SaveStrategy::epoch;
  a.save_total_limit = 0;
  a.output_dir = (folder.path() / "whole").string();
  const TrainedRun whole = train(a);
  const auto rates = toy::history(*whole.trainer, "learning_rate");
  ASSERT_EQ(rates.size(), 24U);
  const double expected[] = {0.05, 0.05, 0.025, 0.0125};
  for (size_t k = 0; k < 24; ++k) {
    EXPECT_DOUBLE_EQ(rates[k], expected[k / 6]) << k;
  }

  TrainingArguments b = a;
  b.resume_from_checkpoint = (folder.path() / "whole/checkpoint-18").string();
  b.output_dir = (folder.path() / "resumed").string();
  const TrainedRun resumed = train(b);
  EXPECT_EQ(toy::history(*resumed.trainer, "learning_rate"), rates);
  const auto one = whole.model->parameters(), two = resumed.model->parameters();
  for (size_t i = 0; i < one.size(); ++i) {
    EXPECT_TRUE(torch::equal(one[i], two[i])) << i;
  }
}

TEST(TrainerOptimizer, WhatIsWrongIsSaidBeforeAnythingStarts) {
  const testing_support::TemporaryFolder folder;
  const auto refused = [&](const auto& change, const std::string& text) {
    TrainingArguments a = toy::arguments();
    a.output_dir = (folder.path() / "out").string();
    change(a);
    try {
      train(a);
      ADD_FAILURE() << "trained: " << text;
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
    EXPECT_FALSE(std::filesystem::exists(folder.path() / "out")) << text;
  };
  using A = TrainingArguments;
  refused(
      [](A& a) {
        a.warmup_steps = 19;
        a.lr_scheduler_type = "constant_with_warmup";
      },
      "warmup_steps=19. Expected at most the run's optimizer steps=18");
  refused([](A& a) { a.optim_args = "beta3=1"; }, "write beta1");
  refused([](A& a) { a.lr_scheduler_kwargs = R"({"num_cycle": 1})"; },
          "unknown name in lr_scheduler_kwargs: num_cycle");
  refused([](A& a) { a.lr_scheduler_kwargs = "[1]"; }, "lr_scheduler_kwargs=");
  refused([](A& a) { a.lr_scheduler_type = "reduce_lr_on_plateau"; }, "eval_strategy=no");
}

} // namespace hasten::optimizer_choice_test
