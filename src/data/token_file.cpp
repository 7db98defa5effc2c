#include "token_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "hasten/base/process.h"

namespace hasten::detail {

constexpr size_t kTokenWriteBuffer = size_t{1} << 20; // bytes
constexpr size_t kTokenHashBlock = size_t{64} << 20; // bytes between two looks
constexpr uint64_t kTokenFormat = 1;

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

struct TokenFileWriter::Hash {
  std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state{
      XXH3_createState(), &XXH3_freeState};
};

TokenFileWriter::TokenFileWriter(
    std::filesystem::path target, const std::string& key)
    : target_(std::move(target)),
      key_(key),
      temporary_(target_.string() + ".tmp-XXXXXX"),
      hash_(std::make_unique<Hash>()) {
  file_ = ::mkostemp(temporary_.data(), O_CLOEXEC);
  if (file_ < 0) {
    throw_token_file_error(temporary_, errno);
  }
  XXH3_64bits_reset(hash_->state.get());
  buffer_.reserve(kTokenWriteBuffer);
  try {
    const TokenFileHeader header; // the real one comes last
    write_at(&header, sizeof(header), 0);
  } catch (...) {
    ::close(file_);
    ::unlink(temporary_.c_str());
    throw;
  }
}

TokenFileWriter::~TokenFileWriter() {
  if (file_ >= 0) {
    ::close(file_);
    ::unlink(temporary_.c_str());
  }
}

void TokenFileWriter::add(std::span<const int32_t> ids) {
  ids_ += static_cast<int64_t>(ids.size());
  write(ids.data(), ids.size_bytes());
}

void TokenFileWriter::finish(
    std::span<const TokenRow> train,
    std::span<const TokenRow> eval,
    nlohmann::json values) {
  const std::array<char, sizeof(TokenRow)> zeros{};
  write(
      zeros.data(),
      (sizeof(TokenRow) - bytes_ % sizeof(TokenRow)) % sizeof(TokenRow));
  write(train.data(), train.size_bytes());
  write(eval.data(), eval.size_bytes());
  values["ids"] = ids_;
  values["train"] = train.size();
  values["eval"] = eval.size();
  const std::string text = values.dump();
  write(text.data(), text.size());
  const uint64_t text_bytes = text.size();
  write(&text_bytes, sizeof(text_bytes));
  flush();
  TokenFileHeader header;
  header.key = key_bytes(key_);
  header.file_bytes = sizeof(header) + bytes_;
  header.checksum = XXH3_64bits_digest(hash_->state.get());
  write_at(&header, sizeof(header), 0);
  const int closed = ::close(std::exchange(file_, -1));
  if (closed != 0 || ::rename(temporary_.c_str(), target_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    throw_token_file_error(target_, error);
  }
}

void TokenFileWriter::write(const void* data, size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  buffer_.insert(buffer_.end(), from, from + bytes);
  bytes_ += bytes;
  if (buffer_.size() >= kTokenWriteBuffer) {
    flush();
  }
}

void TokenFileWriter::flush() {
  XXH3_64bits_update(hash_->state.get(), buffer_.data(), buffer_.size());
  write_at(
      buffer_.data(),
      buffer_.size(),
      static_cast<off_t>(sizeof(TokenFileHeader) + bytes_ - buffer_.size()));
  buffer_.clear();
}

void TokenFileWriter::write_at(const void* data, size_t bytes, off_t at) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t count = ::pwrite(file_, from, bytes, at);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count <= 0) {
      throw_token_file_error(temporary_, count < 0 ? errno : ENOSPC);
    }
    from += count;
    bytes -= static_cast<size_t>(count);
    at += count;
  }
}

// The bytes of an open token file.
class TokenMapping {
 public:
  TokenMapping(int file, size_t bytes) : size_(bytes) {
    memory_ = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
  }
  ~TokenMapping() {
    if (memory_ != MAP_FAILED) {
      ::munmap(memory_, size_);
    }
  }
  TokenMapping(const TokenMapping&) = delete;
  TokenMapping& operator=(const TokenMapping&) = delete;
  bool good() const { return memory_ != MAP_FAILED; }
  const char* data() const { return static_cast<const char*>(memory_); }
  size_t size() const { return size_; }

 private:
  void* memory_ = MAP_FAILED;
  size_t size_;
};

