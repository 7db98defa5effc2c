// Tokenized texts as a Dataset, in memory or in a file. Each batch is padded by itself.
// Threading: const functions may be called from several threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hasten/data/dataset.h"
#include "hasten/text/data_collator.h"
#include "hasten/text/problem_type.h"
#include "hasten/text/tokenizer.h"

namespace hasten {

struct TokenizedTexts {
  std::vector<std::vector<int64_t>> ids{}; // [row][token]
  std::vector<std::vector<int64_t>> token_type_ids{}; // [row][token]; empty without pairs
  int64_t truncated = 0; // samples that max_length truncated
  int64_t tokens = 0; // of all samples together
};

/// Encodes all texts, in order; with `text_pairs`, one for each text, as pairs. `max_length` includes special tokens; 0 is no limit. `threads` ≥ 1
/// share the work; the result does not depend on their number. Throws what
/// Tokenizer::encode throws; the message has the index of the text.
TokenizedTexts tokenize_texts(const Tokenizer& tokenizer, const std::vector<std::string>& texts,
                              int64_t max_length, int threads = 1,
                              const std::vector<std::string>& text_pairs = {});

/// A token with this label has no loss and is not counted, as in torch and transformers.
inline constexpr int32_t kIgnoredLabel = -100;

/// Position of a sample's ids in its table.
struct TokenRow {
  int64_t begin = 0; // index in TokenTable::ids
  int32_t tokens = 0;
  /// single_label: the class number. regression: the bits of the number as a float. multi_label:
  /// how many class numbers follow the tokens. Documents: how many of the first tokens are the
  /// prompt. Otherwise 0.
  int32_t label = 0;
};

/// The token ids of all samples, one sample after the other, in memory or in a file. After a
/// sample's ids come, with pairs, the number of tokens before the second text's; then for multi_label
/// its class numbers, for word_labels a label for each token (kIgnoredLabel for those that have none),
/// for unlabelled a word id for each token, but for documents nothing.
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
  bool pairs = false; // samples are pairs of texts
  std::shared_ptr<const void> owner{}; // keeps `rows` alive
};

/// Batches are those of a DataCollator. With DataCollatorWithPadding, labels are [B] int64, for
/// regression [B] float, for multi_label [B, num_labels] float, 1 for the sample's labels; word_labels
/// need DataCollatorForTokenClassification. A batch without samples has the tensors of one, with 0
/// rows.
/// Memory: 4 bytes per token and 16 per sample; with a file 16 bytes per sample, since the ids are
/// read for each batch.
class TokenizedDataset : public Dataset {
 public:
  /// `labels` has one number per sample, or is empty.
  /// Throws InputError if the sizes differ, an id or label does not fit in int32, or a sample has no
  /// ids or is longer than pad_to_length, and as DataCollatorWithPadding does.
  TokenizedDataset(const std::vector<std::vector<int64_t>>& ids, std::vector<int64_t> labels,
                   PaddingOptions padding = {});
  /// Uses an existing table without a copy. Throws InputError if a sample has no ids, lies outside
  /// the ids or is longer than pad_to_length.
  explicit TokenizedDataset(TokenTable table, PaddingOptions padding = {});
  TokenizedDataset(TokenTable table, std::shared_ptr<const DataCollator> collator);

  int64_t size() const override;
  /// Number of tokens of sample `index`.
  int64_t length(int64_t index) const override;
  Batch collate(const std::vector<int64_t>& indices) const override {
    return collate_in_epoch(indices, 0);
  }
  Batch collate_in_epoch(const std::vector<int64_t>& indices, uint64_t epoch) const override;

 private:
  /// `longest`: most tokens of a sample; 0 is no limit.
  void check(int64_t longest = 0) const;
  const TokenRow& row(int64_t index) const;
  /// How many numbers follow the sample's tokens.
  int64_t numbers_after(const TokenRow& row) const;
  TokenFeature feature(int64_t index) const;

  TokenTable table_{};
  std::shared_ptr<const DataCollator> collator_;
};

} // namespace hasten
