// An evaluation gives the same values on any number of ranks.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "hasten/accelerator/accelerator.h"
#include "hasten/metrics/regression.h"
#include "hasten/models/auto_model.h"
#include "hasten/trainer/trainer.h"
#include "support/communicator.h"
#include "support/world.h"
#include "trainer/toy_text.h"

namespace hasten::evaluation_test {

std::shared_ptr<Accelerator> accelerator_of(int64_t window) {
  AcceleratorOptions options;
  options.gradient_accumulation_steps = window;
  return std::make_shared<Accelerator>(options, testing_support::fresh_communicator());
}

// Logits near 0. If a sum is not divided, or not divided often enough, the first record and the
// evaluation show it.
TEST(TrainerEvaluation, TwoClassesStartAtTheLogarithmOfTwoOnAnySplit) {
  PreTrainedConfig config = AutoConfig::from_shape("bert-tiny", toy::kWords);
  config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0;
  config.max_position_embeddings = 16;
  config.id2label = {"no", "yes"};
  const int world_size = testing_support::test_world().world_size;
  const auto texts = std::make_shared<toy::Texts>(24);
  for (const int64_t window : {1, 3}) {
    SCOPED_TRACE("accumulation " + std::to_string(window));
    torch::manual_seed(5);
    auto bert = AutoModelForSequenceClassification::from_config(config);
    TrainingArguments arguments = toy::arguments();
    arguments.per_device_train_batch_size = 2;
    arguments.gradient_accumulation_steps = window;
    arguments.max_steps = 1;
    arguments.warmup_steps = 0;
    const auto loss_of = [bert](const Batch& rows) mutable {
      const at::Tensor logits = bert->forward({rows["input_ids"], rows["attention_mask"]}).logits;
      const at::Tensor loss = torch::nn::functional::cross_entropy(
          logits, rows["labels"] % 2,
          torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
      return LossOutput{loss, static_cast<double>(rows.rows()), logits};
    };
    Trainer trainer(bert.ptr(), loss_of, arguments, texts, texts, ComputeMetrics{},
                    accelerator_of(window));
    EXPECT_NEAR(trainer.evaluate().at("eval_loss").get<double>(), std::log(2.0), 0.02);
    std::vector<int64_t> first(static_cast<size_t>(2 * window * world_size));
    std::iota(first.begin(), first.end(), 0);
    const double plain = [&] {
      const at::NoGradGuard no_grad;
      return LossFunction(loss_of)(toy::on_run_device(texts->collate(first)))
                 .loss_sum.item<double>() /
             static_cast<double>(first.size());
    }();
    trainer.train();
    const auto losses = toy::history(trainer, "loss");
    ASSERT_EQ(losses.size(), 1u);
    EXPECT_NEAR(losses[0], plain, 1e-6);
    EXPECT_NEAR(losses[0], std::log(2.0), 0.02);
  }
}

// Metrics whose states are summed over ranks, and metrics whose states are merged. A second
// evaluation starts from empty metrics again.
TEST(TrainerEvaluation, AnyMetricOfAnEvaluationIsThatOfAllRows) {
  const toy::Texts texts(29);
  auto model = std::make_shared<toy::Classifier>();
  const auto score = [model](const Batch& batch) { // [B]
    return model->forward(batch["input_ids"], batch["attention_mask"]).select(1, 0);
  };
  TrainingArguments arguments = toy::arguments();
  arguments.per_device_eval_batch_size = 3;
  Trainer trainer(
      model,
      [&](const Batch& batch) {
        const at::Tensor error = score(batch) - batch["labels"];
        return LossOutput{error.square().sum(), static_cast<double>(batch.rows()), score(batch)};
      },
      arguments, nullptr, nullptr,
      named_metrics("labels", std::pair("mse", MeanSquaredError()), std::pair("r2", R2Score()),
                    std::pair("pearson", PearsonCorrCoef()),
                    std::pair("spearman", SpearmanCorrCoef(64))),
      accelerator_of(1));
  std::vector<int64_t> all(29);
  std::iota(all.begin(), all.end(), 0);
  const Batch joined = toy::on_run_device(texts.collate(all));
  const at::NoGradGuard no_grad;
  model->eval();
  const auto value_of = [&](auto metric) {
    metric.update(score(joined), joined["labels"]);
    return metric.compute();
  };
  for (int time = 0; time < 2; ++time) {
    const auto record = trainer.evaluate(texts);
    const double mse = record.at("eval_mse");
    EXPECT_NEAR(mse, value_of(MeanSquaredError()), 1e-12);
    EXPECT_NEAR(mse, record.at("eval_loss").get<double>(), 1e-12);
    EXPECT_NEAR(record.at("eval_r2"), value_of(R2Score()), 1e-12);
    EXPECT_NEAR(record.at("eval_pearson"), value_of(PearsonCorrCoef()), 1e-12);
    EXPECT_NEAR(record.at("eval_spearman"), value_of(SpearmanCorrCoef(64)), 1e-12);
  }
}

TEST(TrainerEvaluation, TheMostWrongSamplesAreThoseWithTheGreatestLossOnAnyNumberOfRanks) {
  const toy::Texts texts(61);
  auto model = std::make_shared<toy::Classifier>();
  std::vector<int64_t> all(61);
  std::iota(all.begin(), all.end(), 0);
  const Batch joined = texts.collate(all);
  const at::NoGradGuard no_grad;
  model->eval();
  // Samples in pairs of equal losses; every third one is right.
  const auto score = [](const at::Tensor& labels, const std::vector<int64_t>& samples) {
    at::Tensor logits = at::zeros({std::ssize(samples), toy::kLabels});
    for (size_t i = 0; i < samples.size(); ++i) {
      const int64_t label = labels[static_cast<int64_t>(i)].item<int64_t>();
      const int64_t shown = samples[i] % 3 == 0 ? label : (label + 1) % toy::kLabels;
      logits[static_cast<int64_t>(i)][shown] = static_cast<double>(1 + samples[i] / 2);
    }
    return logits;
  };
  TrainingArguments arguments = toy::arguments();
  arguments.per_device_eval_batch_size = 3;
  Trainer trainer(
      model,
      [&](const Batch& batch) {
        const at::Tensor logits = score(batch["labels"], batch.indices);
        return LossOutput{logits.sum(), static_cast<double>(batch.rows()), logits};
      },
      arguments, nullptr, nullptr, classification_metrics(toy::kLabels), accelerator_of(1));
  trainer.evaluate(texts);
  const auto worst = trainer.evaluation_report().at("most_wrong");
  ASSERT_EQ(worst.size(), 20u);
  std::vector<int64_t> expected;
  for (int64_t pair = 30; expected.size() < 20; --pair) {
    for (const int64_t sample : {2 * pair, 2 * pair + 1}) {
      if (sample % 3 != 0 && sample < 61 && expected.size() < 20) {
        expected.push_back(sample);
      }
    }
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(worst[i].at("sample"), expected[i]);
    const auto label = joined["labels"][expected[i]].item<int64_t>();
    EXPECT_EQ(worst[i].at("label"), std::to_string(label));
    EXPECT_EQ(worst[i].at("predicted"), std::to_string((label + 1) % toy::kLabels));
    const auto margin = static_cast<double>(1 + expected[i] / 2);
    EXPECT_NEAR(worst[i].at("loss"), margin + std::log1p((toy::kLabels - 1) * std::exp(-margin)),
                1e-12);
  }
}

TEST(ReportText, TablesFitTheColumnsAndAMatrixThatDoesNotIsSaidToBeInItsFile) {
  const auto scores = [](double recall, int64_t support) {
    return nlohmann::json{
        {"precision", 0.5}, {"recall", recall}, {"f1", 0.6667}, {"support", support}};
  };
  const std::string name = "a very long name of a label";
  nlohmann::json report = {
      {"per_class", {{"neg", scores(0.25, 1200)}, {name, scores(1, 8)}}},
      {"confusion_matrix", {{"labels", {"neg", name}}, {"counts", {{300, 900}, {0, 8}}}}}};
  const std::string table =
      "label                precision    recall        f1   samples\n"
      "a very long name o…     0.5000    1.0000    0.6667         8\n"
      "neg                     0.5000    0.2500    0.6667     1,200\n";
  EXPECT_EQ(report_text(report, 60, "a.json"),
            table +
                "\ntrue                         predicted as\n"
                "                                        neg  a very long n…\n"
                "neg                                     300             900\n"
                "a very long name of a label               0               8\n");
  EXPECT_EQ(report_text(report, 0).find("…"), std::string::npos);
  const std::vector<std::string> labels(10, name);
  const std::vector<std::vector<int64_t>> counts(10, std::vector<int64_t>(10, 7));
  report["confusion_matrix"] = {{"labels", labels}, {"counts", counts}};
  EXPECT_EQ(report_text(report, 60, "a.json"),
            table + "\nThe confusion matrix does not fit. It is in a.json.\n");
  EXPECT_EQ(report_text(report, 60), table);
  EXPECT_NE(report_text(report, 80).find("predicted as"), std::string::npos);
}

} // namespace hasten::evaluation_test
