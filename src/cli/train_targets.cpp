// hasten train where labels are numbers: regressions, and several labels a row.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "checks.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "head.h"
#include "train_run.h"

namespace hasten::detail {

struct TargetInputs {
  Head head = Head::regression;
  TextTargets data{};
  std::optional<WordPieceTokenizer> tokenizer{};
  TokenizedTexts train_texts{};
  TokenizedTexts eval_texts{};
  int64_t max_length = 0;
  LoadedBert bert{};
};

WordPieceTokenizer target_tokenizer(const TrainCommand& command,
                                    const std::vector<std::string>& texts) {
  if (!is_model_shape(command.model) || !command.tokenizer.empty()) {
    return WordPieceTokenizer::load(command.tokenizer.empty() ? command.model : command.tokenizer);
  }
  WordPieceOptions options;
  options.do_lower_case = !command.cased;
  options.model_max_length = BertConfig{}.max_position_embeddings;
  return WordPieceTokenizer(
      build_wordpiece_vocab(texts, options, {.vocab_size = command.vocab_size}), options);
}

/// A folder's regression keeps its head, whatever the column is called.
LoadedBert target_model(const TrainCommand& command, const TargetInputs& in) {
  LoadBertOptions options;
  const bool keeps_head = in.head == Head::regression && !is_model_shape(command.model) &&
                          head_of(read_bert_config(command.model)) == Head::regression;
  if (!keeps_head) {
    options.id2label = in.data.label_names;
  }
  options.problem_type = spelling(in.head);
  options.vocab_size = in.tokenizer->vocab_size();
  options.pad_token_id = in.tokenizer->pad_id();
  return load_bert_classifier(command.model, options);
}

std::shared_ptr<const Dataset> target_dataset(const TargetInputs& in, const TokenizedTexts& texts,
                                              const TargetTexts& rows) {
  return rows.size() == 0 ? nullptr
                          : std::make_shared<const TargetDataset>(
                                make_dataset(texts, {}, *in.tokenizer), rows.targets,
                                in.data.targets_per_row(), in.head == Head::regression);
}

/// Local; touches nothing. Throws InputError for anything wrong with the input.
TargetInputs read_target_inputs(const TrainCommand& command, Head head, int world_size) {
  check_inputs(command);
  TargetInputs in;
  in.head = head;
  TextTargetsOptions options = target_options(command.table, head, {});
  if (head == Head::multi_label && options.label_columns.empty() &&
      options.label_separator.empty()) {
    throw InputError("cli::train", "--model=" + command.model + " gives a row several labels",
                     "--label-columns or --label-separator");
  }
  options.train_file = command.train_file;
  options.eval_file = command.eval_file;
  set_rows(command, options);
  in.data = load_text_targets(options);
  require_row_each(in.data.train.size(), world_size);
  require_class_weights(command, in.data.targets_per_row());
  in.tokenizer = target_tokenizer(command, in.data.train.texts);
  in.bert = target_model(command, in);
  check_vocabulary(command.model, in.bert.config, *in.tokenizer);
  in.max_length =
      allowed_length(command.arguments.max_length, in.bert.config, in.tokenizer->options());
  check_free_space(command.arguments.output_dir, bytes_on_disk(command.arguments, *in.bert.model));
  const int threads = tokenizer_threads();
  in.train_texts = tokenize_texts(*in.tokenizer, in.data.train.texts, in.max_length, threads);
  in.eval_texts = tokenize_texts(*in.tokenizer, in.data.eval.texts, in.max_length, threads);
  return in;
}

BannerLines target_facts(const TrainCommand& command, const TargetInputs& in) {
  BannerLines lines;
  lines.emplace_back("head", spelling(in.head));
  for (const std::string& line : in.data.lines()) {
    lines.emplace_back("data", line);
  }
  add_model_facts(lines, command, in.bert);
  return lines;
}

std::string target_checksum(const TargetInputs& in) {
  std::string rows;
  for (const auto& ids : in.train_texts.ids) {
    rows += hash_hex({reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(ids[0])});
  }
  const auto& targets = in.data.train.targets;
  rows += hash_hex(
      {reinterpret_cast<const char*>(targets.data()), targets.size() * sizeof(targets[0])});
  for (const std::string& name : in.data.label_names) {
    rows += "\n" + name;
  }
  return hash_hex(rows);
}

int run_train_targets(const TrainCommand& command, Head head) {
  return run_training(command, [&](int world_size, bool) {
    const auto in =
        std::make_shared<const TargetInputs>(read_target_inputs(command, head, world_size));
    return TrainingInputs{.train = target_dataset(*in, in->train_texts, in->data.train),
                          .eval = target_dataset(*in, in->eval_texts, in->data.eval),
                          .bert = in->bert,
                          .loss = head_loss(in->bert.model, head),
                          .metrics = head_metrics(head, in->bert.config.num_labels()),
                          .files = classifier_files(in->bert.model, *in->tokenizer),
                          .max_length = in->max_length,
                          .learns = command.train_file,
                          .facts = [&command, in] { return target_facts(command, *in); },
                          .checksum = [in] { return target_checksum(*in); }};
  });
}

} // namespace hasten::detail
