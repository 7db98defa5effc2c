// Token ids in a file, from which samples are read when a batch needs them. Private to src/data.
//
// The format, in the machine's byte order (a file in another byte order counts as damaged):
//   0   8 bytes   "hastentk"
//   8   u64       2, the version of the format
//   16  32 bytes  the key, hex digits
//   48  u64       bytes of the whole file
//   56  u64       XXH3 of all bytes from 64 on
//   64  int32[]   ids of all samples; with multi_label each followed by its class numbers; then
//                 zeros up to a multiple of 16 bytes
//       TokenRow[] training samples, then evaluation samples
//       text      JSON: "ids", "train" and "eval" are counts; the caller defines the other keys
//       u64       bytes of that text
#pragma once

#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "hasten/text/tokenized_dataset.h"

namespace hasten::detail {

/// Storage of a table in memory.
struct StoredTokens : TokenIds {
  std::vector<int32_t> ids{};
  std::vector<TokenRow> rows{};

  int64_t size() const override { return static_cast<int64_t>(ids.size()); }
  void read(int64_t begin, std::span<int32_t> out) const override {
    std::copy_n(ids.begin() + begin, out.size(), out.begin());
  }
};

/// The state of a hash that grows by parts.
using HashState = std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)>;

/// Writes a token file: first a temporary file in the same folder, then one rename. No fsync: after
/// a crash the checksum shows damage.
class TokenFileWriter {
 public:
  /// Throws std::system_error if the disk fails, as all members do.
  TokenFileWriter(std::filesystem::path target, const std::string& key);
  /// Removes the temporary file unless finish() was called.
  ~TokenFileWriter();
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;

  void add(std::span<const int32_t> ids);
  void finish(std::span<const TokenRow> train, std::span<const TokenRow> eval,
              nlohmann::json values);

 private:
  void write(const void* data, size_t bytes);

  std::filesystem::path target_;
  std::string key_;
  std::string temporary_;
  std::FILE* file_ = nullptr;
  int64_t ids_ = 0;
  uint64_t bytes_ = 0; // after the header
  HashState hash_{XXH3_createState(), &XXH3_freeState};
};

/// A token file that has been verified.
struct TokenFile {
  TokenTable train{};
  TokenTable eval{};
  nlohmann::json values{};
};

/// Opens a file and verifies all of it: one pass over its bytes. Returns null if there is no file,
/// and null with `problem` set if it is damaged or has another key. Memory: 16 bytes per sample,
/// and 8 bytes per 4 KiB of the file.
std::unique_ptr<TokenFile> open_token_file(const std::filesystem::path& path,
                                           const std::string& key, std::string& problem);

} // namespace hasten::detail
