// The predictions of predict and eval, and the files that hold them. Private to src/cli.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "commands.h"
#include "hasten/base/text.h"

namespace hasten::detail {

/// The predictions of all samples, in the order of the input.
struct Predictions {
  const std::vector<std::string>& texts; // [row]
  const std::vector<std::vector<int64_t>>& ids; // [row][token]
  const std::vector<std::string>& labels; // [label]
  at::Tensor logits; // [row, label] float
  at::Tensor probabilities; // [row, label] float
  at::Tensor best; // [row] int64
  Head head = Head::single_label;
  std::vector<std::string> truth{}; // [row], as label(); empty: unknown

  int64_t size() const { return static_cast<int64_t>(texts.size()); }
  /// Single label: the most probable one. Several labels: those above 0.5, "a|b". Regression: the
  /// value.
  std::string label(int64_t row) const {
    if (head == Head::regression) {
      return format_digits(value(row));
    }
    if (head == Head::single_label) {
      return labels[static_cast<size_t>(best.const_data_ptr<int64_t>()[row])];
    }
    return joined(labels_of(row), "|");
  }
  std::vector<std::string> labels_of(int64_t row) const {
    std::vector<std::string> names;
    for (size_t i = 0; i < labels.size(); ++i) {
      if (probability(row, static_cast<int64_t>(i)) > 0.5f) {
        names.push_back(labels[i]);
      }
    }
    return names;
  }
  float value(int64_t row) const { return logits.const_data_ptr<float>()[row]; }
  float probability(int64_t row, int64_t label) const {
    return probabilities.const_data_ptr<float>()[row * probabilities.size(1) + label];
  }
};

/// `logits`: the Trainer's outputs, [row, label], or [row] of a regression.
Predictions make_predictions(const std::vector<std::string>& texts,
                             const std::vector<std::vector<int64_t>>& ids,
                             const std::vector<std::string>& labels, const at::Tensor& logits,
                             Head head);

/// Writes a .csv or .jsonl file, by its name. Throws Error if it cannot be written.
void write_predictions_file(const std::string& path, const Predictions& predictions);

struct TextModel;

/// The texts of the command line, of stdin or of --file. `pairs` gets the second texts, if the samples
/// are pairs. Errors begin with `where`.
std::vector<std::string> given_texts(const char* where, const TextsFlags& command, const Task& task,
                                     std::vector<std::string>& pairs);

/// hasten predict for tasks whose answers are about tokens. With --file, token-classification reads
/// lists of words in `texts`.
void predict_tokens(const PredictCommand& command, const TextModel& model,
                    const std::vector<std::string>& texts);

} // namespace hasten::detail
