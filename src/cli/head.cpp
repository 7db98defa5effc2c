#include "head.h"

#include <algorithm>
#include <optional>
#include <system_error>
#include <utility>

#include "checks.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/trainer/losses.h"

namespace hasten::detail {

Head head_of(const BertConfig& config) {
  if (config.problem_type.empty()) {
    return config.num_labels() == 1 ? Head::regression : Head::single_label;
  }
  const std::optional<Head> head = spelled<Head>(config.problem_type);
  if (!head) {
    throw InputError("cli::model", "config.json: problem_type=" + config.problem_type.substr(0, 80),
                     "single_label_classification, regression or multi_label_classification");
  }
  return *head;
}

Head head_of(const TrainCommand& command) {
  BertConfig config;
  config.problem_type = command.problem_type;
  if (command.problem_type.empty() && !is_model_shape(command.model)) {
    try {
      config = read_bert_config(command.model);
    } catch (const std::exception&) {
      return Head::single_label;
    }
    const auto& classes = config.architectures;
    if (std::find(classes.begin(), classes.end(), "BertForSequenceClassification") ==
        classes.end()) {
      return Head::single_label; // a bare encoder, which says nothing of labels
    }
  }
  return head_of(config);
}

LossFunction head_loss(BertForSequenceClassification model, Head head) {
  if (head == Head::single_label) {
    return classification_loss(std::move(model));
  }
  return [model = std::move(model), head](const Batch& batch) mutable {
    const at::Tensor logits = model->forward(batch["input_ids"], batch["attention_mask"]);
    if (!batch.has("labels")) {
      LossOutput result;
      result.outputs = head == Head::regression ? logits.squeeze(1) : logits;
      return result;
    }
    return head == Head::regression ? mse_output(logits, batch["labels"])
                                    : bce_with_logits_output(logits, batch["labels"]);
  };
}

ComputeMetrics head_metrics(Head head, int64_t num_labels) {
  return head == Head::regression    ? regression_metrics()
         : head == Head::multi_label ? multi_label_metrics(num_labels)
                                     : classification_metrics(num_labels);
}

TextTargetsOptions target_options(const TableFlags& table, Head head,
                                  const std::vector<std::string>& model_labels) {
  TextTargetsOptions options;
  options.table = table_options(table);
  if (head == Head::regression) {
    return options;
  }
  options.label_separator = table.label_separator;
  if (!options.label_separator.empty()) {
    options.label_names = model_labels;
    return options;
  }
  if (table.label_columns.empty()) {
    options.label_columns = model_labels;
    return options;
  }
  options.label_columns = split(table.label_columns);
  return options;
}

TargetRows read_eval_targets(const EvalCommand& command, const TextClassifier& classifier) {
  const Head head = head_of(classifier.bert.config);
  TextTargetsOptions options = target_options(command.table, head, classifier.labels());
  if (!options.label_columns.empty()) {
    auto asked = options.label_columns;
    auto known = classifier.labels();
    std::sort(asked.begin(), asked.end());
    std::sort(known.begin(), known.end());
    if (asked != known) {
      throw InputError("cli::eval", "--label-columns=" + command.table.label_columns,
                       "the model's labels: " + joined(classifier.labels(), ","));
    }
    options.label_columns = classifier.labels(); // in the model's order
  }
  options.max_train_rows = command.max_rows;
  TargetTexts rows = read_text_targets(command.file, options, classifier.labels());
  return {std::move(rows.texts), std::move(rows.targets)};
}

} // namespace hasten::detail