uint64_t hash_behind_header(const TokenMapping& mapping) {
  TokenFileHeader header;
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(
      XXH3_createState(), &XXH3_freeState);
  XXH3_64bits_reset(state.get());
  for (size_t at = sizeof(header); at < mapping.size();) {
    const size_t bytes = std::min(kTokenHashBlock, mapping.size() - at);
    XXH3_64bits_update(state.get(), mapping.data() + at, bytes);
    at += bytes;
    throw_if_interrupted();
  }
  return XXH3_64bits_digest(state.get());
}

// Says what is wrong with a file's bytes; nothing where they are whole.
std::string token_file_problem(
    const TokenMapping& mapping, const std::string& key) {
  TokenFileHeader header;
  if (mapping.size() < sizeof(header) + sizeof(uint64_t)) {
    return "it is cut off";
  }
  std::memcpy(&header, mapping.data(), sizeof(header));
  if (header.magic != TokenFileHeader{}.magic ||
      header.format != kTokenFormat) {
    return "it is no token file of this version";
  }
  if (header.key != key_bytes(key)) {
    return "it is of other data";
  }
  if (header.file_bytes != mapping.size()) {
    return "it has " + std::to_string(mapping.size()) + " of " +
           std::to_string(header.file_bytes) + " bytes";
  }
  if (header.checksum != hash_behind_header(mapping)) {
    return "its checksum is wrong";
  }
  return {};
}

// The parts of a file whose bytes are whole; null where they contradict each other.
std::unique_ptr<TokenFile> token_file_parts(
    const std::shared_ptr<const TokenMapping>& mapping) {
  const char* begin = mapping->data() + sizeof(TokenFileHeader);
  const char* end = mapping->data() + mapping->size() - sizeof(uint64_t);
  uint64_t text_bytes = 0;
  std::memcpy(&text_bytes, end, sizeof(text_bytes));
  if (text_bytes > static_cast<uint64_t>(end - begin)) {
    return nullptr;
  }
  auto file = std::make_unique<TokenFile>();
  file->values = nlohmann::json::parse(end - text_bytes, end, nullptr, false);
  const auto number = [&](const char* name) {
    const auto value = file->values.find(name);
    return value != file->values.end() && value->is_number_unsigned()
               ? value->get<uint64_t>()
               : ~uint64_t{0};
  };
  if (!file->values.is_object()) {
    return nullptr;
  }
  const uint64_t most = mapping->size();
  const uint64_t ids = number("ids"), train = number("train"),
                 eval = number("eval");
  if (ids > most || train > most || eval > most) {
    return nullptr;
  }
  const uint64_t id_bytes = (ids * sizeof(int32_t) + sizeof(TokenRow) - 1) /
                            sizeof(TokenRow) * sizeof(TokenRow);
  if (id_bytes + (train + eval) * sizeof(TokenRow) + text_bytes !=
      static_cast<uint64_t>(end - begin)) {
    return nullptr;
  }
  const std::span<const int32_t> all(
      reinterpret_cast<const int32_t*>(begin), ids);
  const auto* rows = reinterpret_cast<const TokenRow*>(begin + id_bytes);
  file->train = {.ids = all, .rows = {rows, train}, .owner = mapping};
  file->eval = {.ids = all, .rows = {rows + train, eval}, .owner = mapping};
  return file;
}

std::unique_ptr<TokenFile> open_token_file(
    const std::filesystem::path& path,
    const std::string& key,
    std::string& problem) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    if (errno != ENOENT) {
      problem = std::strerror(errno);
    }
    return nullptr;
  }
  struct stat status {};
  const bool regular =
      ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
  const size_t size = regular ? static_cast<size_t>(status.st_size) : 0;
  std::shared_ptr<const TokenMapping> mapping;
  if (size > 0) {
    mapping = std::make_shared<const TokenMapping>(descriptor, size);
  }
  ::close(descriptor);
  if (mapping == nullptr || !mapping->good()) {
    problem = regular ? "it is empty or cannot be mapped" : "it is no file";
    return nullptr;
  }
  problem = token_file_problem(*mapping, key);
  if (!problem.empty()) {
    return nullptr;
  }
  auto file = token_file_parts(mapping);
  if (file == nullptr) {
    problem = "its parts contradict each other";
  }
  return file;
}

} // namespace hasten::detail
