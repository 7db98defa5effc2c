// The registry of tasks: what a model is fine-tuned for, by the names of Hugging Face's hub. hasten
// has "text-classification", "token-classification", "fill-mask" and "text-generation". A task has a head, kinds of
// labels, a collator, a loss and metrics for a Trainer:
//
//   const hasten::Task& task = hasten::find_task("token-classification");
//   auto model = hasten::model_from_pretrained(folder, task.head, {.id2label = names});
//   hasten::Trainer trainer({.model = model, .args = arguments, .train_dataset = train,
//                            .compute_metrics = task.metrics(task.problem_types[0], names),
//                            .compute_loss_func = task.loss(model, task.problem_types[0])});
//
// Threading: any thread may call every function.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "hasten/models/pretrained_model.h"
#include "hasten/text/data_collator.h"
#include "hasten/text/packing.h"
#include "hasten/text/problem_type.h"
#include "hasten/text/tokenized_dataset.h"
#include "hasten/text/tokenizer.h"
#include "hasten/trainer/trainer.h"

namespace hasten {

struct Task {
  /// "token-classification".
  std::string name{};
  ModelTask head = ModelTask::sequence_classification;
  /// The kinds of labels that it can have, the usual one first.
  std::vector<ProblemType> problem_types{};
  /// The column of the texts, unless the user names another.
  std::string text_column = "text";
  /// The column of the labels; empty: none.
  std::string label_column = "label";
  /// Makes batches of samples, in training and evaluation. Options are those of fill-mask.
  /// text-generation has none: its samples are rows of documents (PackedDataset).
  std::function<std::shared_ptr<const DataCollator>(const Tokenizer&,
                                                    const DataCollatorForLanguageModelingOptions&)>
      collator{};
  /// The loss function of a Trainer. A batch without labels gives only outputs.
  std::function<LossFunction(PreTrainedModel model, ProblemType problem_type)> loss{};
  /// `label_names`: [label number], as the model's id2label.
  std::function<ComputeMetrics(ProblemType problem_type,
                               const std::vector<std::string>& label_names)>
      metrics{};
};

/// Options of the tasks' data.
struct TaskDataOptions {
  /// fill-mask.
  DataCollatorForLanguageModelingOptions masking{};
  /// text-generation: tokens of a row, and what shares it.
  int64_t block_size = 1024;
  PackingStrategy packing_strategy = PackingStrategy::bfd_split;
};

/// The samples of a task: TokenizedDataset with its collator; for text-generation PackedDataset. Throws
/// InputError as these do.
std::shared_ptr<const Dataset> task_dataset(const Task& task, const TokenTable& table,
                                            const Tokenizer& tokenizer,
                                            const TaskDataOptions& options = {});

/// Adds a task, for the rest of the process. Throws InputError if a field without default is empty,
/// or if there is a task of that name.
void register_task(Task task);
/// Throws InputError that names all tasks if there is none of that name.
const Task& find_task(std::string_view name);
/// The first task, in the order of registration, whose head a saved model has
/// (PreTrainedConfig::has_head); text-classification if it has none.
const Task& task_of(const PreTrainedConfig& config);
/// The names of all tasks, in the order of registration.
std::vector<std::string> task_names();

/// The batch's tensors by name, with labels left out: the mask only if a sample is padded.
ModelInputs model_inputs(const Batch& batch);

/// The problem type of a classifier by transformers' rule: one label without a problem_type is a
/// regression. Throws InputError for a problem_type that transformers does not have.
ProblemType problem_type_of(const PreTrainedConfig& config);

} // namespace hasten
