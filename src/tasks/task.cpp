#include "hasten/tasks/task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <mutex>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/metrics/classification.h"
#include "hasten/metrics/perplexity.h"
#include "hasten/tasks/entity_metrics.h"
#include "hasten/text/packed_dataset.h"
#include "hasten/text/tokenized_dataset.h"
#include "hasten/trainer/losses.h"

namespace hasten {

namespace detail {

LossFunction classification_loss(PreTrainedModel model, ProblemType type) {
  return [model = std::move(model), type](const Batch& batch) mutable {
    LossOutput result;
    result.outputs = model->forward(model_inputs(batch)).logits;
    if (!batch.has("labels")) {
      result.outputs = type == ProblemType::regression ? result.outputs.squeeze(1) : result.outputs;
      return result;
    }
    if (type != ProblemType::single_label) {
      return type == ProblemType::regression
                 ? mse_output(result.outputs, batch["labels"])
                 : bce_with_logits_output(result.outputs, batch["labels"]);
    }
    result.loss_sum =
        at::cross_entropy_loss(result.outputs, batch["labels"], {}, at::Reduction::Sum);
    result.weight = static_cast<double>(batch.rows());
    return result;
  };
}

/// Share of the labelled tokens whose largest logit is the label's. state(): int64 [2]: right, all.
class TokenAccuracy final : public SumMetric {
 public:
  TokenAccuracy() : SumMetric("tasks::fill_mask", {2}, at::kLong) {}
  void update(const at::Tensor& logits, const at::Tensor& labels) {
    const at::Tensor counted = labels.ne(kIgnoredLabel);
    const at::Tensor right = logits.argmax(-1).eq(labels).logical_and(counted);
    sums_.add_(at::stack({right.sum(), counted.sum()}).cpu());
  }
  double compute() const {
    const auto* counts = sums_.const_data_ptr<int64_t>();
    return static_cast<double>(counts[0]) / static_cast<double>(std::max<int64_t>(1, counts[1]));
  }
};

/// Cross-entropy of the tokens that have a label.
LossFunction token_loss(PreTrainedModel model, ProblemType) {
  return [model = std::move(model)](const Batch& batch) mutable {
    const at::Tensor logits = model->forward(model_inputs(batch)).logits;
    return batch.has("labels") ? cross_entropy_output(logits, batch["labels"])
                               : LossOutput{.outputs = logits};
  };
}

Task text_classification() {
  return {.name = "text-classification",
          .head = ModelTask::sequence_classification,
          .problem_types = {ProblemType::single_label, ProblemType::regression,
                            ProblemType::multi_label},
          .collator =
              [](const Tokenizer& tokenizer, const auto&) {
                return std::make_shared<const DataCollatorWithPadding>(tokenizer.padding());
              },
          .loss = classification_loss,
          .metrics =
              [](ProblemType type, const std::vector<std::string>& names) {
                return type == ProblemType::regression ? regression_metrics()
                       : type == ProblemType::multi_label
                           ? multi_label_metrics(std::ssize(names), "labels", names)
                           : classification_metrics(std::ssize(names), "labels", names);
              }};
}

Task token_classification() {
  return {
      .name = "token-classification",
      .head = ModelTask::token_classification,
      .problem_types = {ProblemType::word_labels},
      .text_column = "tokens",
      .label_column = "ner_tags",
      .collator =
          [](const Tokenizer& tokenizer, const auto&) {
            return std::make_shared<const DataCollatorForTokenClassification>(tokenizer.padding());
          },
      .loss = token_loss,
      .metrics = [](ProblemType,
                    const std::vector<std::string>& names) { return entity_metrics(names); }};
}

Task fill_mask() {
  return {
      .name = "fill-mask",
      .head = ModelTask::masked_lm,
      .problem_types = {ProblemType::unlabelled},
      .label_column = {},
      .collator =
          [](const Tokenizer& tokenizer, const DataCollatorForLanguageModelingOptions& options) {
            return std::make_shared<const DataCollatorForLanguageModeling>(tokenizer, options);
          },
      .loss = token_loss,
      .metrics =
          [](ProblemType, const std::vector<std::string>&) {
            return named_metrics("labels", std::pair("perplexity", Perplexity()),
                                 std::pair("accuracy", TokenAccuracy()));
          }};
}

/// Perplexity of tokens whose losses are computed already.
class LossPerplexity final : public SumMetric {
 public:
  LossPerplexity() : SumMetric("tasks::text_generation", {2}, at::kDouble) {}
  void update(const at::Tensor& token_losses, const at::Tensor& labels) {
    const at::Tensor tokens = shifted_labels(labels).ne(kIgnoredLabel).sum();
    sums_.add_(at::stack({token_losses.sum(at::kDouble), tokens.to(at::kDouble)}).cpu());
  }
  double compute() const {
    return std::exp(sums_[0].item<double>() / sums_[1].item<double>()); // 0 / 0 is NaN
  }
};

/// Outputs are the tokens' losses [B, T], because logits of all tokens would not fit in memory.
LossFunction next_token_loss(PreTrainedModel model, ProblemType) {
  return [model = std::move(model)](const Batch& batch) mutable {
    ModelInputs inputs = model_inputs(batch);
    if (!batch.has("labels")) {
      return LossOutput{.outputs = model->forward(inputs).logits};
    }
    inputs.labels = batch["labels"];
    const LinearCrossEntropy loss = model->causal_loss(inputs);
    const at::Tensor tokens = shifted_labels(inputs.labels).ne(kIgnoredLabel).sum();
    return LossOutput{.loss_sum = loss.loss_sum,
                      .weight = DeviceScalar(tokens.to(at::kDouble)),
                      .outputs = loss.token_losses};
  };
}

Task text_generation() {
  return {.name = "text-generation",
          .head = ModelTask::causal_lm,
          .problem_types = {ProblemType::unlabelled},
          .label_column = {},
          .loss = next_token_loss,
          .metrics = [](ProblemType, const std::vector<std::string>&) {
            return named_metrics("labels", std::pair("perplexity", LossPerplexity()));
          }};
}

/// All tasks, and a lock for as long as they are used. References to a task stay valid.
std::pair<std::deque<Task>&, std::unique_lock<std::mutex>> registered_tasks() {
  static std::mutex mutex;
  static std::deque<Task> tasks{text_classification(), token_classification(), fill_mask(),
                                text_generation()};
  return {tasks, std::unique_lock(mutex)};
}

} // namespace detail

std::shared_ptr<const Dataset> task_dataset(const Task& task, const TokenTable& table,
                                            const Tokenizer& tokenizer,
                                            const TaskDataOptions& options) {
  if (task.collator) {
    return std::make_shared<const TokenizedDataset>(table,
                                                    task.collator(tokenizer, options.masking));
  }
  return std::make_shared<const PackedDataset>(
      table, options.block_size, options.packing_strategy,
      std::max<int64_t>(tokenizer.special_id("eos_token"), 0));
}

void register_task(Task task) {
  if (task.name.empty() || task.problem_types.empty() || !task.collator || !task.loss ||
      !task.metrics) {
    throw InputError("tasks::register_task", "task=" + task.name + " lacks a field",
                     "name, problem_types, collator, loss and metrics");
  }
  const auto [tasks, lock] = detail::registered_tasks();
  if (std::ranges::find(tasks, task.name, &Task::name) != tasks.end()) {
    throw InputError("tasks::register_task", "task=" + task.name + " is registered already",
                     "a name that no task has");
  }
  tasks.push_back(std::move(task));
}

const Task& find_task(std::string_view name) {
  const auto [tasks, lock] = detail::registered_tasks();
  const auto found = std::ranges::find(tasks, name, &Task::name);
  if (found == tasks.end()) {
    throw InputError("tasks::find_task", "task=" + std::string(name),
                     "one of " + joined(mapped(tasks, [](const Task& task) { return task.name; })));
  }
  return *found;
}

const Task& task_of(const PreTrainedConfig& config) {
  const auto [tasks, lock] = detail::registered_tasks();
  const auto found =
      std::ranges::find_if(tasks, [&](const Task& task) { return config.has_head(task.head); });
  return found == tasks.end() ? tasks.front() : *found;
}

std::vector<std::string> task_names() {
  const auto [tasks, lock] = detail::registered_tasks();
  return mapped(tasks, [](const Task& task) { return task.name; });
}

ModelInputs model_inputs(const Batch& batch) {
  const auto of = [&](const char* name) { return batch.has(name) ? batch[name] : at::Tensor(); };
  return {.input_ids = batch["input_ids"],
          .attention_mask = batch.padded ? of("attention_mask") : at::Tensor(),
          .token_type_ids = of("token_type_ids"),
          .position_ids = of("position_ids")};
}

ProblemType problem_type_of(const PreTrainedConfig& config) {
  if (config.problem_type.empty()) {
    return config.num_labels() == 1 ? ProblemType::regression : ProblemType::single_label;
  }
  const auto type = spelled<ProblemType>(config.problem_type);
  if (!type || *type > ProblemType::multi_label) {
    throw InputError("tasks::problem_type_of",
                     "config.json: problem_type=" + config.problem_type.substr(0, 80),
                     "single_label_classification, regression or multi_label_classification");
  }
  return *type;
}

} // namespace hasten
