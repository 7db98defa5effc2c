#include <cmath>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>

#include "checks.h"
#include "classifier.h"
#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/trainer/progress_callback.h"
#include "head.h"
#include "run.h"

namespace hasten {

namespace detail {

std::shared_ptr<const Dataset> read_eval_rows(const EvalCommand& command,
                                              const TextClassifier& classifier) {
  const Head head = head_of(classifier.bert.config);
  if (head != Head::single_label) {
    TargetRows rows = read_eval_targets(command, classifier);
    const TokenizedTexts tokens = tokens_of(classifier, rows.texts);
    return std::make_shared<const TargetDataset>(
        make_dataset(tokens, {}, classifier.tokenizer), std::move(rows.targets),
        classifier.bert.config.num_labels(), head == Head::regression);
  }
  TextTableOptions options = table_options(command.table);
  options.max_rows = command.max_rows;
  const TextTable table = read_text_table(command.file, options);
  auto labels = label_numbers(table, classifier.labels(), "the model");
  const TokenizedTexts tokens = tokens_of(classifier, table.texts);
  if (const int64_t skipped = table.empty_text + table.empty_label; skipped > 0) {
    log_warning(format_count(skipped) + " rows skipped for an empty text or label");
  }
  return make_dataset(tokens, std::move(labels), classifier.tokenizer);
}

} // namespace detail

int run_command(const EvalCommand& command) {
  check_inputs(command);
  const detail::TextClassifier classifier =
      detail::load_text_classifier(command.model, command.max_length);
  const auto rows = detail::read_eval_rows(command, classifier);
  const auto trainer = detail::make_evaluator(classifier, command.batch_size);
  trainer->add_callback(std::make_shared<ProgressCallback>());
  const nlohmann::json metrics = trainer->evaluate(*rows);
  if (!std::isfinite(metrics.value("eval_loss", 0.0))) { // which row, and why
    detail::require_finite_logits(classifier, trainer->predict(*rows).outputs, "cli::eval",
                                  command.file);
  }

  nlohmann::ordered_json result;
  result["rows"] = rows->size();
  for (const auto& [name, value] : metrics.items()) {
    if (name.rfind("eval_", 0) == 0) {
      result[name] = value;
    }
  }
  if (command.json) {
    std::cout << result.dump() << std::endl;
    return kExitOk;
  }
  for (const auto& [name, value] : result.items()) {
    std::cout << std::left << std::setw(24) << name << " "
              << (value.is_number_integer()
                      ? format_count(value.get<int64_t>())
                      : format_digits(value.is_number() ? value.get<double>() : NAN))
              << "\n";
  }
  std::cout.flush();
  return kExitOk;
}

} // namespace hasten
