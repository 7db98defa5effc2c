#include "hasten/text/data_collator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <span>
#include <string>

#include "hasten/base/error.h"
#include "hasten/core/random.h"

namespace hasten {

namespace detail {

constexpr const char* kDataCollator = "text::DataCollator";

std::string sample_text(const TokenFeature& feature) {
  return "sample=" + std::to_string(feature.index) +
         " with tokens=" + std::to_string(feature.input_ids.size());
}

void require_per_token(const TokenFeature& feature, size_t values, const char* name) {
  if (values != feature.input_ids.size()) {
    throw InputError(kDataCollator,
                     sample_text(feature) + " has " + name + " of length " + std::to_string(values),
                     "one value per token");
  }
}

/// [B, T] of each feature's values, `fill` in padding. row(feature): std::span<const int64_t>.
template <typename Row>
at::Tensor padded_rows(const std::vector<TokenFeature>& features, int64_t length, TokenSide side,
                       int64_t fill, const Row& row) {
  at::Tensor padded = at::empty({std::ssize(features), length}, at::kLong);
  auto* out = padded.mutable_data_ptr<int64_t>();
  for (const TokenFeature& feature : features) {
    const std::span<const int64_t> values = row(feature);
    const int64_t rest = length - std::ssize(values);
    out = side == TokenSide::left ? std::fill_n(out, rest, fill) : out;
    out = std::copy(values.begin(), values.end(), out);
    out = side == TokenSide::left ? out : std::fill_n(out, rest, fill);
  }
  return padded;
}

template <typename T>
std::span<const T> label_values(const T& one) {
  return {&one, 1};
}
template <typename T>
std::span<const T> label_values(const std::vector<T>& several) {
  return several;
}

/// [B] of scalars, [B, L] of vectors. L: the alternative of the first feature's labels.
template <typename L>
at::Tensor stacked_labels(const std::vector<TokenFeature>& features, const L& first) {
  const auto values = label_values(first);
  using T = typename decltype(values)::value_type;
  std::vector<int64_t> sizes{std::ssize(features)};
  if (!std::is_same_v<L, T>) {
    sizes.push_back(std::ssize(values));
  }
  at::Tensor labels = at::empty(sizes, c10::CppTypeToScalarType<T>::value);
  T* out = labels.mutable_data_ptr<T>();
  for (const TokenFeature& feature : features) {
    const L* own = std::get_if<L>(&feature.labels);
    if (own == nullptr || label_values(*own).size() != values.size()) {
      throw InputError(kDataCollator,
                       sample_text(feature) + " has other labels than sample=" +
                           std::to_string(features.front().index),
                       "labels of one kind and number in a batch",
                       "use DataCollatorForTokenClassification for labels of tokens");
    }
    out = std::ranges::copy(label_values(*own), out).out;
  }
  return labels;
}

void require_probability(const char* name, double value) {
  if (!(value >= 0 && value <= 1)) {
    throw InputError("text::DataCollatorForLanguageModeling",
                     std::string(name) + "=" + std::to_string(value), "0 to 1");
  }
}

} // namespace detail

DataCollatorWithPadding::DataCollatorWithPadding(const PaddingOptions& padding)
    : padding_(padding) {
  if (padding.pad_to_multiple_of < 1 || padding.pad_to_length < 0 || padding.pad_id < 0) {
    throw InputError(detail::kDataCollator,
                     "pad_to_multiple_of=" + std::to_string(padding.pad_to_multiple_of) +
                         ", pad_to_length=" + std::to_string(padding.pad_to_length) +
                         ", pad_id=" + std::to_string(padding.pad_id),
                     "pad_to_multiple_of at least 1, pad_to_length and pad_id at least 0",
                     padding.pad_id < 0 ? "give the tokenizer a pad_token" : "");
  }
}

Batch DataCollatorWithPadding::pad(const std::vector<TokenFeature>& features) const {
  Batch batch;
  int64_t longest = 0;
  int64_t shortest = padding_.pad_to_length;
  bool token_types = false;
  for (const TokenFeature& feature : features) {
    const int64_t tokens = std::ssize(feature.input_ids);
    if (padding_.pad_to_length > 0 && tokens > padding_.pad_to_length) {
      throw InputError(detail::kDataCollator, detail::sample_text(feature),
                       "at most pad_to_length=" + std::to_string(padding_.pad_to_length));
    }
    if (!feature.token_type_ids.empty()) {
      detail::require_per_token(feature, feature.token_type_ids.size(), "token_type_ids");
      token_types = true;
    }
    longest = std::max(longest, tokens);
    shortest = batch.indices.empty() ? tokens : std::min(shortest, tokens);
    batch.indices.push_back(feature.index);
  }
  const int64_t multiple = padding_.pad_to_multiple_of;
  const int64_t length = padding_.pad_to_length > 0
                             ? padding_.pad_to_length
                             : (std::max<int64_t>(longest, 1) + multiple - 1) / multiple * multiple;
  batch.padded = !features.empty() && shortest < length;
  const auto padded = [&](int64_t fill, const auto& row) {
    return detail::padded_rows(features, length, padding_.padding_side, fill, row);
  };
  const std::vector<int64_t> ones(static_cast<size_t>(longest), 1);
  batch.tensors = {
      {"input_ids", padded(padding_.pad_id, [](const auto& f) { return std::span(f.input_ids); })},
      {"attention_mask",
       padded(0, [&](const auto& f) { return std::span(ones).first(f.input_ids.size()); })}};
  if (token_types) {
    batch.tensors.emplace("token_type_ids",
                          padded(0, [](const auto& f) { return std::span(f.token_type_ids); }));
  }
  return batch;
}

Batch DataCollatorWithPadding::operator()(const std::vector<TokenFeature>& features,
                                          uint64_t) const {
  Batch batch = pad(features);
  if (!features.empty()) {
    std::visit(
        [&]<typename L>(const L& first) {
          if constexpr (!std::is_same_v<L, std::monostate>) {
            batch.tensors.emplace("labels", detail::stacked_labels(features, first));
          }
        },
        features.front().labels);
  }
  return batch;
}

DataCollatorForTokenClassification::DataCollatorForTokenClassification(
    const PaddingOptions& padding, int64_t label_pad_token_id)
    : DataCollatorWithPadding(padding), label_pad_token_id_(label_pad_token_id) {}

Batch DataCollatorForTokenClassification::operator()(const std::vector<TokenFeature>& features,
                                                     uint64_t) const {
  Batch batch = pad(features);
  if (!features.empty() && !std::holds_alternative<std::monostate>(features.front().labels)) {
    batch.tensors.emplace(
        "labels", detail::padded_rows(
                      features, batch["input_ids"].size(1), padding_.padding_side,
                      label_pad_token_id_, [](const TokenFeature& feature) {
                        const auto* labels = std::get_if<std::vector<int64_t>>(&feature.labels);
                        detail::require_per_token(feature, labels == nullptr ? 0 : labels->size(),
                                                  "labels");
                        return std::span(*labels);
                      }));
  }
  return batch;
}

DataCollatorForLanguageModeling::DataCollatorForLanguageModeling(
    const Tokenizer& tokenizer, const DataCollatorForLanguageModelingOptions& options)
    : DataCollatorWithPadding(options.padding.value_or(tokenizer.padding())),
      options_(options),
      mask_id_(tokenizer.special_id("mask_token")),
      vocab_size_(static_cast<uint64_t>(tokenizer.size())),
      special_(vocab_size_) {
  if (mask_id_ < 0) {
    throw InputError("text::DataCollatorForLanguageModeling", "mask_token=null",
                     "a tokenizer with a mask_token",
                     "set mask_token in the tokenizer's tokenizer_config.json");
  }
  detail::require_probability("mlm_probability", options.mlm_probability);
  detail::require_probability("mask_replace_prob", options.mask_replace_prob);
  detail::require_probability("random_replace_prob", options.random_replace_prob);
  detail::require_probability("mask_replace_prob + random_replace_prob",
                              options.mask_replace_prob + options.random_replace_prob);
  for (const char* name : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token",
                           "cls_token", "mask_token"}) {
    if (const int64_t id = tokenizer.special_id(name); id >= 0) {
      special_[static_cast<size_t>(id)] = true;
    }
  }
  for (const AddedToken& token : tokenizer.added_tokens()) {
    special_[static_cast<size_t>(token.id)] =
        special_[static_cast<size_t>(token.id)] || token.special;
  }
}

