// A text classifier as the commands use it: model, tokenizer and the length
// that texts are cut to. Private to src/cli.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "commands.h"
#include "hasten/data/text_table.h"
#include "hasten/data/tokenized_dataset.h"
#include "hasten/data/tokenizer.h"
#include "hasten/models/bert_pretrained.h"
#include "hasten/trainer/trainer.h"

namespace hasten::detail {

struct TextClassifier {
  LoadedBert bert{};
  WordPieceTokenizer tokenizer;
  /// Tokens a text is cut to, [CLS] and [SEP] counted.
  int64_t max_length = 0;
  /// What the run that trained it evaluated in.
  Precision precision = Precision::no;
  /// Of its loss.
  double label_smoothing_factor = 0;
  std::string class_weights{};

  const std::vector<std::string>& labels() const { return bert.config.id2label; }
};

/// A classifier ready for use. `max_length` 0 takes what the folder's
/// training_args.json says, at most what model and tokenizer allow.
/// Throws InputError: whatever is wrong with the folder; a model without a
/// trained classifier; a vocabulary larger than the model's.
TextClassifier load_text_classifier(const std::string& folder, int64_t max_length);

/// min(`asked`, the model's positions, the tokenizer's model_max_length); 0 asks
/// for nothing.
int64_t allowed_length(int64_t asked, const BertConfig& config, const WordPieceOptions& tokenizer);

/// Throws InputError where the tokenizer has ids the model has no row for.
void check_vocabulary(const std::string& folder, const BertConfig& config,
                      const WordPieceTokenizer& tokenizer);

/// Cross-entropy, summed over rows; weight = rows; outputs = logits. Batches
/// without labels give logits alone.
LossFunction classification_loss(BertForSequenceClassification model);

/// Rows of made-up tokens as long as they may be, the last with some padding, so that
/// blocks get a mask as in training.
Batch made_up_batch(const BertConfig& config, int64_t rows, int64_t tokens);

/// config.json, model.safetensors and the tokenizer's files.
ModelFiles classifier_files(BertForSequenceClassification model, WordPieceTokenizer tokenizer);

/// Rows as a dataset, padded with the tokenizer's pad id.
std::shared_ptr<const TokenizedDataset> make_dataset(const TokenTable& rows,
                                                     const WordPieceTokenizer& tokenizer);

/// Threads this rank may tokenise with.
int tokenizer_threads();

TextTableOptions table_options(const TableFlags& flags);

/// Warns of texts that were cut.
void tell_of_cut_texts(const TextClassifier& classifier, int64_t truncated, int64_t texts);

/// Throws InputError where a row's logits are not finite: names the first row of
/// `source`, and a weight that is not finite.
void require_finite_logits(const TextClassifier& classifier, const at::Tensor& logits,
                           const std::string& where, const std::string& source);

/// A Trainer that only evaluates and predicts, in a world of one.
std::unique_ptr<Trainer> make_evaluator(const TextClassifier& classifier, int64_t batch_size);

} // namespace hasten::detail
