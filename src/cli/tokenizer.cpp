#include "hasten/text/tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "hasten/base/progress_bar.h"
#include "hasten/base/text.h"
#include "hasten/io/commit.h"
#include "hasten/models/pretrained_config.h"
#include "hasten/text/text_table.h"
#include "hasten/text/utf8.h"
#include "run.h"

namespace hasten {

namespace detail {

/// Calls `add` for each text of the file, which is read once.
void for_each_text(const std::string& path, const std::string& text_column,
                   const std::function<void(std::string_view, int64_t bytes_read)>& add) {
  static const std::set<std::string> kTables{".csv", ".tsv", ".tab", ".jsonl", ".ndjson", ".json"};
  const auto file = TextFile::open(path, "cli::tokenizer");
  if (kTables.contains(file->extension())) {
    TextTableOptions options;
    options.text_column = text_column;
    options.label_column.clear();
    TextRowReader reader(file, options);
    while (reader.next()) {
      add(reader.text(), reader.bytes_read());
    }
    return;
  }
  TextWindow window(file);
  size_t at = file->mark_bytes();
  for (std::string_view line; window.next_line(at, line);) {
    add(line, static_cast<int64_t>(window.begin() + at));
  }
}

/// Prints one line per text: {"input_ids": [...]}.
int encode_texts(const TokenizerCommand& command) {
  const auto tokenizer = AutoTokenizer::from_pretrained(command.tokenizer);
  std::string out;
  for (const std::string& file : command.files) {
    for_each_text(file, command.text_column, [&](std::string_view text, int64_t) {
      throw_if_interrupted();
      const auto ids = tokenizer.encode(text, {.max_length = command.max_length}).ids;
      out += nlohmann::json{{"input_ids", ids}}.dump() + "\n";
      if (out.size() > size_t{1} << 20) {
        std::cout << std::exchange(out, {});
      }
    });
  }
  std::cout << out << std::flush;
  if (!std::cout) {
    throw Error("cli::tokenizer", "cannot write to stdout");
  }
  return kExitOk;
}

int learn_tokenizer(const TokenizerCommand& command) {
  WordPieceOptions options;
  options.do_lower_case = !command.cased;
  options.model_max_length = PreTrainedConfig{}.max_position_embeddings;
  WordPieceLearner learner(options);
  int64_t bytes = 0;
  for (const std::string& file : command.files) {
    std::error_code error;
    const auto size = std::filesystem::file_size(file, error);
    bytes += error ? 0 : static_cast<int64_t>(size);
  }
  ProgressBar bar("read", std::max<int64_t>(1, bytes), true);
  int64_t before = 0; // bytes of the files that were read
  for (const std::string& file : command.files) {
    int64_t line = 0;
    int64_t read = 0;
    for_each_text(file, command.text_column, [&](std::string_view text, int64_t at) {
      ++line;
      throw_if_interrupted();
      try {
        learner.add(text);
      } catch (const InputError&) {
        const size_t bad = invalid_utf8_position(text);
        throw InputError("cli::tokenizer",
                         file + ":" + std::to_string(line) +
                             ": invalid UTF-8: " + byte_name(text[bad]) + " at byte " +
                             std::to_string(bad + 1) + " of the line",
                         "UTF-8");
      }
      read = at;
      bar.update(before + read);
    });
    before += read;
  }
  bar.finish();
  const Tokenizer tokenizer =
      WordPieceTokenizer(learner.learn({.vocab_size = command.vocab_size,
                                        .min_frequency = command.min_frequency,
                                        .limit_alphabet = command.limit_alphabet}),
                         options);
  std::error_code missing;
  FolderCommit commit(command.output, std::filesystem::exists(command.output, missing)
                                          ? CommitMode::merge
                                          : CommitMode::create);
  tokenizer.save_pretrained(commit.folder());
  commit.commit();
  log_info(format_count(tokenizer.vocab_size()) + " pieces from " + format_count(learner.texts()) +
           " texts with " + format_count(learner.words()) + " distinct words, in " +
           command.output);
  return kExitOk;
}

} // namespace detail

int run_command(const TokenizerCommand& command) {
  install_interrupt_handlers();
  return command.action == "encode" ? detail::encode_texts(command)
                                    : detail::learn_tokenizer(command);
}

} // namespace hasten
