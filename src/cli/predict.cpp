#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "classifier.h"
#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/files.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/trainer/progress_callback.h"
#include "predictions.h"
#include "run.h"

namespace hasten {

namespace detail {

std::vector<std::string> read_lines(std::istream& stream) {
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) {
    if (!line.empty() && line.back() == '\r') {
      line.pop_back();
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

std::vector<std::string> given_texts(const char* where, const TextsFlags& command, const Task& task,
                                     std::vector<std::string>& pairs) {
  if (!command.file.empty()) {
    TextTableOptions options = table_options(command.table, task);
    options.problem_type = task.problem_types[0];
    options.label_column.clear();
    options.max_rows = command.max_rows;
    options.keep_empty_text = true;
    TextRowReader reader(TextFiles::open(command.file, where, "--file"), options);
    std::vector<std::string> texts;
    while (reader.next()) {
      texts.emplace_back(reader.text());
      if (!options.text_pair_column.empty()) {
        pairs.emplace_back(reader.text_pair());
      }
    }
    reader.require_rows();
    return texts;
  }
  if (command.texts.size() == 1 && command.texts[0] == "-") {
    std::vector<std::string> lines = read_lines(std::cin);
    if (lines.empty()) {
      throw InputError(where, "stdin is empty", "one text per line");
    }
    return lines;
  }
  return command.texts;
}

std::string predictions_jsonl(const Predictions& all, bool with_logits) {
  std::string text;
  const int64_t labels = all.logits.size(1);
  for (int64_t row = 0; row < all.size(); ++row) {
    nlohmann::ordered_json json;
    json["text"] = all.texts[static_cast<size_t>(row)];
    if (!all.truth.empty()) {
      json["true_label"] = all.truth[static_cast<size_t>(row)];
    }
    if (all.head == Head::regression) {
      json["value"] = all.value(row);
    } else if (all.head == Head::multi_label) {
      json["labels"] = all.labels_of(row);
    } else {
      json["label"] = all.label(row);
    }
    for (int64_t label = 0; label < labels && all.head != Head::regression; ++label) {
      auto& probabilities = json["probabilities"];
      // Six digits: further ones of a float are noise.
      probabilities[all.labels[static_cast<size_t>(label)]] =
          std::round(1e6 * all.probability(row, label)) / 1e6;
    }
    if (with_logits) {
      const float* logits = all.logits.const_data_ptr<float>() + row * labels;
      json["logits"] = std::vector<float>(logits, logits + labels);
      json["input_ids"] = all.ids[static_cast<size_t>(row)];
    }
    text += json.dump() + "\n";
  }
  return text;
}

std::string predictions_csv(const Predictions& all) {
  const bool probabilities = all.head != Head::regression;
  std::string text = all.truth.empty() ? "text," : "text,true_label,";
  text += probabilities ? "label" : "value";
  for (const std::string& label : all.labels) {
    text += probabilities ? "," + csv_field("probability_" + label) : "";
  }
  text += "\n";
  for (int64_t row = 0; row < all.size(); ++row) {
    text += csv_field(all.texts[static_cast<size_t>(row)]) + ",";
    text += all.truth.empty() ? "" : csv_field(all.truth[static_cast<size_t>(row)]) + ",";
    text += csv_field(all.label(row));
    for (int64_t label = 0; probabilities && label < all.logits.size(1); ++label) {
      text += "," + format_digits(all.probability(row, label));
    }
    text += "\n";
  }
  return text;
}

/// The text on one line, at most `width` bytes of it.
std::string one_line(const std::string& text, size_t width) {
  std::string line;
  for (const char c : text) {
    line += c == '\n' || c == '\r' || c == '\t' ? ' ' : c;
  }
  if (line.size() > width) {
    size_t end = width - 3;
    while (end > 0 && (static_cast<unsigned char>(line[end]) & 0xC0) == 0x80) {
      --end; // not in the middle of a UTF-8 sequence
    }
    line = line.substr(0, end) + "...";
  }
  return line;
}

/// A table with aligned columns: label, probabilities, text.
std::string predictions_table(const Predictions& all) {
  constexpr int64_t kMostColumns = 6; // with more labels only one probability is shown
  constexpr size_t kTextWidth = 72;
  const bool regression = all.head == Head::regression;
  const bool all_columns = all.logits.size(1) <= kMostColumns || all.head == Head::multi_label;
  const std::vector<std::string> titles = regression    ? std::vector<std::string>()
                                          : all_columns ? all.labels
                                                        : std::vector<std::string>{"probability"};
  size_t label_width = 5;
  for (int64_t row = 0; row < all.size(); ++row) {
    label_width = std::max(label_width, all.label(row).size());
  }
  std::ostringstream text;
  const auto begin_row = [&](const std::string& label) {
    text << std::left << std::setw(static_cast<int>(label_width)) << label << std::right;
  };
  const auto cell = [&](const std::string& value, size_t width) {
    text << "  " << std::setw(static_cast<int>(std::max<size_t>(6, width))) << value;
  };
  begin_row(regression ? "value" : "label");
  for (const std::string& title : titles) {
    cell(title, title.size());
  }
  text << "  text\n";
  for (int64_t row = 0; row < all.size(); ++row) {
    begin_row(all.label(row));
    for (size_t i = 0; i < titles.size(); ++i) {
      const int64_t label =
          all_columns ? static_cast<int64_t>(i) : all.best.const_data_ptr<int64_t>()[row];
      cell(format_fixed(all.probability(row, label), 4), titles[i].size());
    }
    text << "  " << one_line(all.texts[static_cast<size_t>(row)], kTextWidth) << "\n";
  }
  return text.str();
}

Predictions make_predictions(const std::vector<std::string>& texts,
                             const std::vector<std::vector<int64_t>>& ids,
                             const std::vector<std::string>& labels, const at::Tensor& logits,
                             Head head) {
  const at::Tensor table =
      logits.to(at::kFloat).contiguous().view({static_cast<int64_t>(texts.size()), -1});
  return {texts,
          ids,
          labels,
          table,
          (head == Head::multi_label ? table.sigmoid() : at::softmax(table, 1)).contiguous(),
          table.argmax(1).contiguous(),
          head};
}

void write_predictions_file(const std::string& path, const Predictions& predictions) {
  write_answers(
      "cli::eval", path,
      path.ends_with(".csv") ? predictions_csv(predictions) : predictions_jsonl(predictions, false),
      predictions.size());
}

void write_answers(const char* where, const std::string& output, const std::string& text,
                   int64_t answers, const std::string& what) {
  if (!output.empty()) {
    write_file_atomically(output, text);
    log_info("wrote " + format_count(answers) + " " + what + " to " + output);
    return;
  }
  std::cout << text << std::flush;
  if (!std::cout) {
    throw Error(where, "cannot write to stdout");
  }
}

/// Texts that have been tokenized, in memory.
class EncodedTexts final : public Dataset {
 public:
  EncodedTexts(TokenizedTexts tokens, const PaddingOptions& padding)
      : tokens_(std::move(tokens)), collator_(padding) {}
  int64_t size() const override { return std::ssize(tokens_.ids); }
  int64_t length(int64_t index) const override { return std::ssize(ids(index)); }
  Batch collate(const std::vector<int64_t>& indices) const override {
    return collator_(mapped(indices,
                            [this](int64_t index) {
                              const auto at = static_cast<size_t>(index);
                              TokenFeature feature{.input_ids = ids(index), .index = index};
                              if (!tokens_.token_type_ids.empty()) {
                                feature.token_type_ids = tokens_.token_type_ids[at];
                              }
                              return feature;
                            }),
                     0);
  }
  const std::vector<std::vector<int64_t>>& all_ids() const { return tokens_.ids; }

 private:
  const std::vector<int64_t>& ids(int64_t index) const {
    return tokens_.ids.at(static_cast<size_t>(index));
  }

  TokenizedTexts tokens_;
  DataCollatorWithPadding collator_;
};

void predict_classes(const PredictCommand& command, const TextModel& model,
                     const std::vector<std::string>& texts, const std::vector<std::string>& pairs) {
  TokenizedTexts tokens =
      tokenize_texts(model.tokenizer, texts, model.max_length, tokenizer_threads(), pairs);
  warn_of_truncated_texts(model, tokens.truncated, std::ssize(texts));
  const auto trainer = make_evaluator(model, command.batch_size);
  if (!command.output.empty() || !command.file.empty()) {
    trainer->add_callback(std::make_shared<ProgressCallback>("", nullptr, "predict"));
  }
  const EncodedTexts dataset(std::move(tokens), model.tokenizer.padding());
  const at::Tensor logits = trainer->predict(dataset).outputs;
  require_finite_logits(model, logits, "cli::predict",
                        command.file.empty() ? "the texts" : command.file);
  const Predictions all =
      make_predictions(texts, dataset.all_ids(), model.labels(), logits, model.problem_type());
  write_answers("cli::predict", command.output,
                command.output.ends_with(".csv") ? predictions_csv(all)
                : command.output.empty() && !command.json
                    ? predictions_table(all)
                    : predictions_jsonl(all, command.with_logits),
                all.size());
}

} // namespace detail

int run_command(const PredictCommand& command) {
  const detail::TextModel model = detail::load_text_model(command);
  if (model.task->head == ModelTask::causal_lm) {
    throw InputError("cli::predict", "--model=" + command.model + " is for " + model.task->name,
                     "a model that labels texts or fills masks",
                     "continue texts with hasten generate --model " + command.model);
  }
  std::vector<std::string> pairs;
  const auto texts = detail::given_texts("cli::predict", command, *model.task, pairs);
  if (model.task->problem_types.size() > 1) {
    detail::predict_classes(command, model, texts, pairs);
  } else {
    detail::predict_tokens(command, model, texts);
  }
  return kExitOk;
}

} // namespace hasten
