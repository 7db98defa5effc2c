// Tokenized texts as a Dataset, in memory or in a file. Each batch is padded by itself.
// Threading: const functions may be called from several threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hasten/data/dataset.h"
#include "hasten/text/problem_type.h"
#include "hasten/text/tokenizer.h"

namespace hasten {

struct TokenizedTexts {
  std::vector<std::vector<int64_t>> ids{}; // [row][token]
  int64_t truncated = 0; // samples that max_length truncated
  int64_t tokens = 0; // of all samples together
};

/// Encodes all texts, in order. `max_length` includes special tokens; 0 is no limit. `threads` ≥ 1
/// share the work; the result does not depend on their number. Throws what
/// Tokenizer::encode throws; the message has the index of the text.
TokenizedTexts tokenize_texts(const Tokenizer& tokenizer, const std::vector<std::string>& texts,
                              int64_t max_length, int threads = 1);

/// Position of a sample's ids in its table.
struct TokenRow {
  int64_t begin = 0; // index in TokenTable::ids
  int32_t tokens = 0;
  /// single_label: the class number. regression: the bits of the number as a float. multi_label:
  /// how many class numbers follow the tokens.
  int32_t label = 0;
};

/// The token ids of all samples, one sample after the other (multi_label: each sample's ids, then
/// its class numbers), in memory or in a file.
class TokenIds {
 public:
  virtual ~TokenIds() = default;
  virtual int64_t size() const = 0;
  /// Fills `out` with the ids from index `begin` on; begin + out.size() <= size(). Throws Error
  /// with the file's name if the file has changed since it was opened.
  virtual void read(int64_t begin, std::span<int32_t> out) const = 0;
};

/// Samples as token ids. Copies share the ids.
struct TokenTable {
  std::shared_ptr<const TokenIds> ids{};
  std::span<const TokenRow> rows{}; // [row]
  bool has_labels = true;
  ProblemType problem_type = ProblemType::single_label;
  int64_t num_labels = 0; // multi_label only
  std::shared_ptr<const void> owner{}; // keeps `rows` alive
};

/// A batch has
///   input_ids       [B, T] int64
///   attention_mask  [B, T] int64, 1 for tokens and 0 for padding
///   labels          if the table has labels: [B] int64; for regression [B] float;
///                   for multi_label [B, num_labels] float, 1 for the sample's labels
/// and `padded` says whether a sample is shorter than T. An empty batch has shapes [0, 1] and [0].
/// Memory: 4 bytes per token and 16 per sample; with a file 16 bytes per sample, since the ids are
/// read for each batch.
class TokenizedDataset : public Dataset {
 public:
  /// `labels` has one number per sample, or is empty.
  /// Throws InputError if the sizes differ, an id or label does not fit in int32, or a sample has
  /// no ids or is longer than pad_to_length.
  TokenizedDataset(const std::vector<std::vector<int64_t>>& ids, std::vector<int64_t> labels,
                   PaddingOptions padding = {});
  /// Uses an existing table without a copy. Throws InputError if a sample has no ids, lies outside
  /// the ids or is longer than pad_to_length.
  explicit TokenizedDataset(TokenTable table, PaddingOptions padding = {});

  int64_t size() const override;
  /// Number of tokens of sample `index`.
  int64_t length(int64_t index) const override;
  Batch collate(const std::vector<int64_t>& indices) const override;

 private:
  void check() const;
  const TokenRow& row(int64_t index) const;
  /// Class numbers that follow the sample's tokens.
  int64_t classes(const TokenRow& row) const {
    return table_.problem_type == ProblemType::multi_label ? row.label : 0;
  }
  at::Tensor empty_labels(int64_t rows) const;

  TokenTable table_{};
  PaddingOptions padding_;
};

} // namespace hasten
