// A Trainer's options for gradients: kinds of clipping, norms in records, the names of parameters
// whose gradients are not finite. Worlds 1 to 4.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/data/loader.h"
#include "hasten/trainer/trainer.h"
#include "support/communicator.h"
#include "support/world.h"
#include "trainer/toy_text.h"

namespace hasten::gradient_options_test {

struct GradientRun {
  explicit GradientRun(const TrainingArguments& arguments, int64_t rows, LossFunction loss = {})
      : texts(std::make_shared<toy::Texts>(rows)) {
    AcceleratorOptions options;
    options.gradient_accumulation_steps = arguments.gradient_accumulation_steps;
    trainer = std::make_unique<Trainer>(
        model, loss ? std::move(loss) : toy::loss_function(model), arguments, texts, nullptr,
        ComputeMetrics{},
        std::make_shared<Accelerator>(options, testing_support::fresh_communicator()));
  }
  std::shared_ptr<toy::Texts> texts;
  std::shared_ptr<toy::Classifier> model = std::make_shared<toy::Classifier>();
  std::unique_ptr<Trainer> trainer;
};

/// 26 rows, 12 a step over all ranks: the last window is shorter.
TrainingArguments twelve_an_update() {
  TrainingArguments a = toy::arguments();
  a.gradient_accumulation_steps = 1;
  a.per_device_train_batch_size = 12 / testing_support::test_world().world_size;
  if (a.per_device_train_batch_size % 2 == 0) {
    a.per_device_train_batch_size /= 2;
    a.gradient_accumulation_steps = 2;
  }
  return a;
}

TEST(TrainerGradients, AnyNormAndValueClipAsAPlainLoopOverTheJoinedBatch) {
  for (const auto& [name, type] : spellings<GradNormType>()) {
    SCOPED_TRACE(name);
    TrainingArguments a = twelve_an_update();
    a.grad_norm_type = type;
    a.max_grad_norm = type == GradNormType::inf ? 0.02 : 0.1;
    a.max_grad_value = 0.004;
    const auto expected = toy::plain_run(toy::Texts(26), a, 12);
    GradientRun run(a, 26);
    run.trainer->train();
    EXPECT_LE(toy::largest_difference(*run.model, *expected.model), 1e-9);
    const auto norms = toy::history(*run.trainer, "grad_norm");
    ASSERT_EQ(norms.size(), expected.grad_norms.size());
    for (size_t i = 0; i < norms.size(); ++i) {
      EXPECT_NEAR(norms[i], expected.grad_norms[i], 1e-10);
      EXPECT_GT(norms[i], a.max_grad_norm) << "the case has a meaning";
    }
  }
}

TEST(TrainerGradients, ValuesAreClippedWithoutANormToo) {
  TrainingArguments a = twelve_an_update();
  a.max_grad_norm = 0;
  a.max_grad_value = 0.004;
  TrainingArguments plain = a;
  plain.max_grad_norm = 1e9;
  const auto expected = toy::plain_run(toy::Texts(26), plain, 12);
  GradientRun run(a, 26);
  run.trainer->train();
  EXPECT_LE(toy::largest_difference(*run.model, *expected.model), 1e-9);
  EXPECT_TRUE(toy::history(*run.trainer, "grad_norm").empty());
}

TEST(TrainerGradients, RecordsHaveTheNormsOfTheirUpdateBeforeClipping) {
  const std::map<LogGradientNorms, std::vector<std::string>> names{
      {LogGradientNorms::parameter,
       {"LayerNorm.bias", "LayerNorm.weight", "embedding.weight", "head.bias", "head.weight"}},
      {LogGradientNorms::module, {"LayerNorm", "embedding", "head"}},
      {LogGradientNorms::layer, {"LayerNorm", "embedding", "head"}}};
  for (const auto& [what, wanted] : names) {
    TrainingArguments a = twelve_an_update();
    a.logging_steps = 4; // of 9 steps: 4, 8, 9
    a.log_gradient_norms = what;
    GradientRun run(a, 26);
    run.trainer->train();
    int64_t records = 0;
    for (const auto& record : run.trainer->state().log_history) {
      if (!record.contains("grad_norm")) {
        continue;
      }
      ++records;
      double squares = 0;
      std::vector<std::string> found;
      for (const auto& [key, value] : record.items()) {
        if (key.rfind("grad_norm/", 0) == 0) {
          found.push_back(key.substr(10));
          squares += std::pow(value.get<double>(), 2);
        }
      }
      EXPECT_EQ(found, wanted);
      EXPECT_NEAR(std::sqrt(squares), record.at("grad_norm").get<double>(), 1e-12);
      EXPECT_GT(std::sqrt(squares), a.max_grad_norm) << "before clipping";
    }
    EXPECT_EQ(records, 3);
  }
  GradientRun without(twelve_an_update(), 12);
  without.trainer->train();
  EXPECT_TRUE(toy::history(*without.trainer, "grad_norm/head.bias").empty());
}

// The first step's gradients are of equal weights: each rank's own, averaged.
TEST(TrainerGradients, RecordsOfLocalSGDHaveTheRanksMeanNorms) {
  const int world = testing_support::test_world().world_size;
  TrainingArguments a = toy::arguments();
  a.per_device_train_batch_size = 2;
  a.local_sgd_steps = 2;
  a.max_steps = 2;
  a.warmup_steps = 0;
  a.log_gradient_norms = LogGradientNorms::parameter;
  GradientRun run(a, 2 * world + 1);
  double mean = 0;
  for (int rank = 0; rank < world; ++rank) {
    DataLoader loader(run.texts, {.batch_size = 2, .shuffle = false, .group_by_length = false});
    loader.shard(rank, world);
    toy::Classifier model;
    const Batch batch = *loader.begin();
    torch::nn::functional::cross_entropy(model.forward(batch["input_ids"], batch["attention_mask"]),
                                         batch["labels"])
        .backward();
    mean += model.head->weight.grad().norm().item<double>() / world;
  }
  run.trainer->train();
  const auto norms = toy::history(*run.trainer, "grad_norm/head.weight");
  ASSERT_EQ(norms.size(), 2U);
  EXPECT_NEAR(norms[0], mean, 1e-12);
  EXPECT_TRUE(std::isfinite(norms[1])) << "one rank had rows";
}

// The derivative of sqrt at 0 is infinite, and 0 times infinity is NaN. Only head.bias gets it.
TEST(TrainerGradients, AGradientThatIsNotFiniteNamesItsParameterOnEveryRank) {
  const World& world = testing_support::test_world();
  for (const bool by_value : {false, true}) {
    TrainingArguments a = toy::arguments();
    a.per_device_train_batch_size = 2;
    if (by_value) {
      a.max_grad_norm = 0;
      a.max_grad_value = 1;
    }
    int calls = 0;
    GradientRun run(a, 8 * world.world_size, [&](const Batch& batch) {
      LossOutput output = toy::loss_function(run.model)(batch);
      if (++calls == 2 && world.rank == world.world_size - 1) {
        const at::Tensor& bias = run.model->head->bias;
        output.loss_sum = output.loss_sum + (bias - bias.detach()).sqrt().sum() * 0;
      }
      return output;
    });
    try {
      run.trainer->train();
      FAIL() << "trained on";
    } catch (const TrainingError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("step 2 of 12"), text.npos) << text;
      EXPECT_NE(text.find("first in head.bias, in 1 of 5 parameters"), text.npos) << text;
    }
    EXPECT_EQ(run.trainer->state().global_step, 1);
    for (const at::Tensor& parameter : run.model->parameters()) {
      EXPECT_TRUE(parameter.isfinite().all().item<bool>());
    }
  }
}

} // namespace hasten::gradient_options_test
