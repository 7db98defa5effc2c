// Reads and writes safetensors files: named tensors after a JSON header, the format in which
// Hugging Face stores weights. The format has no pickle, and reading a file executes nothing.
//
// The format: header length as a little-endian u64; a JSON object name -> {dtype, shape,
// data_offsets: [begin, end) in the data section}, padded with spaces so that the data starts at
// a multiple of 8; the data, row-major, without gaps. An optional "__metadata__" has strings. A
// header has at most 100,000,000 bytes.
// Threading: a reader does not change after construction. Several threads may use it.
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

/// The header's entry for one tensor.
struct SafetensorsEntry {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape{}; // empty for a scalar
  uint64_t begin = 0; // bytes from the start of the data section
  uint64_t end = 0; // one past its last byte
};

/// A safetensors file. Opening it reads only the header.
class SafetensorsReader {
 public:
  /// Opens and validates the file. Cost: the header, not the data.
  /// Throws InputError that names the file, and the tensor if there is one, if: the file is
  /// missing or truncated; the header is not JSON; a name occurs twice; a dtype is unknown; an
  /// extent does not match dtype and shape; extents have gaps or overlap; bytes follow the end.
  explicit SafetensorsReader(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  /// Names of the stored tensors, in the order of their data.
  const std::vector<std::string>& names() const { return names_; }
  /// "__metadata__"; empty if there is none.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// Whether tensor(name) exists: as a stored tensor, or as the name of a tied tensor that the
  /// writer recorded in the metadata.
  bool contains(std::string_view name) const;
  /// Throws InputError that suggests the nearest name if there is no such tensor.
  const SafetensorsEntry& entry(std::string_view name) const;
  /// Reads the tensor into its own memory. Throws InputError that names the file if it has become
  /// shorter since it was opened.
  at::Tensor read(std::string_view name) const;
  /// Returns the tensor over a mapping of the file. It copies only if the data is not aligned for
  /// its dtype. Writing to the tensor changes private memory, never the file. The mapping lives as
  /// long as its tensors, even after the reader is destroyed.
  /// Only use it for files that no other process writes, such as those of a saved state: if such a
  /// file is truncated, the next access is a SIGBUS. Replacing it by rename is safe. Otherwise use
  /// read().
  at::Tensor tensor(std::string_view name) const;
  /// Reads all tensors, including tied names, into their own memory.
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

/// The metadata that Hugging Face's loaders require.
inline const std::map<std::string, std::string> kTorchMetadata = {{"format", "pt"}};

/// Writes `tensors` with the same bytes as the reference library: by dtype (widest first), then
/// by name. Local. Replaces `path` in one step and syncs it.
/// If several names share one tensor (same memory, shape and strides), it is stored under the
/// first name. The other names go into the metadata as name -> stored name, from which
/// SafetensorsReader restores them.
/// Memory: one tensor at a time, and only if it is not contiguous on a CPU.
/// Throws InputError for a dtype or layout that the format does not have, and Error that names the
/// path and the reason if writing fails. `path` is then unchanged.
void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = kTorchMetadata);

/// The format's name of a dtype ("F32"); empty if it has none.
std::string_view safetensors_dtype_name(at::ScalarType dtype);

} // namespace hasten
