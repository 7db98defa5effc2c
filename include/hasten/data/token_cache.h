// The rows of a text classifier (or regression) as token ids, made once and kept on disk.
//
// The cached file lies in <cache_dir>/tokens under a name made of all that the ids
// depend on: the bytes of the input files, how their columns are read, the split,
// the vocabulary (or how it is learned) and the length. Rows are read from it as
// they are needed, so neither texts nor ids need fit in memory. Nothing is ever cleared
// from it; the folder may be deleted at any time.
// One process at a time makes a file, under a lock that its death frees; the others
// wait for it, however long it takes. Where nothing can be kept, all have the ids in
// memory. Nothing here logs: reports are values.
// Threading: free functions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hasten/data/text_classification.h"
#include "hasten/data/tokenized_dataset.h"
#include "hasten/data/tokenizer.h"

namespace hasten {

/// `given`, or else HASTEN_CACHE, or else $XDG_CACHE_HOME/hasten, or else
/// ~/.cache/hasten; empty where the environment has none of them.
std::filesystem::path cache_folder(const std::filesystem::path& given = {});

struct TokenizeProgress {
  /// Another process makes the ids and this one waits for it.
  bool waiting = false;
  /// Bytes of the input files.
  int64_t done = 0;
  int64_t total = 0;
};

struct TokenizedClassificationOptions {
  TextClassificationOptions texts{};
  /// Nothing: a vocabulary is learned from the training side, with the next two.
  std::optional<WordPieceTokenizer> tokenizer{};
  WordPieceOptions learned{};
  WordPieceVocabOptions vocab{};
  /// Tokens with [CLS] and [SEP]; 0 is no limit.
  int64_t max_length = 0;
  /// Threads that share the rows, >= 1; the result does not depend on them.
  int threads = 1;
  /// As cache_folder() gives it. Empty: in memory.
  std::filesystem::path cache_dir{};
  /// Called in the caller's thread, at most 20 times a second.
  std::function<void(const TokenizeProgress&)> progress{};
};

/// Where the ids are from.
struct TokenCacheReport {
  enum class Source { memory, read, made };
  Source source = Source::memory;
  std::filesystem::path path{}; // of the file; empty in memory
  /// Why a file that was there was made again: "it is cut off". Empty: it was not.
  std::string rebuilt{};
  /// Why nothing is kept although there is a cache_dir. Empty: it is.
  std::string not_kept{};
};

struct TokenizedClassification {
  TokenTable train{};
  TokenTable eval{};
  std::vector<std::string> label_names{}; // [label number]
  TextClassificationReport report{};
  WordPieceTokenizer tokenizer;
  int64_t tokens = 0; // of both sides
  int64_t truncated = 0; // rows that max_length cut
  /// Of the training side's ids and labels, in order; 32 hex digits.
  std::string train_checksum{};
  TokenCacheReport cache{};
};

/// Reads, splits (select_text_rows) and tokenises, or opens what an earlier run has
/// kept. `eval_file` may be null.
/// Local; blocks while another process makes the same ids. Memory: 37 bytes a row
/// while ids are made, and about 8 MB of text; in memory 4 bytes a token more.
/// Cost with a file that is there: one pass over the input's and the file's bytes,
/// for their hashes (about 5 GB/s each).
/// Throws InputError: as select_text_rows, WordPieceLearner::learn and
///   WordPieceTokenizer::encode. Throws Interrupted. A cache that cannot be read or
///   written is no error.
TokenizedClassification tokenize_text_classification(
    const std::shared_ptr<const TextFile>& train_file,
    const std::shared_ptr<const TextFile>& eval_file,
    const TokenizedClassificationOptions& options);

} // namespace hasten
