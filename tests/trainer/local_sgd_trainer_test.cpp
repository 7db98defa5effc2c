// Trainer with local_sgd_steps. Worlds 1 to 4.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <functional>

#include "hasten/accelerator/accelerator.h"
#include "hasten/data/loader.h"
#include "hasten/trainer/trainer.h"
#include "support/communicator.h"
#include "support/temporary_folder.h"
#include "support/world.h"
#include "trainer/toy_text.h"

namespace hasten::local_sgd_trainer_test {

TrainingArguments local_arguments(int64_t h) {
  TrainingArguments a = toy::arguments();
  a.num_train_epochs = 2;
  a.per_device_train_batch_size = 2;
  a.local_sgd_steps = h;
  return a;
}

struct LocalRun {
  explicit LocalRun(TrainingArguments arguments, int64_t rows,
                    std::shared_ptr<TrainerCallback> callback = nullptr)
      : texts(std::make_shared<toy::Texts>(rows)) {
    AcceleratorOptions options;
    options.gradient_accumulation_steps = arguments.gradient_accumulation_steps;
    trainer = std::make_unique<Trainer>(
        model, toy::loss_function(model), arguments, texts, std::make_shared<toy::Texts>(9),
        ComputeMetrics{},
        std::make_shared<Accelerator>(options, testing_support::fresh_communicator()));
    if (callback) {
      trainer->add_callback(std::move(callback));
    }
    trainer->train();
  }
  std::shared_ptr<toy::Texts> texts;
  std::shared_ptr<toy::Classifier> model = std::make_shared<toy::Classifier>();
  std::unique_ptr<Trainer> trainer;
};

// One replica of the algorithm in torch's operators.
struct Replica {
  Replica(const TrainingArguments& a, const toy::Texts& texts, int rank, int n)
      : optimizer(groups(a)) {
    DataLoader loader(
        std::shared_ptr<const Dataset>(std::shared_ptr<void>(), &texts),
        {.batch_size = a.per_device_train_batch_size, .shuffle = false, .group_by_length = false});
    loader.shard(rank, n);
    for (const Batch& batch : loader) {
      batches.push_back(batch);
    }
  }
  std::vector<torch::optim::OptimizerParamGroup> groups(const TrainingArguments& a) {
    const auto options = [&](double decay) {
      return std::make_unique<torch::optim::AdamWOptions>(
          torch::optim::AdamWOptions(a.learning_rate).weight_decay(decay));
    };
    std::vector<torch::optim::OptimizerParamGroup> result;
    result.emplace_back(std::vector<at::Tensor>{model->embedding->weight, model->head->weight},
                        options(a.weight_decay));
    result.emplace_back(std::vector<at::Tensor>{model->LayerNorm->weight, model->LayerNorm->bias,
                                                model->head->bias},
                        options(0.0));
    return result;
  }
  void step(const Batch& batch, const TrainingArguments& a, double rate) {
    for (auto& group : optimizer.param_groups()) {
      group.options().set_lr(rate);
    }
    const at::Tensor loss = torch::nn::functional::cross_entropy(
        model->forward(batch["input_ids"], batch["attention_mask"]), batch["labels"]);
    optimizer.zero_grad();
    loss.backward();
    loss_sum += loss.item<double>() * static_cast<double>(batch.rows());
    torch::nn::utils::clip_grad_norm_(model->parameters(), a.max_grad_norm);
    optimizer.step();
    ++steps;
  }
  std::shared_ptr<toy::Classifier> model = std::make_shared<toy::Classifier>();
  torch::optim::AdamW optimizer;
  std::vector<Batch> batches{}; // of one epoch; some have no rows
  double loss_sum = 0;
  int64_t steps = 0;
};

void average_models(std::vector<std::unique_ptr<Replica>>& all) {
  torch::NoGradGuard no_grad;
  double contributors = 0;
  for (const auto& replica : all) {
    contributors += replica->steps > 0;
  }
  for (size_t p = 0; contributors > 0 && p < 5; ++p) {
    at::Tensor sum = torch::zeros_like(all[0]->model->parameters()[p]);
    for (const auto& replica : all) {
      if (replica->steps > 0) {
        sum += replica->model->parameters()[p];
      }
    }
    for (const auto& replica : all) {
      replica->model->parameters()[p].copy_(sum / contributors);
    }
  }
  for (const auto& replica : all) {
    replica->steps = 0;
  }
}

TEST(TrainerLocalSGD, EqualsReplicasInTorchsOperators) {
  const int world = testing_support::test_world().world_size;
  const auto a = local_arguments(2);
  const int64_t rows = 6 * world + 1; // the last step has rows on one rank
  const LocalRun run(a, rows);
  std::vector<std::unique_ptr<Replica>> all;
  for (int rank = 0; rank < world; ++rank) {
    all.push_back(std::make_unique<Replica>(a, *run.texts, rank, world));
  }
  const size_t per_epoch = all[0]->batches.size();
  const auto total = static_cast<double>(2 * per_epoch);
  for (size_t update = 0; update < 2 * per_epoch; ++update) {
    const auto k = static_cast<double>(update);
    const double rate = a.learning_rate * (k < 2 ? k / 2 : (total - k) / (total - 2));
    for (const auto& replica : all) {
      const Batch& batch = replica->batches[update % per_epoch];
      if (batch.rows() > 0) {
        replica->step(batch, a, rate);
      }
    }
    // A single rank has nothing to average.
    if ((update + 1) % 2 == 0 && world > 1) {
      average_models(all);
    }
  }
  average_models(all);
  EXPECT_LE(toy::largest_difference(*run.model, *all[0]->model), 1e-9);
  EXPECT_EQ(run.trainer->state().global_step, 2 * std::ssize(all[0]->batches));
  double loss = 0;
  for (const auto& replica : all) {
    loss += replica->loss_sum;
  }
  const auto& records = run.trainer->state().log_history;
  EXPECT_NEAR(records.back().at("train_loss").get<double>(), loss / static_cast<double>(2 * rows),
              1e-9);
  if (world > 1) {
    const auto& last = records[records.size() - 2];
    EXPECT_EQ(last.at("local_sgd_rounds"), (2 * per_epoch) / 2);
    EXPECT_GT(last.at("local_sgd_spread").get<double>(), 0);
    EXPECT_GT(last.at("local_sgd_bytes").get<int64_t>(), 0);
  } else {
    EXPECT_FALSE(records[0].contains("local_sgd_rounds"));
  }
}

TEST(TrainerLocalSGD, EachArgumentReachesTheScope) {
  const int world = testing_support::test_world().world_size;
  if (world == 1) {
    return; // there is nothing to average
  }
  using Outer = LocalSGDOuter;
  using Change = std::function<void(TrainingArguments&)>;
  const auto run = [&](const std::vector<Change>& changes) {
    TrainingArguments a = local_arguments(2);
    for (const Change& change : changes) {
      change(a);
    }
    auto done = std::make_unique<LocalRun>(a, 12 * world);
    const at::Tensor weight = done->model->head->weight.detach().cpu();
    EXPECT_TRUE(torch::equal(weight, done->trainer->accelerator()
                                         .communicator()
                                         ->all_gather_rows(weight, "of all ranks")
                                         .narrow(0, 0, weight.size(0))))
        << "rank 0's";
    EXPECT_TRUE(weight.isfinite().all().item<bool>());
    return done;
  };
  const Change slowmo = [](auto& a) { a.local_sgd_outer = Outer::slowmo; };
  const Change diloco = [](auto& a) { a.local_sgd_outer = Outer::diloco; };
  const Change lr = [](auto& a) { a.local_sgd_outer_lr = 0.4; };
  const Change momentum = [](auto& a) { a.local_sgd_outer_momentum = 0.2; };
  const Change inner = [](auto& a) { a.local_sgd_inner_steps = 1; };
  const std::vector<std::pair<std::vector<Change>, std::vector<Change>>> pairs{
      {{}, {[](auto& a) { a.local_sgd_post_local_start = 3; }}},
      {{}, {[](auto& a) { a.local_sgd_delay = 1; }}},
      {{}, {slowmo}},
      {{slowmo}, {slowmo, lr}},
      {{slowmo}, {slowmo, momentum}},
      {{slowmo}, {diloco}},
      {{diloco}, {diloco, lr}},
      {{diloco}, {diloco, momentum}},
      {{}, {inner}},
      {{inner}, {inner, [](auto& a) { a.local_sgd_group_size = 1; }}}};
  for (size_t i = 0; i < pairs.size(); ++i) {
    EXPECT_GT(toy::largest_difference(*run(pairs[i].first)->model, *run(pairs[i].second)->model),
              1e-6)
        << i;
  }
  // Rank 0 alone runs the outer step, so the others do not know the spread.
  const auto spread = [&](const std::vector<Change>& changes) {
    const auto done = run(changes);
    const auto& records = done->trainer->state().log_history;
    return records[records.size() - 2].at("local_sgd_spread").get<double>();
  };
  EXPECT_GT(spread({diloco}), 0);
  EXPECT_TRUE(std::isnan(spread({diloco, [](auto& a) { a.local_sgd_driver = true; }})));
}

// The first steps average gradients, whose windows are of all ranks. Then each rank has its own.
TEST(TrainerLocalSGD, PlainTrainingFirstCountsEachSampleOnce) {
  const int world = testing_support::test_world().world_size;
  const int64_t rows = 6 * world + 1; // 4 steps in an epoch; the last has rows on one rank
  for (const int64_t start : {1, 4, 6, 8}) {
    TrainingArguments a = local_arguments(2);
    a.local_sgd_post_local_start = start;
    const LocalRun run(a, rows);
    const auto& records = run.trainer->state().log_history;
    const auto& end = records.back();
    EXPECT_NEAR(
        end.at("train_samples_per_second").get<double>() * end.at("train_runtime").get<double>(),
        2.0 * static_cast<double>(rows), 1e-6)
        << start;
    EXPECT_EQ(run.trainer->state().global_step, 8);
    if (start == 8) { // no step is left for Local SGD
      TrainingArguments plain = local_arguments(0);
      EXPECT_EQ(toy::largest_difference(*run.model, *LocalRun(plain, rows).model), 0);
    } else if (world > 1) {
      EXPECT_EQ(records[records.size() - 2].at("local_sgd_rounds"), (8 - start) / 2) << start;
    }
  }
}

struct StopsAtThree final : TrainerCallback {
  void on_step_end(const StepProgress& progress) override {
    if (progress.global_step == 3) {
      control().should_training_stop = control().any_rank = true;
    }
  }
};

TEST(TrainerLocalSGD, WhatOneRankAsksBeforeTheFirstLocalStepAllDo) {
  const bool is_main = testing_support::test_world().rank == 0;
  TrainingArguments a = local_arguments(2);
  a.local_sgd_post_local_start = 3;
  const LocalRun run(a, 12 * testing_support::test_world().world_size,
                     is_main ? std::make_shared<StopsAtThree>() : nullptr);
  // With the next synchronisation, or alone with the next window.
  EXPECT_EQ(run.trainer->state().global_step, testing_support::test_world().world_size > 1 ? 5 : 4);
}

TEST(TrainerLocalSGD, ResumedItIsTheUninterruptedRun) {
  const auto store = testing_support::test_store();
  if (testing_support::test_world().rank == 0) {
    auto folder = std::make_shared<testing_support::TemporaryFolder>();
    testing_support::at_case_end([folder] {});
    store->set("folder", folder->path().string());
  }
  const std::filesystem::path folder = store->get_to_str("folder");
  const int64_t rows = 14 * testing_support::test_world().world_size + 3;
  TrainingArguments a = local_arguments(3);
  a.train_sampling_strategy = SamplingStrategy::random;
  a.gradient_accumulation_steps = 2;
  a.save_strategy = SaveStrategy::steps;
  a.eval_strategy = IntervalStrategy::steps;
  a.eval_steps = a.save_steps = 2; // in the middle of a round
  a.save_total_limit = 0;
  // Saved in plain training (4 of 5 steps), and in Local SGD.
  for (const int64_t start : {0, 3, 5}) {
    SCOPED_TRACE(start);
    const std::string name = std::to_string(start);
    a.local_sgd_post_local_start = start;
    a.local_sgd_outer = start == 3 ? LocalSGDOuter::slowmo : LocalSGDOuter::none;
    a.resume_from_checkpoint = {};
    a.output_dir = (folder / (name + "whole")).string();
    const LocalRun whole(a, rows);
    a.output_dir = (folder / (name + "rest")).string();
    a.resume_from_checkpoint = (folder / (name + "whole") / "checkpoint-4").string();
    const LocalRun rest(a, rows);
    EXPECT_EQ(toy::largest_difference(*whole.model, *rest.model), 0);
    EXPECT_EQ(whole.trainer->evaluate()["eval_loss"],
              rest.trainer->state().log_history[rest.trainer->state().log_history.size() - 2].at(
                  "eval_loss"));
  }
}

} // namespace hasten::local_sgd_trainer_test
