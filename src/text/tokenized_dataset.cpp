#include "hasten/text/tokenized_dataset.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <future>
#include <limits>
#include <stdexcept>
#include <utility>

#include "hasten/base/error.h"
#include "token_file.h"

namespace hasten {

namespace detail {

constexpr const char* kTokenizedDataset = "data::TokenizedDataset";

std::vector<Encoding> tokenize_parallel(const Tokenizer& tokenizer,
                                        const std::vector<std::string>& texts, int64_t max_length,
                                        size_t parts) {
  std::vector<Encoding> encodings(texts.size());
  const auto run_part = [&](size_t part) {
    size_t row = texts.size() * part / parts;
    try {
      for (; row < texts.size() * (part + 1) / parts; ++row) {
        encodings[row] = tokenizer.encode(texts[row], {.max_length = max_length});
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
                              int64_t max_length, int threads) {
  if (threads < 1) {
    throw InputError("data::tokenize_texts", "threads=" + std::to_string(threads), "at least 1");
  }
  const size_t parts = std::clamp<size_t>(texts.size() / 16, 1, static_cast<size_t>(threads));
  auto encodings = detail::tokenize_parallel(tokenizer, texts, max_length, parts);
  TokenizedTexts result;
  result.ids.reserve(texts.size());
  for (auto& encoding : encodings) {
    result.truncated += encoding.truncated;
    result.tokens += static_cast<int64_t>(encoding.ids.size());
    result.ids.push_back(std::move(encoding.ids));
  }
  return result;
}

TokenizedDataset::TokenizedDataset(const std::vector<std::vector<int64_t>>& ids,
                                   std::vector<int64_t> labels, PaddingOptions padding)
    : padding_(padding) {
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
  check();
}

TokenizedDataset::TokenizedDataset(TokenTable table, PaddingOptions padding)
    : table_(std::move(table)), padding_(padding) {
  check();
}

void TokenizedDataset::check() const {
  if (padding_.pad_to_multiple_of < 1 || padding_.pad_to_length < 0 || padding_.pad_id < 0) {
    throw InputError(detail::kTokenizedDataset,
                     "pad_to_multiple_of=" + std::to_string(padding_.pad_to_multiple_of) +
                         ", pad_to_length=" + std::to_string(padding_.pad_to_length) +
                         ", pad_id=" + std::to_string(padding_.pad_id),
                     "pad_to_multiple_of at least 1, pad_to_length and pad_id at least 0",
                     padding_.pad_id < 0 ? "give the tokenizer a pad_token" : "");
  }
  const int64_t ids = table_.ids ? table_.ids->size() : 0;
  for (size_t i = 0; i < table_.rows.size(); ++i) {
    const TokenRow& row = table_.rows[i];
    if (row.tokens <= 0 || row.begin < 0 || classes(row) < 0 ||
        row.begin > ids - row.tokens - classes(row) ||
        (padding_.pad_to_length > 0 && row.tokens > padding_.pad_to_length)) {
      throw InputError(detail::kTokenizedDataset,
                       "row=" + std::to_string(i) + " has tokens=" + std::to_string(row.tokens),
                       padding_.pad_to_length > 0
                           ? "1 to pad_to_length=" + std::to_string(padding_.pad_to_length)
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

at::Tensor TokenizedDataset::empty_labels(int64_t rows) const {
  return table_.problem_type == ProblemType::single_label ? at::empty({rows}, at::kLong)
         : table_.problem_type == ProblemType::regression
             ? at::empty({rows}, at::kFloat)
             : at::zeros({rows, table_.num_labels}, at::kFloat);
}

Batch TokenizedDataset::collate(const std::vector<int64_t>& indices) const {
  const auto rows = static_cast<int64_t>(indices.size());
  int64_t longest = std::max<int64_t>(padding_.pad_to_length, 1);
  if (padding_.pad_to_length == 0) {
    for (const int64_t row : indices) {
      longest = std::max(longest, length(row));
    }
    const int64_t multiple = padding_.pad_to_multiple_of;
    longest = (longest + multiple - 1) / multiple * multiple;
  }
  const auto input_ids = at::full({rows, longest}, padding_.pad_id, at::kLong);
  const auto mask = at::zeros({rows, longest}, at::kLong);
  auto* id_out = input_ids.mutable_data_ptr<int64_t>();
  auto* mask_out = mask.mutable_data_ptr<int64_t>();
  const auto labels = empty_labels(rows);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < rows; ++i) {
    const TokenRow& from = row(indices[i]);
    ids.resize(static_cast<size_t>(from.tokens + classes(from)));
    table_.ids->read(from.begin, ids);
    const int64_t first =
        i * longest + (padding_.padding_side == TokenSide::left ? longest - from.tokens : 0);
    std::copy_n(ids.begin(), from.tokens, id_out + first);
    std::fill_n(mask_out + first, from.tokens, 1);
    if (table_.problem_type == ProblemType::single_label) {
      labels.mutable_data_ptr<int64_t>()[i] = from.label;
    } else if (table_.problem_type == ProblemType::regression) {
      labels.mutable_data_ptr<float>()[i] = std::bit_cast<float>(from.label);
    }
    for (auto number = ids.begin() + from.tokens; number != ids.end(); ++number) {
      if (*number < 0 || *number >= table_.num_labels) {
        throw InputError(
            detail::kTokenizedDataset,
            "row=" + std::to_string(indices[i]) + " has label=" + std::to_string(*number),
            "0 or more, below num_labels=" + std::to_string(table_.num_labels));
      }
      labels.mutable_data_ptr<float>()[i * table_.num_labels + *number] = 1;
    }
  }
  Batch batch{
      .tensors = {{"input_ids", input_ids}, {"attention_mask", mask}},
      .indices = indices,
      .padded = std::ranges::any_of(indices, [&](int64_t row) { return length(row) < longest; })};
  if (table_.has_labels) {
    batch.tensors.emplace("labels", labels);
  }
  return batch;
}

} // namespace hasten
