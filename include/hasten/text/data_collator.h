// Data collators make a padded batch of tokenized samples, as transformers' do.
// Threading: const functions may be called from several threads.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "hasten/data/dataset.h"
#include "hasten/text/tokenizer.h"

namespace hasten {

/// One tokenized sample before padding.
struct TokenFeature {
  /// None; a class; the number of a regression; zeros and ones of several labels [L]; a class for
  /// each token [T].
  using Labels =
      std::variant<std::monostate, int64_t, float, std::vector<float>, std::vector<int64_t>>;

  std::vector<int64_t> input_ids{};
  std::vector<int64_t> token_type_ids{}; // empty: all 0
  /// Index of each token's word in its text, -1 for special tokens. Only masking reads it.
  std::vector<int64_t> word_ids{};
  Labels labels{};
  int64_t index = 0; // of the sample in its dataset
};

class DataCollator {
 public:
  virtual ~DataCollator() = default;
  /// The batch of `features`, in order. `epoch` is that of the training loader, so that each epoch
  /// can draw anew; an evaluation's is 0.
  virtual Batch operator()(const std::vector<TokenFeature>& features, uint64_t epoch) const = 0;
};

/// A batch has
///   input_ids       [B, T] int64
///   attention_mask  [B, T] int64, 1 for tokens and 0 for padding
///   token_type_ids  [B, T] int64, 0 for padding; only if a feature has them
///   labels          only if the first feature has them: [B] int64 or float, [B, L] float or int64
/// and `padded` says whether a sample is shorter than T. Without features the shapes are [0, 1], and
/// there are no labels.
class DataCollatorWithPadding : public DataCollator {
 public:
  /// Throws InputError for a length out of range, and without a pad token (pad_id < 0).
  explicit DataCollatorWithPadding(const PaddingOptions& padding);
  /// Throws InputError with the sample's index if it is longer than pad_to_length, its token types
  /// are not one per token, or its labels are of another kind or number than the first sample's.
  Batch operator()(const std::vector<TokenFeature>& features, uint64_t epoch) const override;

 protected:
  /// The batch without labels.
  Batch pad(const std::vector<TokenFeature>& features) const;
  PaddingOptions padding_;
};

/// Labels are classes of tokens, padded to [B, T] int64 with `label_pad_token_id`.
class DataCollatorForTokenClassification : public DataCollatorWithPadding {
 public:
  explicit DataCollatorForTokenClassification(const PaddingOptions& padding,
                                              int64_t label_pad_token_id = -100);
  /// Throws InputError as DataCollatorWithPadding does, and if labels are not one per token.
  Batch operator()(const std::vector<TokenFeature>& features, uint64_t epoch) const override;

 private:
  int64_t label_pad_token_id_;
};

struct DataCollatorForLanguageModelingOptions {
  /// Probability that a token is chosen.
  double mlm_probability = 0.15;
  /// Probability that a chosen token becomes the mask token, and a random token. The others stay.
  double mask_replace_prob = 0.8;
  double random_replace_prob = 0.1;
  /// Chooses all tokens of a word together. Replacements are still drawn for each token, as in
  /// BERT. transformers replaces them all here: set mask_replace_prob = 1, random_replace_prob = 0.
  bool whole_word_mask = false;
  uint64_t seed = 42;
  /// If not set, the tokenizer's.
  std::optional<PaddingOptions> padding{};
};

/// Masked language modelling (Devlin et al., 2018). Every token that is not special can be chosen:
/// word_ids say which are special, or else the ids of the tokenizer's special tokens, among them
/// unk_token. Random tokens are uniform in 0 … tokenizer.size() - 1. `labels` [B, T] int64 has the
/// original ids of chosen tokens and -100 elsewhere. The features' labels are not used.
///
/// The draws depend on (seed, epoch, the sample's index) alone: they are the same for any batch
/// size, number of ranks and number of loader threads, and after a resume. In transformers they
/// depend on the order of the batches.
///
/// A batch may have no chosen token. Its mean loss would be 0 / 0. Sum the losses, and divide by the
/// chosen tokens of the whole step, as cross_entropy_output() and the Trainer do.
class DataCollatorForLanguageModeling : public DataCollatorWithPadding {
 public:
  /// Throws InputError without a mask_token or pad token, and if a probability or the sum of the
  /// two replacements is not in [0, 1].
  explicit DataCollatorForLanguageModeling(
      const Tokenizer& tokenizer, const DataCollatorForLanguageModelingOptions& options = {});
  /// Throws InputError as DataCollatorWithPadding does, and if word_ids are not one per token;
  /// without whole_word_mask they may be empty.
  Batch operator()(const std::vector<TokenFeature>& features, uint64_t epoch) const override;

 private:
  /// Masks a sample's `ids` in place and fills its `labels`.
  void mask(const TokenFeature& feature, uint64_t epoch, int64_t* ids, int64_t* labels) const;

  DataCollatorForLanguageModelingOptions options_;
  int64_t mask_id_;
  uint64_t vocab_size_;
  std::vector<bool> special_; // [id]
};

} // namespace hasten
