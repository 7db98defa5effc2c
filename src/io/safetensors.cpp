#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <optional>
#include <tuple>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/io/safetensors.h"

namespace hasten {

namespace detail {

constexpr const char* kReaderWhere = "io::SafetensorsReader";
constexpr const char* kWriterWhere = "io::write_safetensors";
constexpr uint64_t kMaxHeaderBytes = 100'000'000; // like the reference
static_assert(std::endian::native == std::endian::little);
constexpr const char* kReaderFix =
    "download or write the file again; it is damaged or not a safetensors file";

struct SafetensorsDtype {
  std::string_view name;
  at::ScalarType dtype;
};

// In the order by which the reference writer sorts: its enumeration, ascending.
constexpr std::array<SafetensorsDtype, 19> kSafetensorsDtypes = {{
    {"BOOL", at::kBool},
    {"U8", at::kByte},
    {"I8", at::kChar},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E8M0", at::kFloat8_e8m0fnu},
    {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
    {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
    {"I16", at::kShort},
    {"U16", at::kUInt16},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"I32", at::kInt},
    {"U32", at::kUInt32},
    {"F32", at::kFloat},
    {"C64", at::kComplexFloat},
    {"F64", at::kDouble},
    {"I64", at::kLong},
    {"U64", at::kUInt64},
}};

/// Index in the table; the table's size if the dtype is not in it.
size_t safetensors_dtype_rank(at::ScalarType dtype) {
  size_t rank = 0;
  while (rank < kSafetensorsDtypes.size() && kSafetensorsDtypes[rank].dtype != dtype) {
    ++rank;
  }
  return rank;
}

[[noreturn]] void throw_bad_file(const std::filesystem::path& path, const std::string& what,
                                 const std::string& expected = {}) {
  throw InputError(kReaderWhere, path.string() + ": " + what, expected, kReaderFix);
}

std::optional<std::vector<uint64_t>> unsigned_numbers(const nlohmann::json& value) {
  const bool good = value.is_array() && std::ranges::all_of(value, [](const auto& n) {
                      return n.is_number_unsigned();
                    });
  return good ? std::optional(value.get<std::vector<uint64_t>>()) : std::nullopt;
}

// Number of bytes for shape and dtype. Empty if it needs more than 63 bits.
std::optional<uint64_t> extent_bytes(const std::vector<uint64_t>& shape, uint64_t item_bytes) {
  constexpr uint64_t kLimit = uint64_t{1} << 62;
  uint64_t bytes = item_bytes;
  bool empty = false;
  for (const uint64_t size : shape) {
    if (size == 0) {
      empty = true;
    } else if (size > kLimit / bytes) {
      return std::nullopt;
    } else {
      bytes *= size;
    }
  }
  return empty ? 0 : bytes;
}

SafetensorsEntry parse_entry(const std::filesystem::path& path, const std::string& name,
                             const nlohmann::json& value, uint64_t data_bytes) {
  const std::string subject = "tensor \"" + name + "\"";
  if (!value.is_object() || value.size() != 3 || !value.contains("dtype") ||
      !value["dtype"].is_string() || !value.contains("shape") || !value.contains("data_offsets")) {
    throw_bad_file(path, subject + " is described by " + value.dump().substr(0, 200),
                   "{\"dtype\", \"shape\", \"data_offsets\"}");
  }
  const auto& dtype = value["dtype"].get_ref<const std::string&>();
  const auto known = std::ranges::find_if(
      kSafetensorsDtypes,
      [&](const SafetensorsDtype& candidate) { return candidate.name == dtype; });
  if (known == kSafetensorsDtypes.end()) {
    throw InputError(kReaderWhere,
                     path.string() + ": " + subject + " has an unknown dtype=" + dtype,
                     "BOOL, U8 … F32, F64, I64, U64", "convert the file to one of these");
  }
  const auto shape = unsigned_numbers(value["shape"]);
  const auto offsets = unsigned_numbers(value["data_offsets"]);
  if (!shape || shape->size() > 64) {
    throw_bad_file(path, subject + " has shape=" + value["shape"].dump().substr(0, 200),
                   "an array of whole numbers from 0");
  }
  if (!offsets || offsets->size() != 2 || (*offsets)[0] > (*offsets)[1]) {
    throw_bad_file(path,
                   subject + " has data_offsets=" + value["data_offsets"].dump().substr(0, 200),
                   "[begin, end] with begin <= end");
  }
  SafetensorsEntry entry;
  entry.dtype = known->dtype;
  entry.begin = (*offsets)[0];
  entry.end = (*offsets)[1];
  if (entry.end > data_bytes) {
    throw_bad_file(path,
                   subject + " ends at byte " + std::to_string(entry.end) +
                       " of a data section of " + std::to_string(data_bytes) + " bytes",
                   "data within the file (is it truncated?)");
  }
  const auto bytes = extent_bytes(*shape, c10::elementSize(entry.dtype));
  if (!bytes || *bytes != entry.end - entry.begin) {
    throw_bad_file(path, subject + " takes " + std::to_string(entry.end - entry.begin) +
                             " bytes, its shape " + value["shape"].dump() + " of " + dtype +
                             " needs " + (bytes ? std::to_string(*bytes) : "too many"));
  }
  for (const uint64_t size : *shape) {
    // If one dimension is 0, the file's size does not limit the others.
    if (size > uint64_t{1} << 62) {
      throw_bad_file(path, subject + " has shape=" + value["shape"].dump());
    }
    entry.shape.push_back(static_cast<int64_t>(size));
  }
  return entry;
}

} // namespace detail

// A private mapping: pages that are written are copied, so the file never changes.
struct SafetensorsReader::Mapping {
  explicit Mapping(const std::filesystem::path& path)
      : file(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    struct stat status {};
    if (file.get() < 0 || ::fstat(file.get(), &status) != 0) {
      throw_missing(path, errno);
    }
    if (S_ISDIR(status.st_mode)) {
      throw_missing(path, EISDIR);
    }
    bytes = static_cast<uint64_t>(status.st_size);
    void* data = bytes == 0 ? nullptr
                            : ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_NORESERVE, file.get(), 0);
    if (data == MAP_FAILED) {
      throw_missing(path, errno);
    }
    base = static_cast<char*>(data);
  }
  ~Mapping() {
    if (base != nullptr) {
      ::munmap(base, bytes);
    }
  }

