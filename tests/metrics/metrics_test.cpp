// Values equal scikit-learn's and SciPy's, and do not depend on the split of the samples.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/metrics/auroc.h"
#include "hasten/metrics/classification.h"
#include "hasten/metrics/perplexity.h"
#include "hasten/metrics/regression.h"
#include "metrics_golden.h"

namespace hasten::metrics_test {

using at::Tensor;

Tensor doubles(const std::vector<double>& values) { return torch::tensor(values, torch::kDouble); }
Tensor integers(const std::vector<int64_t>& values) { return torch::tensor(values, torch::kLong); }

#define EXPECT_SAME(value, expected)                          \
  if (std::isnan(expected)) {                                 \
    EXPECT_TRUE(std::isnan(value)) << (value);                \
  } else {                                                    \
    EXPECT_NEAR(value, expected, 1e-14 * std::abs(expected)); \
  }

// Updates one metric with (first, second) in a single batch.
template <typename M>
double of_all(M metric, const Tensor& first, const Tensor& second) {
  metric.update(first, second);
  return metric.compute();
}

// Feeds the same samples in random order and pieces to four instances and merges their states, as
// batches and ranks do.
template <typename M>
double of_pieces(const M& empty, Tensor first, Tensor second, int seed) {
  torch::manual_seed(seed);
  const int64_t rows = first.size(0);
  const Tensor order = torch::randperm(rows);
  first = first.index_select(0, order);
  second = second.index_select(0, order);
  std::vector<M> ranks(4, empty);
  for (int64_t begin = 0; begin < rows;) {
    const int64_t count = std::min<int64_t>(rows - begin, torch::randint(0, 6, {}).item<int64_t>());
    const auto rank = torch::randint(0, 3, {}).item<int64_t>(); // instance 3 gets no samples
    ranks[static_cast<size_t>(rank)].update(first.narrow(0, begin, count),
                                            second.narrow(0, begin, count));
    begin += count;
  }
  M joined = empty;
  if (joined.state_is_sum()) {
    Tensor sum = ranks[0].state().clone();
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      sum += ranks[rank].state();
    }
    joined.set_state(sum);
  } else {
    for (const M& rank : ranks) {
      joined.merge_state(rank.state());
    }
  }
  return joined.compute();
}

TEST(ClassificationMetrics, AveragesAreScikitLearns) {
  ClassificationMetrics metrics(5);
  metrics.update(integers(golden::kPredicted).to(torch::kInt), integers(golden::kLabels));
  EXPECT_DOUBLE_EQ(metrics.accuracy(), golden::kAccuracy);
  EXPECT_DOUBLE_EQ(metrics.matthews_corrcoef(), golden::kMatthews);
  EXPECT_DOUBLE_EQ(metrics.precision(Average::micro), golden::kMicroPrecision);
  EXPECT_DOUBLE_EQ(metrics.recall(Average::micro), golden::kMicroRecall);
  EXPECT_DOUBLE_EQ(metrics.f1(Average::micro), golden::kMicroF1);
  EXPECT_DOUBLE_EQ(metrics.precision(), golden::kMacroPrecision);
  EXPECT_DOUBLE_EQ(metrics.recall(), golden::kMacroRecall);
  EXPECT_DOUBLE_EQ(metrics.f1(), golden::kMacroF1);
  EXPECT_DOUBLE_EQ(metrics.precision(Average::weighted), golden::kWeightedPrecision);
  EXPECT_DOUBLE_EQ(metrics.recall(Average::weighted), golden::kWeightedRecall);
  EXPECT_DOUBLE_EQ(metrics.f1(Average::weighted), golden::kWeightedF1);
  EXPECT_TRUE(torch::equal(metrics.confusion_matrix().flatten(), integers(golden::kConfusion)));
}

TEST(ClassificationMetrics, ACopyCountsForItself) {
  ClassificationMetrics metrics(2);
  metrics.update(integers({0, 1}), integers({0, 0}));
  ClassificationMetrics copy = metrics;
  copy.merge_state(metrics.state());
  EXPECT_EQ(metrics.rows(), 2);
  EXPECT_EQ(copy.rows(), 4);
  // With one class the correlation is undefined.
  EXPECT_EQ(metrics.matthews_corrcoef(), 0);
  EXPECT_EQ(ClassificationMetrics(2).f1(Average::weighted), 0);
  EXPECT_THROW(metrics.update(integers({2}), integers({0})), InputError);
}

