// The problem type of a model's head: its loss, its metrics and its labels in a table. Private
// to src/cli.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "classifier.h"
#include "hasten/text/text_table.h"

namespace hasten::detail {

/// The problem type by transformers' rule: one label without a problem_type is a regression.
Head head_of(const BertConfig& config);
/// The problem type from the flags, otherwise from the model. Never throws: loading reports a
/// folder that cannot be read.
Head head_of(const TrainCommand& command);

/// The loss of this head. Batches without labels give only outputs: logits, for a regression [B].
LossFunction head_loss(BertForSequenceClassification model, Head head);
ComputeMetrics head_metrics(Head head, int64_t num_labels);

/// Options for reading a table with labels. `model_labels` are the label columns of a problem with
/// several labels per sample, if the flags do not name them.
TextTableOptions labelled_table(const TableFlags& flags, Head head,
                                const std::vector<std::string>& model_labels = {});

/// Maximum size of the output folder for this model, in bytes.
int64_t bytes_on_disk(const TrainingArguments& arguments, const torch::nn::Module& model);

} // namespace hasten::detail
