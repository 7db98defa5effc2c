// Trainer with local_sgd_steps. Worlds 1 to 4.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>

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
  explicit LocalRun(TrainingArguments arguments, int64_t rows)
      : texts(std::make_shared<toy::Texts>(rows)) {
    AcceleratorOptions options;
    options.gradient_accumulation_steps = arguments.gradient_accumulation_steps;
    trainer = std::make_unique<Trainer>(
        model, toy::loss_function(model), arguments, texts, std::make_shared<toy::Texts>(9),
        ComputeMetrics{},
        std::make_shared<Accelerator>(options, testing_support::fresh_communicator()));
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
  a.save_strategy = a.eval_strategy = IntervalStrategy::steps;
  a.eval_steps = a.save_steps = 2; // in the middle of a round
  a.save_total_limit = 0;
  a.output_dir = (folder / "whole").string();
  const LocalRun whole(a, rows);
  a.output_dir = (folder / "rest").string();
  a.resume_from_checkpoint = (folder / "whole" / "checkpoint-4").string();
  const LocalRun rest(a, rows);
  EXPECT_EQ(toy::largest_difference(*whole.model, *rest.model), 0);
  EXPECT_EQ(whole.trainer->evaluate()["eval_loss"],
            rest.trainer->state().log_history[rest.trainer->state().log_history.size() - 2].at(
                "eval_loss"));
}

} // namespace hasten::local_sgd_trainer_test
