// Reading and writing safetensors files: named tensors behind a JSON header, as
// Hugging Face stores weights. No pickle, nothing is executed.
//
// The format: u64 little-endian header length; JSON object name -> {dtype, shape,
// data_offsets: [begin, end) in the data section}, padded with spaces so that the
// data starts at a multiple of 8; the data, row-major, without holes; optional
// "__metadata__" of strings. A header has at most 100,000,000 bytes.
// Threading: a reader is immutable once made and may be shared between threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "hasten/core/stateful.h"

namespace hasten {

/// What a file says of one tensor.
struct SafetensorsEntry {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape{}; // empty for a scalar
  uint64_t begin = 0; // bytes from the start of the data section
  uint64_t end = 0; // one past its last byte
};

/// A safetensors file. Opening reads the header alone.
class SafetensorsReader {
 public:
  /// Opens and validates. Cost: the header, not the data.
  /// Throws InputError naming the file, and the tensor where one is to blame:
  /// missing, truncated, no JSON, duplicate name, unknown dtype, an extent that
  /// does not fit dtype and shape, holes, overlaps, bytes past the end.
  explicit SafetensorsReader(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  /// Names of the stored tensors in the order of their data.
  const std::vector<std::string>& names() const { return names_; }
  /// "__metadata__"; empty where there is none.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// Whether tensor(name) would find one: a stored tensor, or the name of a tied
  /// one that the writer left out and noted in the metadata.
  bool contains(std::string_view name) const;
  /// Throws InputError offering the nearest name where there is none.
  const SafetensorsEntry& entry(std::string_view name) const;
  /// The tensor in memory of its own. Throws InputError naming a file that shrank
  /// since it was opened.
  at::Tensor read(std::string_view name) const;
  /// The tensor over the file's mapping: no copy, except where the file aligns it
  /// badly for its dtype. Writing to it changes private memory, never the file. The
  /// mapping lives as long as any tensor of it, so the reader may go first.
  /// For files that nobody else writes, as those of a saved state: where one is
  /// truncated the next touch is SIGBUS. Replacing it by rename is safe. Else read().
  at::Tensor tensor(std::string_view name) const;
  /// All tensors, tied names included, each in memory of its own.
  /// Memory: the whole file. Tied names share one tensor.
  NamedTensors read_all() const;

 private:
  struct Mapping;
  const std::string* find(std::string_view name) const;
  void parse_header(std::string_view header, uint64_t data_bytes);

  std::filesystem::path path_;
  std::shared_ptr<Mapping> mapping_{};
  uint64_t data_start_ = 0; // bytes from the start of the file
  std::vector<std::string> names_{};
  std::unordered_map<std::string, SafetensorsEntry> entries_{};
  std::map<std::string, std::string> metadata_{};
};

/// What Hugging Face's loaders ask to see in the metadata.
inline const std::map<std::string, std::string> kTorchMetadata = {{"format", "pt"}};

/// Writes `tensors`, byte for byte what the reference library writes: by dtype
/// (widest first), then by name. Local. Replaces `path` in one step, synced.
/// A tensor under several names (same memory, shape and strides) is stored under
/// the first; the others go into the metadata as name -> stored name, and
/// SafetensorsReader gives them back.
/// Memory: one tensor at a time, and only where it is not contiguous on a CPU.
/// Throws InputError for a dtype or layout the format lacks, Error naming the
/// path and the reason where writing fails; `path` is then as before.
void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = kTorchMetadata);

/// The format's name of a dtype ("F32"); empty where it has none.
std::string_view safetensors_dtype_name(at::ScalarType dtype);

} // namespace hasten
