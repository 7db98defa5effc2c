// Losses equal torch's (tools/golden/trainer.py).
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "hasten/base/error.h"
#include "hasten/metrics/multi_label.h"
#include "hasten/trainer/losses.h"
#include "trainer/toy_text.h"
#include "trainer/trainer_golden.h"
#include "trainer/trainer_parts.h"

namespace hasten::trainer_losses_test {

using namespace trainer_golden;

at::Tensor golden(const std::vector<double>& values) {
  return at::tensor(values, at::kDouble).view({7, 3});
}

double mean_of(const LossOutput& output) { return output.loss_sum.item<double>() / output.weight; }

TEST(TrainerLosses, CrossEntropyIsTorchsWithWeightsAndSmoothing) {
  const at::Tensor logits = golden(kLogits);
  const at::Tensor labels = at::tensor(kLabels, at::kLong);
  const auto loss = [&](double smoothing, std::vector<double> weights) {
    return mean_of(cross_entropy_output(
        logits, labels, {.label_smoothing = smoothing, .class_weights = std::move(weights)}));
  };
  EXPECT_NEAR(loss(0, {}), kPlain, 1e-12);
  EXPECT_NEAR(loss(0.2, {}), kSmoothed, 1e-12);
  EXPECT_NEAR(loss(0.2, {}), kLabelSmoother, 1e-7); // torch sums in fp32
  EXPECT_NEAR(loss(0, kClassWeights), kWeighted, 1e-12);
  EXPECT_NEAR(loss(0.2, kClassWeights), kWeightedAndSmoothed, 1e-12);
}

TEST(TrainerLosses, AnySplitOfTheRowsAddsUpToTheWholesLoss) {
  const at::Tensor logits = golden(kLogits);
  const at::Tensor labels = at::tensor(kLabels, at::kLong);
  double loss = 0, weight = 0;
  for (const auto& [from, to] : {std::pair(0, 1), {1, 4}, {4, 7}}) {
    const LossOutput part =
        cross_entropy_output(logits.slice(0, from, to), labels.slice(0, from, to),
                             {.label_smoothing = 0.2, .class_weights = kClassWeights});
    loss += part.loss_sum.item<double>();
    weight += part.weight;
  }
  EXPECT_NEAR(loss / weight, kWeightedAndSmoothed, 1e-12);
}

TEST(TrainerLosses, TokensAreRowsOfTheirOwn) {
  const at::Tensor logits = golden(kLogits).slice(0, 0, 6);
  const at::Tensor labels = at::tensor(kLabels, at::kLong).slice(0, 0, 6);
  const LossOutput flat = cross_entropy_output(logits, labels);
  const LossOutput shaped = cross_entropy_output(logits.view({2, 3, 3}), labels.view({2, 3}));
  EXPECT_EQ(mean_of(shaped), mean_of(flat));
  EXPECT_EQ(shaped.weight, 5); // one label is -100
}

TEST(TrainerLosses, RegressionAndSeveralLabelsAreTorchs) {
  const at::Tensor logits = golden(kLogits);
  const at::Tensor targets = golden(kTargets);
  EXPECT_NEAR(mean_of(bce_with_logits_output(logits, targets)), kBce, 1e-12);
  EXPECT_NEAR(mean_of(bce_with_logits_output(logits, targets, kClassWeights)), kBcePosWeight,
              1e-12);
  const LossOutput mse = mse_output(logits.slice(1, 0, 1), targets.select(1, 1).to(at::kFloat));
  EXPECT_NEAR(mean_of(mse), kMse, 1e-12);
  EXPECT_EQ(mse.outputs.sizes(), (std::vector<int64_t>{7}));
}

TEST(MultiLabelMetrics, AreScikitLearnsForAnySplitOfTheRows) {
  const at::Tensor logits = golden(kLogits);
  const at::Tensor targets = golden(kTargets);
  MultiLabelMetrics whole(3), first(3), second(3);
  whole.update(logits, targets);
  first.update(logits.slice(0, 0, 2), targets.slice(0, 0, 2));
  second.update(logits.slice(0, 2), targets.slice(0, 2));
  first.merge_state(second.state());
  for (const auto& metrics : {whole, first}) {
    EXPECT_EQ(metrics.rows(), 7);
    EXPECT_NEAR(metrics.f1(Average::micro), kF1Micro, 1e-15);
    EXPECT_NEAR(metrics.f1(Average::macro), kF1Macro, 1e-15);
    EXPECT_NEAR(metrics.accuracy(), kSubsetAccuracy, 1e-15);
  }
  EXPECT_THROW(whole.update(logits, targets * 2), InputError);
  EXPECT_THROW(whole.update(logits.slice(1, 0, 2), targets), InputError);
}

/// What the Trainer computes with label smoothing from an own loss function of `logits` and `labels`.
LossOutput smoothed(const LossFunction& own, const at::Tensor& labels) {
  const LossFunction loss = detail::with_objective(own, {.label_smoothing = 0.2}, false);
  const Batch batch{{{"labels", labels}},
                    std::vector<int64_t>(static_cast<size_t>(labels.size(0)))};
  const LossOutput first = loss(batch);
  EXPECT_EQ(loss(batch).loss_sum.item<double>(), first.loss_sum.item<double>());
  return first;
}

TEST(TrainerLosses, SmoothingShiftsTheLabelsOfACausalLoss) {
  torch::manual_seed(3);
  const at::Tensor logits = at::randn({2, 6, 9}, at::kDouble);
  at::Tensor labels = at::randint(0, 9, {2, 6});
  labels[1].slice(0, 0, 3).fill_(-100);
  const at::Tensor next = at::constant_pad_nd(labels.slice(1, 1), {0, 1}, -100);
  for (const at::Tensor& truth : {labels, next}) {
    const LossOutput wanted = cross_entropy_output(logits, truth, {.label_smoothing = 0.2});
    const LossOutput found =
        smoothed([&](const Batch&) { return cross_entropy_output(logits, truth); }, labels);
    EXPECT_EQ(mean_of(found), mean_of(wanted));
    EXPECT_EQ(found.weight, wanted.weight);
  }
}

TEST(TrainerLosses, SmoothingReplacesNoOtherLossOfYourOwn) {
  const at::Tensor logits = golden(kLogits);
  const at::Tensor labels = at::tensor(kLabels, at::kLong);
  const auto error = [&](double times, double weight) {
    try {
      smoothed(
          [&](const Batch&) {
            LossOutput own = cross_entropy_output(logits, labels);
            own.loss_sum = own.loss_sum * times;
            own.weight = own.weight + weight;
            return own;
          },
          labels);
    } catch (const InputError& refusal) {
      return std::string(refusal.what());
    }
    return std::string();
  };
  EXPECT_EQ(error(1, 0), "");
  for (const std::string& what : {error(2, 0), error(1, 1)}) { // focal, or by another count
    EXPECT_NE(what.find("label_smoothing_factor or class_weights"), std::string::npos) << what;
    EXPECT_NE(what.find("a loss function of your own"), std::string::npos) << what;
  }
}

TEST(TrainerLosses, BalancedWeightsAreScikitLearnsAndUnseenLabelsCountOne) {
  class Labels : public Dataset {
   public:
    int64_t size() const override { return 3000; }
    Batch collate(const std::vector<int64_t>& rows) const override {
      at::Tensor labels = at::tensor(rows, at::kLong).remainder(10);
      // Of ten 0 to 9: one 0, nine 2.
      labels = at::where(labels.eq(0), labels, at::full_like(labels, 2));
      return {{{"labels", labels}}, rows};
    }
  };
  const Labels data;
  const auto weights = resolve_class_weights("balanced", &data);
  ASSERT_EQ(weights.size(), 3u);
  EXPECT_DOUBLE_EQ(weights[0], 3000 / (2.0 * 300));
  EXPECT_DOUBLE_EQ(weights[1], 1);
  EXPECT_DOUBLE_EQ(weights[2], 3000 / (2.0 * 2700));
  EXPECT_THROW(resolve_class_weights("balanced", nullptr), InputError);
  EXPECT_EQ(resolve_class_weights("0.5,2", nullptr), (std::vector<double>{0.5, 2}));
  EXPECT_TRUE(resolve_class_weights("", nullptr).empty());
}

TEST(TrainerLosses, WhatDoesNotFitIsRefusedWithItsForm) {
  const auto refusal = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const InputError& error) {
      return error.what();
    }
    return "no error";
  };
  const at::Tensor logits = golden(kLogits);
  const at::Tensor labels = at::tensor(kLabels, at::kLong);
  const std::string floats = refusal([&] { cross_entropy_output(logits, labels.to(at::kDouble)); });
  EXPECT_NE(floats.find("Double [7]"), std::string::npos) << floats;
  const std::string weights =
      refusal([&] { cross_entropy_output(logits, labels, {.class_weights = {1, 2}}); });
  EXPECT_NE(weights.find("class_weights of 2 labels for a model with 3"), std::string::npos)
      << weights;
  EXPECT_NE(refusal([&] { mse_output(logits, logits); }).find("[7, 3]"), std::string::npos);
  for (const char* text : {"1,,2", "0,1", "-1", "balance", "1,2,", "nan"}) {
    EXPECT_NE(refusal([&] {
                class_weight_numbers(text);
              }).find(std::string("class_weights=\"") + text + "\""),
              std::string::npos)
        << text;
  }
}

} // namespace hasten::trainer_losses_test
