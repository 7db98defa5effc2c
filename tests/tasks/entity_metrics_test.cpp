#include "hasten/tasks/entity_metrics.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "support/error_of.h"
#include "tasks/entities_golden.h"

namespace hasten {

namespace golden = entities_golden;

namespace {

/// The sentences [begin, end) as a batch: each tag is a token, before it one that does not count.
void update(EvaluationMetrics& metrics, size_t begin, size_t end) {
  int64_t longest = 0;
  for (size_t row = begin; row < end; ++row) {
    longest = std::max(longest, 2 * std::ssize(golden::kTruth[row]) + 1);
  }
  const auto rows = static_cast<int64_t>(end - begin);
  Batch batch;
  batch.tensors["labels"] = at::full({rows, longest}, -100, at::kLong);
  const at::Tensor logits = at::rand({rows, longest, std::ssize(golden::kLabels)});
  for (int64_t row = 0; row < rows; ++row) {
    const size_t at = begin + static_cast<size_t>(row);
    for (int64_t i = 0; i < std::ssize(golden::kTruth[at]); ++i) {
      const auto tag = static_cast<size_t>(i);
      batch.tensors["labels"][row][2 * i + 1] = golden::kTruth[at][tag];
      logits[row][2 * i + 1][golden::kPredicted[at][tag]] = 2;
    }
  }
  metrics.update(logits, batch);
}

void expect_golden(const EvaluationMetrics& metrics) {
  for (const auto& [name, value] : metrics.compute()) {
    EXPECT_NEAR(value, golden::kValues.at(name), 1e-15) << name;
  }
  const nlohmann::json types = metrics.report().at("per_class");
  ASSERT_EQ(types.size(), golden::kTypes.size());
  for (const auto& [type, scores] : golden::kTypes) {
    EXPECT_NEAR(types.at(type).at("precision").get<double>(), scores.precision, 1e-15) << type;
    EXPECT_NEAR(types.at(type).at("recall").get<double>(), scores.recall, 1e-15) << type;
    EXPECT_NEAR(types.at(type).at("f1").get<double>(), scores.f1, 1e-15) << type;
    EXPECT_EQ(types.at(type).at("support"), scores.support) << type;
  }
}

} // namespace

TEST(EntityMetrics, ScoresAreThoseOfSeqevalForAnySplitIntoBatches) {
  const ComputeMetrics make = entity_metrics(golden::kLabels);
  for (const size_t batch : {size_t{1}, size_t{7}, golden::kTruth.size()}) {
    const auto metrics = make();
    for (size_t at = 0; at < golden::kTruth.size(); at += batch) {
      update(*metrics, at, std::min(at + batch, golden::kTruth.size()));
    }
    expect_golden(*metrics);
  }
}

TEST(EntityMetrics, MergedStatesAreThoseOfAllSentences) {
  const ComputeMetrics make = entity_metrics(golden::kLabels);
  const auto first = make(), second = make();
  update(*first, 0, 70);
  update(*second, 70, golden::kTruth.size());
  first->metrics()[0]->merge_state(second->metrics()[0]->state());
  expect_golden(*first);
}

TEST(EntityMetrics, EntitiesAreThoseOfSeqeval) {
  int64_t entities = 0;
  for (const auto& tags : golden::kTruth) {
    std::vector<std::string> names;
    for (const int64_t tag : tags) {
      names.push_back(golden::kLabels[static_cast<size_t>(tag)]);
    }
    entities += std::ssize(entities_of(names));
  }
  EXPECT_EQ(entities, golden::kEntities);
  EXPECT_EQ(entities_of({"B-PER", "I-PER", "O", "I-LOC"}),
            (std::vector<Entity>{{"PER", 0, 2}, {"LOC", 3, 4}}));
}

TEST(EntityMetrics, WithoutEntitiesValuesAreZeroAndBadShapesAreErrors) {
  const auto metrics = entity_metrics({"O", "B-PER"})();
  EXPECT_EQ(metrics->compute().at("f1"), 0);
  Batch batch;
  batch.tensors["labels"] = at::zeros({1, 3}, at::kLong);
  EXPECT_THROW(metrics->update(at::zeros({1, 3, 3}), batch), InputError);
  batch.tensors["labels"].fill_(2);
  EXPECT_THROW(metrics->update(at::zeros({1, 3, 2}), batch), InputError);
}

} // namespace hasten