TEST(Metrics, EqualScikitLearnAndScipy) {
  const Tensor p = doubles(golden::kPredictions);
  const Tensor t = doubles(golden::kTargets);
  EXPECT_SAME(of_all(MeanSquaredError(), p, t), golden::kMse);
  EXPECT_SAME(of_all(MeanSquaredError(false), p, t), golden::kRmse);
  EXPECT_SAME(of_all(MeanAbsoluteError(), p, t), golden::kMae);
  EXPECT_SAME(of_all(R2Score(), p, t), golden::kR2);
  EXPECT_SAME(of_all(PearsonCorrCoef(), p, t), golden::kPearson);
  EXPECT_SAME(of_all(SpearmanCorrCoef(), p, t), golden::kSpearman);
  EXPECT_SAME(of_all(Auroc(), doubles(golden::kScores), integers(golden::kBinaryLabels)),
              golden::kAuroc);
}

TEST(Metrics, EveryEdgeIsWhatScikitLearnAndScipyGive) {
  const Tensor alike = doubles({0.5, 0.5, 0.5});
  const Tensor rising = doubles({0.1, 0.2, 0.3});
  EXPECT_SAME(of_all(R2Score(), alike, alike), golden::kR2AlikeRight);
  EXPECT_SAME(of_all(R2Score(), rising, alike), golden::kR2AlikeWrong);
  // A plain sum of three times 0.1, divided by 3, is not 0.1.
  EXPECT_SAME(of_all(R2Score(), rising, alike / 5), golden::kR2AlikeWrong);
  EXPECT_SAME(of_all(R2Score(), doubles({2}), doubles({1})), golden::kR2OneRow);
  EXPECT_SAME(of_all(PearsonCorrCoef(), alike, rising), golden::kPearsonAlike);
  EXPECT_SAME(of_all(SpearmanCorrCoef(), alike, rising), golden::kSpearmanAlike);
  EXPECT_SAME(of_all(Auroc(), rising, integers({1, 1, 1})), golden::kAurocOneClass);
  // No samples, and a NaN.
  const Tensor none = torch::empty({0}, torch::kDouble);
  const Tensor nan = doubles({0.1, golden::kNan, 0.5});
  const auto is_nan = [&](auto metric) {
    return std::isnan(of_all(metric, none, none)) && std::isnan(of_all(metric, nan, rising)) &&
           std::isnan(of_all(metric, rising, nan));
  };
  EXPECT_TRUE(is_nan(MeanSquaredError()));
  EXPECT_TRUE(is_nan(MeanAbsoluteError()));
  EXPECT_TRUE(is_nan(R2Score()));
  EXPECT_TRUE(is_nan(PearsonCorrCoef()));
  EXPECT_TRUE(is_nan(SpearmanCorrCoef()));
  EXPECT_TRUE(std::isnan(of_all(Auroc(), nan, integers({0, 1, 1}))));
  EXPECT_TRUE(std::isnan(Auroc().compute()));
  EXPECT_TRUE(std::isnan(Perplexity().compute()));
}

TEST(Metrics, AnySplitOfTheRowsGivesTheSameValue) {
  torch::manual_seed(5);
  const Tensor t = torch::randn({300}, torch::kDouble).mul(10).round().div(10);
  const Tensor p = (t + torch::randn({300}, torch::kDouble)).mul(10).round();
  const Tensor labels = t.gt(0).to(torch::kLong);
  for (int seed = 0; seed < 3; ++seed) {
    const auto expect_close = [&](const auto& metric) {
      const double all = of_all(metric, p, t);
      EXPECT_NEAR(of_pieces(metric, p, t, seed), all, 1e-13 * std::abs(all));
    };
    expect_close(MeanSquaredError());
    expect_close(MeanAbsoluteError());
    expect_close(R2Score());
    expect_close(PearsonCorrCoef());
    // These states are counts. They are equal bit for bit, also if pairs were dropped.
    for (const int64_t capacity : {8, 65536}) {
      const SpearmanCorrCoef metric(capacity);
      EXPECT_EQ(of_pieces(metric, p, t, seed), of_all(metric, p, t));
    }
    const Auroc auroc({.from_logits = true});
    EXPECT_EQ(of_pieces(auroc, p, labels, seed), of_all(auroc, p, labels));
  }
}

// Sums of squares would lose all digits here: the values are 1e8 ± 1.
TEST(Metrics, ALargeMeanCostsNoDigits) {
  torch::manual_seed(6);
  const Tensor t = torch::randint(-4, 5, {200}, torch::kDouble);
  const Tensor p = t + torch::randint(-2, 3, {200}, torch::kDouble);
  const auto near = [&](const auto& metric) {
    const double expected = of_all(metric, p, t);
    EXPECT_NEAR(of_all(metric, p + 1e8, t + 1e8), expected, 1e-12);
    EXPECT_NEAR(of_pieces(metric, p + 1e8, t + 1e8, 1), expected, 1e-12);
  };
  near(R2Score());
  near(PearsonCorrCoef());
}

