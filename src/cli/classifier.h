// A model with a task for the commands: model, tokenizer and the length to which texts are
// truncated. Private to src/cli.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "commands.h"
#include "hasten/models/auto_model.h"
#include "hasten/models/lora.h"
#include "hasten/tasks/task.h"
#include "hasten/text/text_table.h"
#include "hasten/text/tokenized_dataset.h"
#include "hasten/text/tokenizer.h"
#include "hasten/trainer/trainer.h"

namespace hasten::detail {

/// `wanted`, or none where the model does not keep the texts of a row apart.
PackingStrategy packing_of(PreTrainedModel model, const Task& task, PackingStrategy wanted);

/// What the labels of a task's model are: problem_type_of() where the task has several kinds.
ProblemType problem_type(const Task& task, const PreTrainedConfig& config);

struct TextModel {
  const Task* task = nullptr;
  PreTrainedModel model{nullptr};
  Tokenizer tokenizer;
  /// Maximum number of tokens of a text, including [CLS] and [SEP].
  int64_t max_length = 0;
  /// Precision of the evaluations of the run that trained it.
  Precision precision = Precision::no;
  /// Of that run's loss.
  double label_smoothing_factor = 0;
  std::string class_weights{};

  /// The data of an evaluation, as of the run that trained it.
  TaskDataOptions data{};
  SampleBy sample_by = SampleBy::line;

  const std::vector<std::string>& labels() const { return model->config().id2label; }
  ProblemType problem_type() const { return detail::problem_type(*task, model->config()); }
};

/// The tokenizer in a model's folder. An adapter without one, as PEFT saves it, has its base's.
Tokenizer tokenizer_of(const std::string& name);

/// Loads a model from a folder or from Hugging Face's cache, for --task, or for the task of its head.
/// A max_length of 0 uses the value in the folder's training_args.json, at most the limit of model and
/// tokenizer. Throws InputError for a bad
/// folder, a model without a trained head, or a vocabulary larger than the model's.
TextModel load_text_model(const ModelFlags& flags);

/// min(`asked`, the model's positions, the tokenizer's model_max_length); `asked` 0 means no limit.
int64_t allowed_length(int64_t asked, const PreTrainedConfig& config, int64_t model_max_length);

/// Tokens of a row of text-generation: `asked`, or for 0 the model's positions, at most 1024. Throws
/// InputError if the model has fewer positions.
int64_t block_length(int64_t asked, const PreTrainedConfig& config);

/// Throws InputError if the tokenizer has ids outside the model's embedding.
void check_vocabulary(const std::string& folder, const PreTrainedConfig& config,
                      const Tokenizer& tokenizer);

/// A text that shows what a task's model is for.
std::string example_text(const Task& task, const Tokenizer& tokenizer);

/// A batch of random samples of length `tokens`. The last sample has padding, so that blocks get
/// a mask as in training.
Batch made_up_batch(const PreTrainedModelImpl& model, int64_t rows, int64_t tokens);

/// config.json, model.safetensors and the tokenizer's files.
/// With `lora` the files of an adapter.
ModelFiles classifier_files(PreTrainedModel model, Tokenizer tokenizer,
                            const std::optional<LoraConfig>& lora = {});
/// nullopt without --lora-r.
std::optional<LoraConfig> lora_config(const LoraFlags& flags);

/// Threads with which this rank tokenizes.
int tokenizer_threads();

/// The columns' names are the task's where the flags have none.
TextTableOptions table_options(const TableFlags& flags, const Task& task);

/// Options for reading a table with labels. `model_labels` are the label columns of a problem with
/// several labels per sample, if the flags do not name them.
TextTableOptions labelled_table(const TableFlags& flags, const Task& task, Head head,
                                const std::vector<std::string>& model_labels = {});

/// For text-generation: documents, and their columns unless the flags name them.
void set_documents(TextTableOptions& table, const TableFlags& flags, const Task& task,
                   SampleBy sample_by, const TextFiles& files);

/// Warns of texts that were truncated.
void warn_of_truncated_texts(const TextModel& model, int64_t truncated, int64_t texts);

/// Throws InputError if a sample's logits are not finite, naming the first such row of `source`,
/// and a weight that is not finite, if there is one.
void require_finite_logits(const TextModel& model, const at::Tensor& logits,
                           const std::string& where, const std::string& source);

/// A Trainer that only evaluates and predicts. Without an accelerator it makes its own.
std::unique_ptr<Trainer> make_evaluator(const TextModel& model, int64_t batch_size,
                                        std::shared_ptr<Accelerator> accelerator = nullptr);

} // namespace hasten::detail