  // Reads the file instead of the mapping, whose pages are gone if the file has become shorter.
  void read(const std::filesystem::path& path, uint64_t at, void* to, uint64_t count) const {
    const ssize_t got = detail::read_at(file.get(), to, count, at);
    if (got < 0) {
      throw_missing(path, errno);
    }
    if (const uint64_t end = at + static_cast<uint64_t>(got); end < at + count) {
      throw InputError(detail::kReaderWhere,
                       path.string() + " shrank while it was read: it had " +
                           std::to_string(bytes) + " bytes and ends at byte " + std::to_string(end),
                       "a file that does not change while it is read",
                       "read it again when it is complete");
    }
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  [[noreturn]] static void throw_missing(const std::filesystem::path& path, int error) {
    detail::throw_file_error(detail::kReaderWhere, path, error);
  }

  detail::FileDescriptor file;
  char* base = nullptr;
  uint64_t bytes = 0;
};

SafetensorsReader::SafetensorsReader(const std::filesystem::path& path)
    : path_(path), mapping_(std::make_shared<Mapping>(path)) {
  const uint64_t file_bytes = mapping_->bytes;
  if (file_bytes < 8) {
    detail::throw_bad_file(path_, "the file has " + std::to_string(file_bytes) + " bytes",
                           "at least the 8 bytes of the header's length");
  }
  uint64_t header_bytes = 0;
  mapping_->read(path_, 0, &header_bytes, sizeof(header_bytes));
  if (header_bytes > detail::kMaxHeaderBytes || header_bytes > file_bytes - 8) {
    detail::throw_bad_file(
        path_,
        "header length=" + std::to_string(header_bytes) + " in a file of " +
            std::to_string(file_bytes) + " bytes",
        "at most " + std::to_string(std::min(detail::kMaxHeaderBytes, file_bytes - 8)));
  }
  std::string header(header_bytes, '\0');
  mapping_->read(path_, 8, header.data(), header_bytes);
  if (header.empty() || header.front() != '{') {
    detail::throw_bad_file(path_, "the header does not start with \"{\"");
  }
  data_start_ = 8 + header_bytes;
  parse_header(header, file_bytes - data_start_);
}

void SafetensorsReader::parse_header(std::string_view header, uint64_t data_bytes) {
  const ParsedJson parsed = try_parse_json(header, {.max_depth = 3, .unique_keys = true});
  if (!parsed.problem.empty()) {
    detail::throw_bad_file(path_, "the header is not a valid JSON object: " + parsed.problem);
  }
  const nlohmann::json& json = parsed.value;
  for (const auto& [name, value] : json.items()) {
    if (name != "__metadata__") {
      entries_.emplace(name, detail::parse_entry(path_, name, value, data_bytes));
      names_.push_back(name);
      continue;
    }
    if (!value.is_object()) {
      detail::throw_bad_file(path_, "__metadata__ is not an object");
    }
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) {
        detail::throw_bad_file(path_, "__metadata__ \"" + key + "\" is not a string");
      }
      metadata_.emplace(key, text.get<std::string>());
    }
  }
  std::ranges::sort(names_, [&](const auto& a, const auto& b) {
    const auto& x = entries_.at(a);
    const auto& y = entries_.at(b);
    return std::tie(x.begin, x.end, a) < std::tie(y.begin, y.end, b);
  });
  uint64_t at = 0;
  for (const auto& name : names_) {
    const auto& entry = entries_.at(name);
    if (entry.begin != at) {
      detail::throw_bad_file(
          path_,
          "tensor \"" + name + "\" starts at byte " + std::to_string(entry.begin) + " of the data",
          std::to_string(at) + ", where the one before it ends");
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    detail::throw_bad_file(path_, "the tensors take " + std::to_string(at) +
                                      " bytes of a data section " + "of " +
                                      std::to_string(data_bytes));
  }
}

const std::string* SafetensorsReader::find(std::string_view name) const {
  const auto stored = entries_.find(std::string(name));
  if (stored != entries_.end()) {
    return &stored->first;
  }
  const auto tied = metadata_.find(std::string(name));
  if (tied == metadata_.end()) {
    return nullptr;
  }
  const auto kept = entries_.find(tied->second);
  return kept == entries_.end() ? nullptr : &kept->first;
}

bool SafetensorsReader::contains(std::string_view name) const { return find(name) != nullptr; }

const SafetensorsEntry& SafetensorsReader::entry(std::string_view name) const {
  const std::string* stored = find(name);
  if (stored == nullptr) {
    const std::string nearest = nearest_name(name, names_);
    throw InputError(detail::kReaderWhere,
                     path_.string() + ": no tensor \"" + std::string(name) + "\"",
                     nearest.empty() ? std::string{} : "\"" + nearest + "\" perhaps");
  }
  return entries_.at(*stored);
}

at::Tensor SafetensorsReader::tensor(std::string_view name) const {
  const SafetensorsEntry& found = entry(name);
  const auto options = at::TensorOptions().dtype(found.dtype);
  if (found.begin == found.end) {
    return at::empty(found.shape, options);
  }
  char* data = mapping_->base + data_start_ + found.begin;
  if (reinterpret_cast<uintptr_t>(data) % c10::elementSize(found.dtype) != 0) {
    at::Tensor copy = at::empty(found.shape, options);
    std::copy_n(data, found.end - found.begin, static_cast<char*>(copy.data_ptr()));
    return copy;
  }
  return at::from_blob(data, found.shape, [keep = mapping_](void*) {}, options);
}

at::Tensor SafetensorsReader::read(std::string_view name) const {
  const SafetensorsEntry& found = entry(name);
  at::Tensor copy = at::empty(found.shape, at::TensorOptions().dtype(found.dtype));
  mapping_->read(path_, data_start_ + found.begin, copy.data_ptr(), found.end - found.begin);
  return copy;
}

NamedTensors SafetensorsReader::read_all() const {
  NamedTensors tensors;
  for (const auto& name : names_) {
    tensors.emplace(name, read(name));
  }
  for (const auto& [name, kept] : metadata_) {
    if (!entries_.contains(name) && entries_.contains(kept)) {
      tensors.emplace(name, tensors.at(kept));
    }
  }
  return tensors;
}

namespace detail {

struct TensorToWrite {
  std::string name;
  at::Tensor tensor;
  size_t rank; // index of its dtype in the table
};

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.data_ptr() == b.data_ptr() && a.scalar_type() == b.scalar_type() &&
         a.sizes() == b.sizes() && a.strides() == b.strides();
}

TensorToWrite checked_tensor(const std::string& name, const at::Tensor& tensor) {
  const std::string subject = "tensor \"" + name + "\"";
  if (name == "__metadata__") {
    throw InputError(kWriterWhere, subject + " has a reserved name");
  }
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_meta() ||
      tensor.is_quantized()) {
    throw InputError(kWriterWhere, subject + " is undefined, not dense, quantized or meta",
                     "a defined, dense tensor on a device");
  }
  const size_t rank = safetensors_dtype_rank(tensor.scalar_type());
  if (rank == kSafetensorsDtypes.size()) {
    throw InputError(kWriterWhere, subject + " has dtype=" + c10::toString(tensor.scalar_type()),
                     "a dtype of the safetensors format");
  }
  return {name, tensor.detach(), rank};
}

