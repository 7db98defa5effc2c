#include "hasten/metrics/classification.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include "hasten/base/error.h"

namespace hasten {

// Logits whose largest entry is at the given label. [row]
at::Tensor logits_for(const std::vector<int64_t>& predicted, int64_t labels) {
  auto logits = torch::zeros({static_cast<int64_t>(predicted.size()), labels});
  for (size_t row = 0; row < predicted.size(); ++row) {
    logits[static_cast<int64_t>(row)][predicted[row]] = 1.5;
  }
  return logits;
}

const std::vector<int64_t> kTruth{0, 0, 0, 1, 1, 2, 2, 2, 2, 0, 1, 2, 0, 1};
const std::vector<int64_t> kPredicted{0, 1, 0, 1, 2, 2, 2, 0, 2, 0, 1, 1, 0, 3};

// scikit-learn 1.9.1: accuracy_score, f1_score(average="macro"),
// precision_recall_fscore_support with zero_division=0 of the rows above.
TEST(ClassificationMetrics, EqualScikitLearn) {
  ClassificationMetrics metrics(5); // label 3 is predicted only, label 4 never
  metrics.update(logits_for(kPredicted, 5), torch::tensor(kTruth));
  const auto values = metrics.compute();
  EXPECT_DOUBLE_EQ(values.at("accuracy"), 0.6428571428571429);
  EXPECT_DOUBLE_EQ(values.at("f1"), 0.4916666666666667);
  const auto scores = metrics.per_class();
  const double precision[] = {0.8, 0.5, 0.75, 0, 0};
  const double recall[] = {0.8, 0.5, 0.6, 0, 0};
  const double f1[] = {0.8, 0.5, 2.0 / 3, 0, 0};
  const int64_t support[] = {5, 4, 5, 0, 0};
  for (size_t label = 0; label < 5; ++label) {
    EXPECT_DOUBLE_EQ(scores[label].precision, precision[label]);
    EXPECT_DOUBLE_EQ(scores[label].recall, recall[label]);
    EXPECT_DOUBLE_EQ(scores[label].f1, f1[label]);
    EXPECT_EQ(scores[label].support, support[label]);
  }
}

TEST(ClassificationMetrics, SumOfStatesEqualsTheJoinedRows) {
  ClassificationMetrics joined(4);
  joined.update(logits_for(kPredicted, 4), torch::tensor(kTruth));
  ClassificationMetrics parts[2] = {ClassificationMetrics(4), ClassificationMetrics(4)};
  for (size_t row = 0; row < kTruth.size(); ++row) {
    parts[row % 3 == 0].update(logits_for({kPredicted[row]}, 4), torch::tensor({kTruth[row]}));
  }
  parts[0].update(torch::zeros({0, 4}), torch::zeros({0}, torch::kLong));
  ClassificationMetrics sum(4);
  sum.set_state(parts[0].state() + parts[1].state());
  EXPECT_EQ(sum.compute(), joined.compute());
  EXPECT_EQ(sum.rows(), 14);
  parts[0].state().add_(parts[1].state()); // as an in-place all-reduce does
  EXPECT_EQ(parts[0].compute(), joined.compute());
}

TEST(ClassificationMetrics, IgnoredRowsDoNotCountAndNoRowsGiveZeros) {
  ClassificationMetrics metrics(2);
  EXPECT_EQ(metrics.compute().at("accuracy"), 0);
  EXPECT_EQ(metrics.compute().at("f1"), 0);
  metrics.update(logits_for({1, 0, 1}, 2).to(torch::kBFloat16),
                 torch::tensor({1, -100, -100}, torch::kInt));
  EXPECT_EQ(metrics.rows(), 1);
  EXPECT_EQ(metrics.compute().at("accuracy"), 1);
  metrics.reset();
  EXPECT_EQ(metrics.rows(), 0);
}

TEST(ClassificationMetrics, OfEqualLogitsTheFirstCounts) {
  ClassificationMetrics metrics(3);
  metrics.update(torch::ones({1, 3}), torch::tensor({int64_t{0}}));
  EXPECT_EQ(metrics.compute().at("accuracy"), 1);
}

TEST(ClassificationMetrics, WrongShapesAndLabelsAreNamed) {
  ClassificationMetrics metrics(2);
  const auto labels = torch::tensor({0, 2}, torch::kLong);
  EXPECT_THROW(metrics.update(torch::zeros({2, 2}), labels), InputError);
  EXPECT_THROW(metrics.update(torch::zeros({2, 3}), labels), InputError);
  EXPECT_THROW(metrics.update(torch::zeros({3, 2}), labels), InputError);
  EXPECT_THROW(metrics.update(torch::zeros({2, 2}), torch::zeros({2})), InputError);
  EXPECT_THROW(metrics.set_state(torch::zeros({2, 2})), InputError);
  EXPECT_THROW(ClassificationMetrics(1), InputError);
  EXPECT_EQ(metrics.rows(), 0);
}

} // namespace hasten
