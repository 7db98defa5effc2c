// Tokenised texts as a Dataset, in memory or in a file, padded batch by batch.
// Threading: const functions may be called from several threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hasten/data/dataset.h"
#include "hasten/data/problem_type.h"
#include "hasten/data/tokenizer.h"

namespace hasten {

struct TokenizedTexts {
  std::vector<std::vector<int64_t>> ids{}; // [row][token]
  int64_t truncated = 0; // rows that max_length cut
  int64_t tokens = 0; // of all rows together
};

/// Encodes all texts, in order. max_length: tokens with [CLS] and [SEP]; 0 is no
/// limit. threads ≥ 1 share the rows; the result does not depend on them.
/// Throws what WordPieceTokenizer::encode throws, naming the row.
TokenizedTexts tokenize_texts(const WordPieceTokenizer& tokenizer,
                              const std::vector<std::string>& texts, int64_t max_length,
                              int threads = 1);

/// Where a row lies among the ids of its table.
struct TokenRow {
  int64_t begin = 0; // of the table's ids
  int32_t tokens = 0;
  /// The class's number; of a regression the bits of the number, a float; of
  /// multi_label how many class numbers lie behind the tokens.
  int32_t label = 0;
};

/// Token ids one behind the other, in memory or in a file.
class TokenIds {
 public:
  virtual ~TokenIds() = default;
  virtual int64_t size() const = 0;
  /// Those from `begin` on, as many as `out` takes; begin + out.size() <= size().
  /// Throws Error naming a file that changed since it was opened.
  virtual void read(int64_t begin, std::span<int32_t> out) const = 0;
};

/// Rows of token ids. Copies share them.
struct TokenTable {
  std::shared_ptr<const TokenIds> ids{};
  std::span<const TokenRow> rows{}; // [row]
  bool has_labels = true;
  ProblemType problem_type = ProblemType::single_label;
  int64_t num_labels = 0; // of multi_label
  std::shared_ptr<const void> owner{}; // keeps `rows` alive
};

struct PaddingOptions {
  /// Fills rows up to the longest of the batch.
  int64_t pad_id = 0;
  /// Rounds the batch's length up to a multiple of this; 1 does not.
  int64_t pad_to_multiple_of = 1;
  /// Pads every batch to this length instead; 0: the longest row's.
  int64_t pad_to_length = 0;
};

/// Batches hold
///   input_ids       [B, T] int64
///   attention_mask  [B, T] int64, 1 on tokens and 0 on padding
///   labels          [B] int64, where there are labels; of a regression [B] float,
///                   of multi_label [B, num_labels] float, 1 on the row's labels
/// A batch of no rows has shapes [0, 1] and [0].
/// Memory: 4 bytes a token and 16 a row; of a file's the rows alone, whose ids are
/// read for each batch.
class TokenizedDataset : public Dataset {
 public:
  /// `labels` has one number a row, or is empty.
  /// Throws InputError: sizes differ, an id or a label outside int32, a row
  ///   without ids, a row longer than pad_to_length.
  TokenizedDataset(const std::vector<std::vector<int64_t>>& ids, std::vector<int64_t> labels,
                   PaddingOptions padding = {});
  /// Rows that lie somewhere already; nothing is copied.
  /// Throws InputError: a row without ids, outside the ids or longer than
  ///   pad_to_length.
  explicit TokenizedDataset(TokenTable table, PaddingOptions padding = {});

  int64_t size() const override;
  /// Tokens of the row.
  int64_t length(int64_t index) const override;
  Batch collate(const std::vector<int64_t>& indices) const override;

 private:
  void check() const;
  const TokenRow& row(int64_t index) const;
  /// Class numbers behind the row's tokens.
  int64_t classes(const TokenRow& row) const {
    return table_.problem_type == ProblemType::multi_label ? row.label : 0;
  }
  at::Tensor empty_labels(int64_t rows) const;

  TokenTable table_{};
  PaddingOptions padding_;
};

} // namespace hasten
