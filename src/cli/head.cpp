#include "head.h"

#include <algorithm>
#include <optional>
#include <utility>

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
      return Head::single_label; // an encoder without a classifier has no problem type
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

TextTableOptions labelled_table(const TableFlags& flags, Head head,
                                const std::vector<std::string>& model_labels) {
  TextTableOptions table = table_options(flags);
  table.problem_type = head;
  if (head == Head::multi_label) {
    table.label_separator = flags.label_separator;
    if (table.label_separator.empty()) {
      table.label_columns = flags.label_columns.empty() ? model_labels : split(flags.label_columns);
    }
  }
  return table;
}

} // namespace hasten::detail
