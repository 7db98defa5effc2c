// Token ids as a file, of which rows are read when they are asked for. Private to
// src/data.
//
// The format, in the machine's byte order (another one's file counts as damaged):
//   0   8 bytes   "hastentk"
//   8   u64       2, the format's number
//   16  32 bytes  the key, hex digits
//   48  u64       bytes of the whole file
//   56  u64       XXH3 of all bytes from 64 on
//   64  int32[]   ids of all rows, of several labels a row each followed by its class
//                 numbers; filled up with zeros to a multiple of 16 bytes
//       TokenRow[] rows of training, then those of evaluation
//       text      JSON: "ids", "train", "eval" are their numbers, the rest is the
//                 caller's
//       u64       bytes of that text
#pragma once

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "hasten/data/tokenized_dataset.h"

namespace hasten::detail {

/// What a table in memory owns.
struct StoredTokens : TokenIds {
  std::vector<int32_t> ids{};
  std::vector<TokenRow> rows{};

  int64_t size() const override { return static_cast<int64_t>(ids.size()); }
  void read(int64_t begin, std::span<int32_t> out) const override {
    std::copy_n(ids.begin() + begin, out.size(), out.begin());
  }
};

/// Takes ids as they are made.
class TokenSink {
 public:
  virtual ~TokenSink() = default;
  virtual void add(std::span<const int32_t> ids) = 0;
};

/// A token file in the making: a temporary file beside the target, then one
/// rename. No fsync: what a crash leaves is found out by its checksum.
class TokenFileWriter : public TokenSink {
 public:
  /// Throws std::system_error, as all members do, where the disk does not let it.
  TokenFileWriter(std::filesystem::path target, const std::string& key);
  /// Removes the temporary file unless finish() was called.
  ~TokenFileWriter() override;
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;

  void add(std::span<const int32_t> ids) override;
  void finish(std::span<const TokenRow> train, std::span<const TokenRow> eval,
              nlohmann::json values);

 private:
  struct Hash;
  void write(const void* data, size_t bytes);
  void flush();
  void write_at(const void* data, size_t bytes, off_t at);

  std::filesystem::path target_;
  std::string key_;
  std::string temporary_;
  int file_ = -1;
  int64_t ids_ = 0;
  uint64_t bytes_ = 0; // behind the header, buffered ones counted
  std::vector<char> buffer_{};
  std::unique_ptr<Hash> hash_;
};

/// A token file that was found whole.
struct TokenFile {
  TokenTable train{};
  TokenTable eval{};
  nlohmann::json values{};
};

/// Opens a file and verifies all of it: one pass over its bytes. Returns nothing
/// where there is none, or, with `problem` set, where it is damaged or another's.
/// Memory: 16 bytes a row, and 8 for 4 KiB of the file.
std::unique_ptr<TokenFile> open_token_file(const std::filesystem::path& path,
                                           const std::string& key, std::string& problem);

} // namespace hasten::detail
