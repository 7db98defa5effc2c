#include "token_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/process.h"

namespace hasten::detail {

constexpr size_t kTokenReadBuffer = size_t{1} << 20; // bytes
constexpr uint64_t kTokenFormat = 2;

struct TokenFileHeader {
  std::array<char, 8> magic{'h', 'a', 's', 't', 'e', 'n', 't', 'k'};
  uint64_t format = kTokenFormat;
  std::array<char, 32> key{};
  uint64_t file_bytes = 0;
  uint64_t checksum = 0;
};
static_assert(sizeof(TokenFileHeader) == 64 && sizeof(TokenRow) == 16);

std::array<char, 32> key_bytes(const std::string& key) {
  std::array<char, 32> bytes{};
  std::copy_n(key.begin(), std::min(key.size(), bytes.size()), bytes.begin());
  return bytes;
}

[[noreturn]] void throw_token_file_error(const std::string& path, int error) {
  throw std::system_error(error, std::generic_category(), path);
}

TokenFileWriter::TokenFileWriter(std::filesystem::path target, const std::string& key)
    : target_(std::move(target)), key_(key), temporary_(target_.string() + ".tmp-XXXXXX") {
  const int file = ::mkostemp(temporary_.data(), O_CLOEXEC);
  file_ = file < 0 ? nullptr : ::fdopen(file, "wb");
  if (file_ == nullptr) {
    throw_token_file_error(temporary_, errno);
  }
  XXH3_64bits_reset(hash_.get());
  const TokenFileHeader header; // finish() writes the real one
  std::fwrite(&header, sizeof(header), 1, file_); // into the buffer
}

TokenFileWriter::~TokenFileWriter() {
  if (file_ != nullptr) {
    std::fclose(file_);
    ::unlink(temporary_.c_str());
  }
}

void TokenFileWriter::add(std::span<const int32_t> ids) {
  ids_ += static_cast<int64_t>(ids.size());
  write(ids.data(), ids.size_bytes());
}

void TokenFileWriter::finish(std::span<const TokenRow> train, std::span<const TokenRow> eval,
                             nlohmann::json values) {
  const std::array<char, sizeof(TokenRow)> zeros{};
  write(zeros.data(), (sizeof(TokenRow) - bytes_ % sizeof(TokenRow)) % sizeof(TokenRow));
  write(train.data(), train.size_bytes());
  write(eval.data(), eval.size_bytes());
  values["ids"] = ids_;
  values["train"] = train.size();
  values["eval"] = eval.size();
  const std::string text = values.dump();
  write(text.data(), text.size());
  const uint64_t text_bytes = text.size();
  write(&text_bytes, sizeof(text_bytes));
  TokenFileHeader header;
  header.key = key_bytes(key_);
  header.file_bytes = sizeof(header) + bytes_;
  header.checksum = XXH3_64bits_digest(hash_.get());
  if (std::fseek(file_, 0, SEEK_SET) != 0 || std::fwrite(&header, sizeof(header), 1, file_) != 1) {
    throw_token_file_error(temporary_, errno);
  }
  const int closed = std::fclose(std::exchange(file_, nullptr));
  if (closed != 0 || ::rename(temporary_.c_str(), target_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    throw_token_file_error(target_, error);
  }
}

void TokenFileWriter::write(const void* data, size_t bytes) {
  if (bytes == 0) { // `data` may be null
    return;
  }
  XXH3_64bits_update(hash_.get(), data, bytes);
  if (std::fwrite(data, bytes, 1, file_) != 1) {
    throw_token_file_error(temporary_, errno);
  }
  bytes_ += bytes;
}

// The ids and the other parts of a file. Each block's hash is compared with the one at opening. So
// a file that shrinks or changes is an error. With a mapping, it would end the process by SIGBUS or
// give other ids.
class TokenFileIds : public TokenIds {
 public:
  // Takes over the descriptor and verifies the whole file.
  TokenFileIds(const std::filesystem::path& path, FileDescriptor file, size_t bytes,
               const std::string& key)
      : path_(path), file_(std::move(file)), bytes_(bytes) {
    problem_ = find_problem(key);
  }

  // Empty if the file is valid.
  const std::string& problem() const { return problem_; }
  size_t bytes() const { return bytes_; }
  void set_size(uint64_t ids) { ids_ = static_cast<int64_t>(ids); }
  int64_t size() const override { return ids_; }
  void read(int64_t begin, std::span<int32_t> ids) const override {
    read_bytes(sizeof(TokenFileHeader) + static_cast<size_t>(begin) * sizeof(int32_t), ids.data(),
               ids.size_bytes());
  }

  // Reads bytes as they were when the file was opened. Throws Error if they have changed.
  void read_bytes(size_t at, void* to, size_t bytes) const {
    if (bytes == 0) { // `to` may be null
      return;
    }
    const size_t first = at / kTokenBlock;
    std::vector<char> blocks((at + bytes + kTokenBlock - 1) / kTokenBlock * kTokenBlock -
                             first * kTokenBlock);
    const size_t begin = first * kTokenBlock;
    const size_t count = std::min(blocks.size(), bytes_ - begin);
    bool good = read_whole(begin, blocks.data(), count);
    for (size_t done = 0; good && done < count; done += kTokenBlock) {
      good = block_hash(blocks.data() + done, count - done) == hashes_[first + done / kTokenBlock];
    }
    if (!good) {
      throw Error("data::token_cache", path_.string() + " changed while its token ids were in use",
                  "a file that does not change during the run",
                  "start again: the file is then made again");
    }
    std::memcpy(to, blocks.data() + (at - begin), bytes);
  }

 private:
  static constexpr size_t kTokenBlock = 4096; // bytes; its hash takes 8

  static uint64_t block_hash(const char* block, size_t left) {
    return XXH3_64bits(block, std::min(left, kTokenBlock));
  }

  bool read_whole(size_t at, char* to, size_t bytes) const {
    return read_at(file_.get(), to, bytes, at) == static_cast<ssize_t>(bytes);
  }

  // Returns what is wrong with the file, or an empty string. Stores the hash of each block.
  std::string find_problem(const std::string& key) {
    TokenFileHeader header;
    if (bytes_ < sizeof(header) + sizeof(uint64_t)) {
      return bytes_ == 0 ? "it is empty" : "it is cut off";
    }
    const HashState state(XXH3_createState(), &XXH3_freeState);
    XXH3_64bits_reset(state.get());
    std::vector<char> piece(kTokenReadBuffer);
    for (size_t at = 0; at < bytes_; at += piece.size()) {
      const size_t count = std::min(piece.size(), bytes_ - at);
      if (!read_whole(at, piece.data(), count)) {
        return "it cannot be read";
      }
      for (size_t done = 0; done < count; done += kTokenBlock) {
        hashes_.push_back(block_hash(piece.data() + done, count - done));
      }
      if (at == 0) {
        std::memcpy(&header, piece.data(), sizeof(header));
        if (auto problem = header_problem(header, key); !problem.empty()) {
          return problem;
        }
      }
      const size_t skipped = at == 0 ? sizeof(header) : 0;
      XXH3_64bits_update(state.get(), piece.data() + skipped, count - skipped);
      throw_if_interrupted();
    }
    return header.checksum == XXH3_64bits_digest(state.get()) ? "" : "its checksum is wrong";
  }

  std::string header_problem(const TokenFileHeader& header, const std::string& key) const {
    if (header.magic != TokenFileHeader{}.magic || header.format != kTokenFormat) {
      return "it is not a token file of this version";
    }
    if (header.key != key_bytes(key)) {
      return "it belongs to other data";
    }
    return header.file_bytes == bytes_ ? ""
                                       : "it has " + std::to_string(bytes_) + " of " +
                                             std::to_string(header.file_bytes) + " bytes";
  }

  std::filesystem::path path_;
  FileDescriptor file_;
  size_t bytes_;
  int64_t ids_ = 0;
  std::vector<uint64_t> hashes_{}; // [block]
  std::string problem_{};
};

// The parts of a verified file; null if they contradict each other.
std::unique_ptr<TokenFile> token_file_parts(const std::shared_ptr<TokenFileIds>& all) {
  const size_t begin = sizeof(TokenFileHeader);
  const size_t end = all->bytes() - sizeof(uint64_t);
  uint64_t text_bytes = 0;
  all->read_bytes(end, &text_bytes, sizeof(text_bytes));
  if (text_bytes > end - begin) {
    return nullptr;
  }
  std::string text(text_bytes, '\0');
  all->read_bytes(end - text_bytes, text.data(), text_bytes);
  auto file = std::make_unique<TokenFile>();
  file->values = try_parse_json(text).value;
  if (!file->values.is_object()) {
    return nullptr;
  }
  const auto number = [&](const char* name) {
    const nlohmann::json& value = file->values[name]; // null if missing
    return value.is_number_unsigned() ? value.get<uint64_t>() : ~uint64_t{0};
  };
  const uint64_t most = all->bytes();
  const uint64_t ids = number("ids"), train = number("train"), eval = number("eval");
  if (ids > most || train > most || eval > most) {
    return nullptr;
  }
  const uint64_t id_bytes =
      (ids * sizeof(int32_t) + sizeof(TokenRow) - 1) / sizeof(TokenRow) * sizeof(TokenRow);
  if (id_bytes + (train + eval) * sizeof(TokenRow) + text_bytes != end - begin) {
    return nullptr;
  }
  all->set_size(ids);
  const auto rows_of = [&](uint64_t first, uint64_t count) {
    const auto rows = std::make_shared<std::vector<TokenRow>>(count);
    all->read_bytes(begin + id_bytes + first * sizeof(TokenRow), rows->data(),
                    count * sizeof(TokenRow));
    return TokenTable{.ids = all, .rows = *rows, .owner = rows};
  };
  file->train = rows_of(0, train);
  file->eval = rows_of(train, eval);
  return file;
}

std::unique_ptr<TokenFile> open_token_file(const std::filesystem::path& path,
                                           const std::string& key, std::string& problem) {
  FileDescriptor descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (descriptor.get() < 0) {
    if (errno != ENOENT) {
      problem = std::strerror(errno);
    }
    return nullptr;
  }
  struct stat status {};
  if (::fstat(descriptor.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    problem = "it is not a regular file";
    return nullptr;
  }
  const auto ids = std::make_shared<TokenFileIds>(path, std::move(descriptor),
                                                  static_cast<size_t>(status.st_size), key);
  problem = ids->problem();
  if (!problem.empty()) {
    return nullptr;
  }
  auto file = token_file_parts(ids);
  if (file == nullptr) {
    problem = "its parts contradict each other";
  }
  return file;
}

} // namespace hasten::detail