TEST(Auroc, IsWithinItsBoundOfAllPairsCompared) {
  torch::manual_seed(7);
  const Tensor labels = torch::randint(0, 2, {2000}, torch::kLong);
  const Tensor logits = torch::randn({2000}) + labels;
  const Tensor positive = logits.masked_select(labels.eq(1)).unsqueeze(1);
  const Tensor negative = logits.masked_select(labels.eq(0)).unsqueeze(0);
  const double exact =
      (positive.gt(negative).to(torch::kDouble) + positive.eq(negative).to(torch::kDouble) / 2)
          .mean()
          .item<double>();
  for (const int64_t bins : {20, 16384}) {
    Auroc metric({.bins = bins, .from_logits = true});
    metric.update(logits, labels);
    EXPECT_NEAR(metric.compute(), exact, metric.error_bound()) << bins;
    EXPECT_LT(metric.error_bound(), bins == 20 ? 0.4 : 0.0005);
  }
  // Probabilities, as one column or two, of any float type.
  Auroc one, two;
  one.update(torch::sigmoid(logits.to(torch::kDouble)), labels);
  two.update(torch::softmax(torch::stack({-logits / 2, logits / 2}, 1), 1), labels);
  EXPECT_NEAR(one.compute(), exact, one.error_bound());
  EXPECT_NEAR(two.compute(), exact, two.error_bound());
}

TEST(SpearmanCorrCoef, SamplesBeyondItsCapacityAndSaysSo) {
  torch::manual_seed(8);
  const Tensor t = torch::randn({20000}, torch::kDouble);
  const Tensor p = t + torch::randn({20000}, torch::kDouble);
  SpearmanCorrCoef exact, sampled(2000);
  exact.update(p, t);
  sampled.update(p, t);
  EXPECT_TRUE(exact.is_exact());
  EXPECT_FALSE(sampled.is_exact());
  EXPECT_NE(sampled.compute(), exact.compute());
  EXPECT_NEAR(sampled.compute(), exact.compute(), 4 / std::sqrt(2000.0));
  // Repeated pairs increase a count and are not stored again.
  SpearmanCorrCoef repeated(1000);
  for (int i = 0; i < 5; ++i) {
    repeated.update(p.narrow(0, 0, 900), t.narrow(0, 0, 900));
  }
  EXPECT_TRUE(repeated.is_exact());
}

TEST(Perplexity, IsOverAllTokensWhateverTheBatches) {
  torch::manual_seed(9);
  const Tensor logits = torch::randn({6, 5, 11});
  const Tensor labels = torch::randint(0, 11, {6, 5}, torch::kLong);
  labels.narrow(0, 4, 2).narrow(1, 1, 4).fill_(-100); // short rows
  const double loss = torch::nn::functional::cross_entropy(logits.to(torch::kDouble).view({30, 11}),
                                                           labels.view({30}))
                          .item<double>();
  EXPECT_NEAR(of_all(Perplexity(), logits, labels), std::exp(loss), 1e-5);
  EXPECT_NEAR(of_pieces(Perplexity(), logits, labels, 3), std::exp(loss), 1e-5);
  Perplexity by_sum;
  by_sum.update(loss * 22, 22);
  EXPECT_DOUBLE_EQ(by_sum.compute(), std::exp(loss));
}

TEST(Metrics, WrongShapesLabelsAndStatesAreNamed) {
  MeanSquaredError mse;
  EXPECT_THROW(mse.update(torch::zeros({3, 1}), torch::zeros({3})), InputError);
  PearsonCorrCoef pearson;
  EXPECT_THROW(pearson.update(torch::zeros({3, 2}), torch::zeros({3, 2})), InputError);
  EXPECT_THROW(pearson.set_state(mse.state()), InputError);
  Auroc auroc;
  EXPECT_THROW(auroc.update(doubles({1.5}), integers({1})), InputError);
  EXPECT_THROW(auroc.update(doubles({0.5}), integers({2})), InputError);
  EXPECT_THROW(auroc.merge_state(Auroc({.bins = 4}).state()), InputError);
  Perplexity perplexity;
  EXPECT_THROW(perplexity.update(torch::zeros({2, 3}), integers({0, 3})), InputError);
  EXPECT_THROW(SpearmanCorrCoef(1), InputError);
}

} // namespace hasten::metrics_test
