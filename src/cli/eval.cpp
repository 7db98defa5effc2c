#include <algorithm>
#include <cmath>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "checks.h"
#include "classifier.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/text/token_cache.h"
#include "hasten/trainer/progress_callback.h"
#include "predictions.h"
#include "run.h"

namespace hasten {

namespace detail {

TextClassificationOptions eval_options(const EvalCommand& command, const TextModel& model,
                                       const TextFiles& files) {
  TextClassificationOptions options;
  options.label_names = model.labels();
  options.max_train_rows = command.max_rows;
  options.table = labelled_table(command.table, *model.task, model.problem_type(), model.labels());
  set_documents(options.table, command.table, *model.task, model.sample_by, files);
  auto& asked = options.table.label_columns;
  if (!asked.empty()) {
    if (!std::is_permutation(asked.begin(), asked.end(), options.label_names.begin(),
                             options.label_names.end())) {
      throw InputError("cli::eval", "--label-columns=" + command.table.label_columns,
                       "the model's labels: " + joined(model.labels(), ","));
    }
    asked = model.labels(); // in the model's order
  }
  return options;
}

TokenizedClassification read_eval_rows(const EvalCommand& command, const TextModel& model,
                                       bool is_main) {
  const auto files = TextFiles::open(command.file, "cli::eval", "--file");
  const auto texts = eval_options(command, model, files);
  const bool cut_later = texts.table.documents && texts.table.text_pair_column.empty();
  auto rows = tokenize_text_classification(files, {},
                                           {.texts = texts,
                                            .tokenizer = model.tokenizer,
                                            .max_length = cut_later ? 0 : model.max_length,
                                            .threads = tokenizer_threads()});
  if (is_main) {
    warn_of_truncated_texts(model, rows.truncated, std::ssize(rows.train.rows));
    if (const int64_t skipped = rows.report.empty_text + rows.report.empty_label; skipped > 0) {
      log_warning(format_count(skipped) + " samples skipped because of an empty text or label");
    }
  }
  return rows;
}

/// The label of sample `row`, in the form of Predictions::label().
std::string true_label(const Dataset& rows, int64_t row, const TextModel& model, Head head) {
  const at::Tensor label = rows.collate({row})["labels"][0];
  if (head == Head::regression) {
    return format_digits(label.item<double>());
  }
  if (head == Head::single_label) {
    return model.labels()[label.item<int64_t>()];
  }
  std::vector<std::string> names;
  for (int64_t i = 0; i < label.size(0); ++i) {
    if (label[i].item<float>() > 0) {
      names.push_back(model.labels()[i]);
    }
  }
  return joined(names, "|");
}

/// Reads the texts once more, because the data set has only their tokens.
void write_eval_predictions(const EvalCommand& command, const TextModel& model, const Dataset& rows,
                            const at::Tensor& logits) {
  const auto files = TextFiles::open(command.file, "cli::eval", "--file");
  TextTableOptions options = eval_options(command, model, files).table;
  options.max_rows = command.max_rows;
  std::vector<std::string> texts;
  for (TextRowReader reader(files, options); reader.next();) {
    texts.emplace_back(reader.text());
  }
  if (std::ssize(texts) != rows.size()) {
    throw InputError("cli::eval",
                     "--file=" + command.file + " has " + std::to_string(texts.size()) +
                         " samples, and had " + std::to_string(rows.size()),
                     "a file that nobody changes during the run");
  }
  const Head head = model.problem_type();
  const std::vector<std::vector<int64_t>> no_ids;
  Predictions predictions = make_predictions(texts, no_ids, model.labels(), logits, head);
  for (int64_t row = 0; row < rows.size(); ++row) {
    predictions.truth.push_back(true_label(rows, row, model, head));
  }
  write_predictions_file(command.predictions, predictions);
}

void print_eval(nlohmann::ordered_json result, const nlohmann::json& report, bool json) {
  if (json) {
    result.update(report);
    std::cout << result.dump() << '\n' << std::flush;
    return;
  }
  for (const auto& [name, value] : result.items()) {
    std::cout << std::left << std::setw(24) << name << " "
              << (value.is_number_integer()
                      ? format_count(value.get<int64_t>())
                      : format_digits(value.is_number() ? value.get<double>() : NAN))
              << "\n";
  }
  const std::string tables =
      report_text(report, terminal_columns(STDOUT_FILENO), "the output of --json");
  std::cout << (tables.empty() ? "" : "\n") << tables << std::flush;
}

} // namespace detail

int run_command(const EvalCommand& command) {
  const auto accelerator = std::make_shared<Accelerator>(AcceleratorOptions());
  Communicator& communicator = *accelerator->communicator();
  const bool is_main = accelerator->is_main_process();
  std::optional<detail::TextModel> model;
  std::optional<TokenizedClassification> data;
  std::shared_ptr<const Dataset> rows;
  detail::agree_on(communicator, "cli::read_input", [&] {
    check_inputs(command);
    model = detail::load_text_model(command);
    model->precision = command.precision.value_or(model->precision);
    if (model->task->problem_types.size() == 1 && !command.predictions.empty()) {
      throw InputError("cli::eval", "--predictions with a model for " + model->task->name,
                       "a model for text-classification",
                       "write them with hasten predict --file FILE --output FILE");
    }
    data = detail::read_eval_rows(command, *model, is_main);
    rows = task_dataset(*model->task, data->train, model->tokenizer, model->data);
  });
  detail::require_equal_data(communicator, command.model, *data, "cli::eval");
  const auto trainer = detail::make_evaluator(*model, command.batch_size, accelerator);
  trainer->add_callback(std::make_shared<ProgressCallback>());
  nlohmann::json metrics;
  at::Tensor logits;
  if (command.predictions.empty()) {
    metrics = trainer->evaluate(*rows);
  } else {
    const PredictionOutput predicted = trainer->predict(*rows);
    logits = predicted.outputs;
    for (const auto& [name, value] : predicted.metrics.items()) {
      metrics["eval" + name.substr(name.find('_'))] = value;
    }
  }
  if (!std::isfinite(metrics.value("eval_loss", 0.0))) { // names the sample and the reason
    if (model->task->problem_types.size() == 1) {
      throw InputError("cli::eval", "the model's loss on " + command.file + " is not finite",
                       "finite weights", "use an earlier checkpoint, or train again");
    }
    logits = logits.defined() ? logits : trainer->predict(*rows).outputs;
    detail::agree_on(communicator, "cli::look_at_logits", [&] {
      detail::require_finite_logits(*model, logits, "cli::eval", command.file);
    });
  }
  detail::agree_on(communicator, "cli::write_results", [&] {
    if (!is_main) {
      return;
    }
    nlohmann::ordered_json result = {{"rows", rows->size()}};
    for (const auto& [name, value] : metrics.items()) {
      if (name.starts_with("eval_")) {
        result[name] = value;
      }
    }
    if (!command.predictions.empty()) {
      detail::write_eval_predictions(command, *model, *rows, logits);
    }
    detail::print_eval(result, trainer->evaluation_report(), command.json);
  });
  accelerator->end_training();
  return kExitOk;
}

} // namespace hasten