void DataCollatorForLanguageModeling::mask(const TokenFeature& feature, uint64_t epoch,
                                           int64_t* ids, int64_t* labels) const {
  const std::vector<int64_t>& words = feature.word_ids;
  if (options_.whole_word_mask || !words.empty()) {
    detail::require_per_token(feature, words.size(), "word_ids");
  }
  OrderRng random(
      stream_seed("masking", options_.seed, epoch, static_cast<uint64_t>(feature.index)), 0);
  const auto uniform = [&] { return static_cast<double>(random.next() >> 11) * 0x1p-53; }; // [0, 1)
  bool chosen = false;
  for (size_t i = 0; i < feature.input_ids.size(); ++i) {
    if (!options_.whole_word_mask || i == 0 || words[i] != words[i - 1]) {
      const auto id = static_cast<uint64_t>(ids[i]);
      const bool special = words.empty() ? id < vocab_size_ && special_[id] : words[i] < 0;
      chosen = !special && uniform() < options_.mlm_probability;
    }
    if (!chosen) {
      continue;
    }
    labels[i] = ids[i];
    const double replace = uniform();
    if (replace < options_.mask_replace_prob) {
      ids[i] = mask_id_;
    } else if (replace < options_.mask_replace_prob + options_.random_replace_prob) {
      ids[i] = static_cast<int64_t>(random.below(vocab_size_));
    }
  }
}

Batch DataCollatorForLanguageModeling::operator()(const std::vector<TokenFeature>& features,
                                                  uint64_t epoch) const {
  Batch batch = pad(features);
  const at::Tensor& input_ids = batch["input_ids"];
  const int64_t length = input_ids.size(1);
  const at::Tensor labels = at::full({std::ssize(features), length}, -100, at::kLong);
  int64_t first = 0;
  for (const TokenFeature& feature : features) {
    const int64_t skip =
        padding_.padding_side == TokenSide::left ? length - std::ssize(feature.input_ids) : 0;
    mask(feature, epoch, input_ids.mutable_data_ptr<int64_t>() + first + skip,
         labels.mutable_data_ptr<int64_t>() + first + skip);
    first += length;
  }
  batch.tensors.emplace("labels", labels);
  return batch;
}

} // namespace hasten
