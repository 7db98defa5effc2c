// What a model's head is for: its loss, its metrics, and the runs of heads whose labels
// are numbers. Private to src/cli.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "classifier.h"
#include "hasten/data/text_targets.h"

namespace hasten::detail {

/// As transformers reads it: one label and no word is a regression.
Head head_of(const BertConfig& config);
/// As the flags say, else the model. Never throws: a folder that cannot be read is
/// refused where it is read.
Head head_of(const TrainCommand& command);

/// The loss of this head. Batches without labels give outputs alone: logits, of a
/// regression [B].
LossFunction head_loss(BertForSequenceClassification model, Head head);
ComputeMetrics head_metrics(Head head, int64_t num_labels);

/// Which columns hold labels and how, of a table whose labels are numbers.
/// `model_labels` names the columns where the flags do not.
TextTargetsOptions target_options(const TableFlags& table, Head head,
                                  const std::vector<std::string>& model_labels);

/// hasten train for regressions and several labels a row.
int run_train_targets(const TrainCommand& command, Head head);

/// The rows of hasten eval's file for these heads.
struct TargetRows {
  std::vector<std::string> texts{};
  std::vector<float> targets{};
};
TargetRows read_eval_targets(const EvalCommand& command, const TextClassifier& classifier);

/// bytes that the output folder holds at most, for a model like this.
int64_t bytes_on_disk(const TrainingArguments& arguments, const torch::nn::Module& model);

} // namespace hasten::detail
