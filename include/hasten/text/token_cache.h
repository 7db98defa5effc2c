// Token ids of the samples of a text classifier or regression, made once and cached on disk.
//
// The cache file is in `cache_dir/tokens`. Its name is a hash of everything that determines the
// ids: the bytes of the input files, the columns and how they are read, the split, the tokenizer's
// files (or how a vocabulary is learned) and the length. Samples are read from the file when a batch needs them, so
// neither texts nor ids must fit in memory. hasten never deletes cache files. You may delete the
// folder at any time.
// One process at a time makes a file, under a lock that the kernel frees if the process dies. The
// others wait for it without a time limit. If the file cannot be written, every process keeps the
// ids in memory. Nothing here logs: reports are values.
// Threading: free functions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hasten/text/text_classification.h"
#include "hasten/text/tokenized_dataset.h"
#include "hasten/text/tokenizer.h"

namespace hasten {

/// Returns `given`, or else HASTEN_CACHE, or else $XDG_CACHE_HOME/hasten, or else ~/.cache/hasten.
/// Empty if none of them is set.
std::filesystem::path cache_folder(const std::filesystem::path& given = {});

struct TokenizeProgress {
  /// Another process makes the ids, and this process waits for it.
  bool waiting = false;
  /// Bytes of the input files.
  int64_t done = 0;
  int64_t total = 0;
};

struct TokenizedClassificationOptions {
  TextClassificationOptions texts{};
  /// If not set, a WordPiece vocabulary is learned from the training texts with the next two options.
  std::optional<Tokenizer> tokenizer{};
  WordPieceOptions learned{};
  WordPieceVocabOptions vocab{};
  /// Largest number of tokens, with special tokens; 0 is no limit.
  int64_t max_length = 0;
  /// Threads that tokenize, >= 1. The result does not depend on their number.
  int threads = 1;
  /// A folder as cache_folder() returns it. Empty: the ids are kept in memory.
  std::filesystem::path cache_dir{};
  /// Called in the caller's thread, at most 20 times a second.
  std::function<void(const TokenizeProgress&)> progress{};
};

/// Where the ids come from.
struct TokenCacheReport {
  enum class Source { memory, read, made };
  Source source = Source::memory;
  std::filesystem::path path{}; // of the file; empty if in memory
  /// Why an existing file was made again: "it is cut off". Empty if it was not.
  std::string rebuilt{};
  /// Why no file was kept although cache_dir is set. Empty if one was kept.
  std::string not_kept{};
};

struct TokenizedClassification {
  TokenTable train{};
  TokenTable eval{};
  std::vector<std::string> label_names{}; // [label number]
  TextClassificationReport report{};
  Tokenizer tokenizer;
  int64_t tokens = 0; // of training and evaluation samples
  int64_t truncated = 0; // samples that max_length truncated
  /// Checksum of the training samples' ids and labels, in order; 32 hex digits.
  std::string train_checksum{};
  TokenCacheReport cache{};
};

/// Reads, splits (select_text_rows) and tokenizes the files, or opens the cache file of an earlier
/// run. `eval_files` may be empty.
/// Local; blocks while another process makes the same ids. Memory: 37 bytes per sample while ids
/// are made, and about 8 MB of text; without a cache file 4 bytes per token more. Cost with an
/// existing cache file: one pass over the input files and the cache file for their hashes (about 5
/// GB/s each).
/// Throws InputError as select_text_rows, WordPieceLearner::learn and Tokenizer::encode do. Throws Interrupted. A cache that cannot be read or written is not an error.
TokenizedClassification tokenize_text_classification(const TextFiles& train_files,
                                                     const TextFiles& eval_files,
                                                     const TokenizedClassificationOptions& options);

} // namespace hasten
