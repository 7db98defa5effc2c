// What a model's head is for: its loss, its metrics and its labels in a table. Private to
// src/cli.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "classifier.h"
#include "hasten/data/text_table.h"

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

/// How a table with labels is read. `model_labels` names the columns of several labels
/// a row where the flags do not.
TextTableOptions labelled_table(const TableFlags& flags, Head head,
                                const std::vector<std::string>& model_labels = {});

/// bytes that the output folder holds at most, for a model like this.
int64_t bytes_on_disk(const TrainingArguments& arguments, const torch::nn::Module& model);

} // namespace hasten::detail
