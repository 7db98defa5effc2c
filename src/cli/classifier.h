// A text classifier for the commands: model, tokenizer and the length to which texts are
// truncated. Private to src/cli.
#pragma once

#include <string>
#include <vector>

#include "commands.h"
#include "hasten/models/auto_model.h"
#include "hasten/text/text_table.h"
#include "hasten/text/tokenized_dataset.h"
#include "hasten/text/tokenizer.h"
#include "hasten/trainer/trainer.h"

namespace hasten::detail {

struct TextClassifier {
  PreTrainedModel model{nullptr};
  Tokenizer tokenizer;
  /// Maximum number of tokens of a text, including [CLS] and [SEP].
  int64_t max_length = 0;
  /// Precision of the evaluations of the run that trained it.
  Precision precision = Precision::no;
  /// Of that run's loss.
  double label_smoothing_factor = 0;
  std::string class_weights{};

  const std::vector<std::string>& labels() const { return model->config().id2label; }
};

/// Loads a classifier from a folder or a repository in the cache. `max_length` 0 uses the value in the folder's training_args.json, at most
/// the limit of model and tokenizer. Throws InputError for a bad folder, a model without a trained
/// classifier, or a vocabulary larger than the model's.
TextClassifier load_text_classifier(const std::string& name, int64_t max_length);

/// min(`asked`, the model's positions, the tokenizer's model_max_length); `asked` 0 means no limit.
int64_t allowed_length(int64_t asked, const PreTrainedConfig& config, int64_t model_max_length);

/// Throws InputError if the tokenizer has ids outside the model's embedding.
void check_vocabulary(const std::string& folder, const PreTrainedConfig& config,
                      const Tokenizer& tokenizer);

/// The problem type by transformers' rule: one label without a problem_type is a regression.
Head head_of(const PreTrainedConfig& config);

/// The loss of this head. Batches without labels give only outputs: logits, for a regression [B].
LossFunction head_loss(PreTrainedModel model, Head head);
ComputeMetrics head_metrics(Head head, const std::vector<std::string>& labels);

/// A batch of random samples of length `tokens`. The last sample has padding, so that blocks get
/// a mask as in training.
Batch made_up_batch(const PreTrainedConfig& config, int64_t rows, int64_t tokens);

/// config.json, model.safetensors and the tokenizer's files.
ModelFiles classifier_files(PreTrainedModel model, Tokenizer tokenizer);

/// The samples as a dataset, padded with the tokenizer's pad id.
std::shared_ptr<const TokenizedDataset> make_dataset(const TokenTable& rows,
                                                     const Tokenizer& tokenizer);

/// Threads with which this rank tokenizes.
int tokenizer_threads();

TextTableOptions table_options(const TableFlags& flags);

/// Options for reading a table with labels. `model_labels` are the label columns of a problem with
/// several labels per sample, if the flags do not name them.
TextTableOptions labelled_table(const TableFlags& flags, Head head,
                                const std::vector<std::string>& model_labels = {});

/// Warns of texts that were truncated.
void tell_of_cut_texts(const TextClassifier& classifier, int64_t truncated, int64_t texts);

/// Throws InputError if a sample's logits are not finite, naming the first such row of `source`,
/// and a weight that is not finite, if there is one.
void require_finite_logits(const TextClassifier& classifier, const at::Tensor& logits,
                           const std::string& where, const std::string& source);

/// A Trainer that only evaluates and predicts. Without an accelerator it makes its own.
std::unique_ptr<Trainer> make_evaluator(const TextClassifier& classifier, int64_t batch_size,
                                        std::shared_ptr<Accelerator> accelerator = nullptr);

} // namespace hasten::detail