// Separates further names of the same memory, which go to `metadata`.
std::vector<TensorToWrite> tensors_to_write(const NamedTensors& tensors,
                                            std::map<std::string, std::string>& metadata) {
  std::vector<TensorToWrite> result;
  std::map<const void*, std::vector<size_t>> by_address;
  for (const auto& [name, tensor] : tensors) {
    TensorToWrite item = checked_tensor(name, tensor);
    if (tensor.numel() > 0) {
      auto& same_start = by_address[tensor.data_ptr()];
      const auto tied = std::ranges::find_if(
          same_start, [&](size_t i) { return same_memory(result[i].tensor, item.tensor); });
      if (tied != same_start.end()) {
        if (!metadata.emplace(name, result[*tied].name).second) {
          throw InputError(kWriterWhere, "metadata key \"" + name + "\" is a tied tensor");
        }
        continue;
      }
      same_start.push_back(result.size());
    }
    result.push_back(std::move(item));
  }
  std::ranges::sort(result, [](const auto& a, const auto& b) {
    return std::tie(b.rank, a.name) < std::tie(a.rank, b.name);
  });
  return result;
}

// Writes keys in the order and with the spacing of the reference writer.
std::string header_text(const std::vector<TensorToWrite>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  const auto add = [&](const std::string& key, const nlohmann::ordered_json& value) {
    text += text.size() > 1 ? "," : "";
    text += nlohmann::json(key).dump() + ":" + value.dump();
  };
  try {
    if (!metadata.empty()) {
      add("__metadata__", nlohmann::ordered_json(metadata));
    }
    uint64_t at = 0;
    for (const auto& item : tensors) {
      const uint64_t end = at + static_cast<uint64_t>(item.tensor.nbytes());
      add(item.name, {{"dtype", kSafetensorsDtypes[item.rank].name},
                      {"shape", item.tensor.sizes().vec()},
                      {"data_offsets", {at, end}}});
      at = end;
    }
  } catch (const nlohmann::json::exception& error) {
    throw InputError(kWriterWhere,
                     std::string("a name or metadata value is not UTF-8: ") + error.what());
  }
  text += "}";
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

} // namespace detail

std::string_view safetensors_dtype_name(at::ScalarType dtype) {
  const size_t rank = detail::safetensors_dtype_rank(dtype);
  return rank < detail::kSafetensorsDtypes.size() ? detail::kSafetensorsDtypes[rank].name
                                                  : std::string_view{};
}

void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  auto all_metadata = metadata;
  const auto items = detail::tensors_to_write(tensors, all_metadata);
  const std::string header = detail::header_text(items, all_metadata);

  detail::FileWriter file("io::write_file", path);
  const uint64_t header_bytes = header.size();
  file.write({reinterpret_cast<const char*>(&header_bytes), sizeof(header_bytes)});
  file.write(header);
  for (const auto& item : items) {
    if (item.tensor.numel() > 0) {
      const at::Tensor data = item.tensor.resolve_conj().resolve_neg().cpu().contiguous();
      file.write({static_cast<const char*>(data.data_ptr()), data.nbytes()});
    }
  }
  file.finish();
}

} // namespace hasten
