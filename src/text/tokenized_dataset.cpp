#include "hasten/text/tokenized_dataset.h"

#include <algorithm>
#include <bit>
#include <future>
#include <limits>
#include <stdexcept>
#include <utility>

#include "encode_parallel.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "token_file.h"

namespace hasten {

namespace detail {

constexpr const char* kTokenizedDataset = "data::TokenizedDataset";

std::vector<Encoding> encode_parallel(size_t count, int threads,
                                      const std::function<Encoding(size_t)>& encode) {
  if (threads < 1) {
    throw InputError("data::tokenize_texts", "threads=" + std::to_string(threads), "at least 1");
  }
  const size_t parts = std::clamp<size_t>(count / 16, 1, static_cast<size_t>(threads));
  std::vector<Encoding> encodings(count);
  const auto run_part = [&](size_t part) {
    size_t row = count * part / parts;
    try {
      for (; row < count * (part + 1) / parts; ++row) {
        encodings[row] = encode(row);
      }
    } catch (const InputError& error) {
      throw InputError("data::tokenize_texts", "row=" + std::to_string(row) + ": " + error.what());
    }
  };
  std::vector<std::future<void>> others;
  for (size_t part = 1; part < parts; ++part) {
    others.push_back(std::async(std::launch::async, run_part, part));
  }
  run_part(0);
  for (auto& other : others) {
    other.get(); // throws the error of the first text that has one
  }
  return encodings;
}

int32_t as_int32(int64_t value, size_t row, const char* what, int64_t smallest) {
  if (value < smallest || value > std::numeric_limits<int32_t>::max()) {
    throw InputError(
        kTokenizedDataset,
        "row=" + std::to_string(row) + " has " + what + "=" + std::to_string(value),
        std::to_string(smallest) + " to " + std::to_string(std::numeric_limits<int32_t>::max()));
  }
  return static_cast<int32_t>(value);
}

} // namespace detail

TokenizedTexts tokenize_texts(const Tokenizer& tokenizer, const std::vector<std::string>& texts,
                              int64_t max_length, int threads,
                              const std::vector<std::string>& text_pairs) {
  if (!text_pairs.empty() && text_pairs.size() != texts.size()) {
    throw InputError("data::tokenize_texts",
                     "texts=" + std::to_string(texts.size()) +
                         ", text_pairs=" + std::to_string(text_pairs.size()),
                     "one second text for each text, or none");
  }
  auto encodings = detail::encode_parallel(texts.size(), threads, [&](size_t row) {
    return text_pairs.empty()
               ? tokenizer.encode(texts[row], {.max_length = max_length})
               : tokenizer.encode(texts[row], text_pairs[row], {.max_length = max_length});
  });
  TokenizedTexts result;
  result.ids.reserve(texts.size());
  for (auto& encoding : encodings) {
    result.truncated += encoding.truncated;
    result.tokens += static_cast<int64_t>(encoding.ids.size());
    result.ids.push_back(std::move(encoding.ids));
    if (!text_pairs.empty()) {
      result.token_type_ids.push_back(std::move(encoding.token_type_ids));
    }
  }
  return result;
}

TokenizedDataset::TokenizedDataset(const std::vector<std::vector<int64_t>>& ids,
                                   std::vector<int64_t> labels, PaddingOptions padding)
    : collator_(std::make_shared<const DataCollatorWithPadding>(padding)) {
  if (!labels.empty() && labels.size() != ids.size()) {
    throw InputError(
        detail::kTokenizedDataset,
        "rows=" + std::to_string(ids.size()) + ", labels=" + std::to_string(labels.size()),
        "one label per sample, or none");
  }
  const auto stored = std::make_shared<detail::StoredTokens>();
  stored->rows.reserve(ids.size());
  for (size_t row = 0; row < ids.size(); ++row) {
    stored->rows.push_back(
        {.begin = static_cast<int64_t>(stored->ids.size()),
         .tokens = static_cast<int32_t>(ids[row].size()),
         .label = detail::as_int32(labels.empty() ? 0 : labels[row], row, "label", INT32_MIN)});
    for (const int64_t id : ids[row]) {
      stored->ids.push_back(detail::as_int32(id, row, "id", 0));
    }
  }
  table_ = {.ids = stored, .rows = stored->rows, .has_labels = !labels.empty(), .owner = stored};
  check(padding.pad_to_length);
}

TokenizedDataset::TokenizedDataset(TokenTable table, PaddingOptions padding)
    : table_(std::move(table)),
      collator_(std::make_shared<const DataCollatorWithPadding>(padding)) {
  check(padding.pad_to_length);
}

TokenizedDataset::TokenizedDataset(TokenTable table, std::shared_ptr<const DataCollator> collator)
    : table_(std::move(table)), collator_(std::move(collator)) {
  check();
}

void TokenizedDataset::check(int64_t longest) const {
  const int64_t ids = table_.ids ? table_.ids->size() : 0;
  for (size_t i = 0; i < table_.rows.size(); ++i) {
    const TokenRow& row = table_.rows[i];
    const bool several = table_.problem_type == ProblemType::multi_label;
    if (row.tokens <= 0 || row.begin < 0 || (several && row.label < 0) ||
        row.begin > ids - row.tokens - numbers_after(row) ||
        (longest > 0 && row.tokens > longest)) {
      throw InputError(detail::kTokenizedDataset,
                       "row=" + std::to_string(i) + " has tokens=" + std::to_string(row.tokens),
                       longest > 0 ? "1 to pad_to_length=" + std::to_string(longest)
                                   : "at least 1, and ids inside the table");
    }
  }
}

int64_t TokenizedDataset::size() const { return static_cast<int64_t>(table_.rows.size()); }

const TokenRow& TokenizedDataset::row(int64_t index) const {
  if (index < 0 || index >= size()) {
    throw std::out_of_range("row " + std::to_string(index));
  }
  return table_.rows[static_cast<size_t>(index)];
}

int64_t TokenizedDataset::length(int64_t index) const { return row(index).tokens; }

int64_t TokenizedDataset::numbers_after(const TokenRow& row) const {
  const ProblemType type = table_.problem_type;
  const bool each_token = type == ProblemType::word_labels || type == ProblemType::unlabelled;
  return (table_.pairs ? 1 : 0) + (type == ProblemType::multi_label ? row.label
                                   : each_token                     ? row.tokens
                                                                    : 0);
}

TokenFeature TokenizedDataset::feature(int64_t index) const {
  const TokenRow& from = row(index);
  std::vector<int32_t> numbers(static_cast<size_t>(from.tokens + numbers_after(from)));
  table_.ids->read(from.begin, numbers);
  auto after = numbers.cbegin() + from.tokens;
  TokenFeature feature{.input_ids = {numbers.cbegin(), after}, .index = index};
  if (table_.pairs) {
    feature.token_type_ids.assign(feature.input_ids.size(), 1);
    std::fill_n(feature.token_type_ids.begin(), std::clamp(*after++, 0, from.tokens), 0);
  }
  if (table_.problem_type == ProblemType::unlabelled) {
    feature.word_ids.assign(after, numbers.cend());
  }
  if (!table_.has_labels) {
    return feature;
  }
  if (table_.problem_type == ProblemType::single_label) {
    feature.labels = int64_t{from.label};
  } else if (table_.problem_type == ProblemType::regression) {
    feature.labels = std::bit_cast<float>(from.label);
  } else if (table_.problem_type == ProblemType::word_labels) {
    feature.labels = std::vector<int64_t>(after, numbers.cend());
  } else if (table_.problem_type == ProblemType::multi_label) {
    std::vector<float> labels(static_cast<size_t>(table_.num_labels));
    for (; after != numbers.cend(); ++after) {
      if (*after < 0 || *after >= table_.num_labels) {
        throw InputError(detail::kTokenizedDataset,
                         "row=" + std::to_string(index) + " has label=" + std::to_string(*after),
                         "0 or more, below num_labels=" + std::to_string(table_.num_labels));
      }
      labels[static_cast<size_t>(*after)] = 1;
    }
    feature.labels = std::move(labels);
  }
  return feature;
}

Batch TokenizedDataset::collate_in_epoch(const std::vector<int64_t>& indices,
                                         uint64_t epoch) const {
  if (!indices.empty() || size() == 0) {
    return (*collator_)(mapped(indices, [this](int64_t index) { return feature(index); }), epoch);
  }
  Batch batch = (*collator_)({feature(0)}, epoch);
  batch.indices.clear();
  batch.padded = false;
  for (auto& [name, tensor] : batch.tensors) {
    tensor = tensor.narrow(0, 0, 0);
  }
  return batch;
}

} // namespace hasten
