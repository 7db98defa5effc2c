#include <algorithm>
#include <cmath>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>

#include "classifier.h"
#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/text/token_cache.h"
#include "hasten/trainer/progress_callback.h"
#include "run.h"

namespace hasten {

namespace detail {

TextClassificationOptions eval_options(const EvalCommand& command,
                                       const TextClassifier& classifier) {
  TextClassificationOptions options;
  options.label_names = classifier.labels();
  options.max_train_rows = command.max_rows;
  options.table =
      labelled_table(command.table, head_of(classifier.bert.config), classifier.labels());
  auto& asked = options.table.label_columns;
  if (!asked.empty()) {
    if (!std::is_permutation(asked.begin(), asked.end(), options.label_names.begin(),
                             options.label_names.end())) {
      throw InputError("cli::eval", "--label-columns=" + command.table.label_columns,
                       "the model's labels: " + joined(classifier.labels(), ","));
    }
    asked = classifier.labels(); // in the model's order
  }
  return options;
}

std::shared_ptr<const Dataset> read_eval_rows(const EvalCommand& command,
                                              const TextClassifier& classifier) {
  const auto rows = tokenize_text_classification(TextFile::open(command.file, "cli::eval"), nullptr,
                                                 {.texts = eval_options(command, classifier),
                                                  .tokenizer = classifier.tokenizer,
                                                  .max_length = classifier.max_length,
                                                  .threads = tokenizer_threads()});
  tell_of_cut_texts(classifier, rows.truncated, std::ssize(rows.train.rows));
  if (const int64_t skipped = rows.report.empty_text + rows.report.empty_label; skipped > 0) {
    log_warning(format_count(skipped) + " samples skipped because of an empty text or label");
  }
  return make_dataset(rows.train, classifier.tokenizer);
}

} // namespace detail

int run_command(const EvalCommand& command) {
  const detail::TextClassifier classifier =
      detail::load_text_classifier(command.model, command.max_length);
  const auto rows = detail::read_eval_rows(command, classifier);
  const auto trainer = detail::make_evaluator(classifier, command.batch_size);
  trainer->add_callback(std::make_shared<ProgressCallback>());
  const nlohmann::json metrics = trainer->evaluate(*rows);
  if (!std::isfinite(metrics.value("eval_loss", 0.0))) { // names the sample and the reason
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
