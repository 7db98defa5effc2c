#include <cmath>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "classifier.h"
#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/log.h"
#include "hasten/cli/checks.h"
#include "hasten/cli/run.h"
#include "hasten/trainer/progress_callback.h"
#include "head.h"

namespace hasten {

namespace detail {

TokenizedTexts eval_tokens(const TextClassifier& classifier,
                           const std::vector<std::string>& texts) {
  TokenizedTexts tokens =
      tokenize_texts(classifier.tokenizer, texts, classifier.max_length, tokenizer_threads());
  const std::string cut = truncation_line(tokens, texts.size(), classifier.max_length);
  if (!cut.empty()) {
    log_warning(cut);
  }
  return tokens;
}

std::shared_ptr<const Dataset> read_eval_rows(const EvalCommand& command,
                                              const TextClassifier& classifier) {
  const Head head = head_of(classifier.bert.config);
  if (head != Head::single_label) {
    TargetRows rows = read_eval_targets(command, classifier);
    const TokenizedTexts tokens = eval_tokens(classifier, rows.texts);
    return std::make_shared<const TargetDataset>(
        make_dataset(tokens, {}, classifier.tokenizer), std::move(rows.targets),
        classifier.bert.config.num_labels(), head == Head::regression);
  }
  TextTableOptions options = table_options(command.table);
  options.max_rows = command.max_rows;
  const TextTable table = read_text_table(command.file, options);
  auto labels = label_numbers(table, classifier.labels(), "the model");
  const TokenizedTexts tokens = eval_tokens(classifier, table.texts);
  if (const int64_t skipped = table.empty_text + table.empty_label; skipped > 0) {
    log_warning(format_count(skipped) + " rows skipped for an empty text or label");
  }
  return make_dataset(tokens, std::move(labels), classifier.tokenizer);
}

} // namespace detail

int run_eval(const EvalCommand& command) {
  check_eval_inputs(command);
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
    char line[96];
    if (value.is_number_integer()) {
      std::snprintf(line, sizeof line, "%-24s %s\n", name.c_str(),
                    format_count(value.get<int64_t>()).c_str());
    } else {
      std::snprintf(line, sizeof line, "%-24s %.6g\n", name.c_str(),
                    value.is_number() ? value.get<double>() : NAN);
    }
    std::cout << line;
  }
  std::cout.flush();
  return kExitOk;
}

} // namespace hasten
