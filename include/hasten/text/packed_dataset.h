// Documents as the rows of a causal language model.
// Threading: const functions may be called from several threads.
#pragma once

#include <cstdint>
#include <vector>

#include "hasten/data/dataset.h"
#include "hasten/text/packing.h"
#include "hasten/text/tokenized_dataset.h"

namespace hasten {

/// A sample is a row of one or more pieces of documents (PackingStrategy). Which document is in which
/// row depends on the table alone, not on ranks or batches. A batch has
///   input_ids       [B, T] int64; rows shorter than T end with pad_token_id
///   attention_mask  [B, T] int64, 1 for tokens and 0 for padding. A decoder does not need it, because
///                   padding comes last: `padded` is false
///   labels          [B, T] int64: input_ids (a model shifts them), but -100 in padding, in a prompt
///                   and, except for wrapped, at a document's first token, which nothing predicts
///   position_ids    [B, T] int64, 0, 1, … in each piece, by which a decoder keeps documents apart;
///                   only if a row has several pieces, and not for wrapped
/// A document's loss does not depend on its row (but for wrapped), so a perplexity is that of the
/// documents.
/// Memory: 16 bytes per piece; a batch reads its ids.
class PackedDataset : public Dataset {
 public:
  /// TokenRow::label of a document is how many of its first tokens have no loss: its prompt's.
  /// Throws InputError if block_size is below 2, or no document has a token to predict.
  PackedDataset(TokenTable table, int64_t block_size, PackingStrategy strategy,
                int64_t pad_token_id);

  int64_t size() const override { return static_cast<int64_t>(row_ends_.size()); }
  int64_t length(int64_t index) const override;
  Batch collate(const std::vector<int64_t>& indices) const override;

 private:
  struct Piece {
    int64_t begin = 0; // in table_.ids
    int32_t tokens = 0;
    int32_t unlabelled = 0; // its first tokens
  };

  void wrap(int64_t block_size);
  std::vector<Piece> cut_documents(int64_t block_size) const;
  void fill_rows(const std::vector<Piece>& pieces, int64_t block_size);
  size_t row_begin(int64_t index) const;
  /// Writes a row's values; `positions` may be null.
  void write_row(int64_t index, int64_t* ids, int64_t* labels, int64_t* positions) const;

  TokenTable table_;
  PackingStrategy strategy_;
  int64_t pad_token_id_;
  std::vector<Piece> pieces_{}; // row by row
  std::vector<size_t> row_ends_{}; // in pieces_
};

} // namespace hasten
