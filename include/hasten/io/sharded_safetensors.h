// Reads weights that are split over several safetensors files with one index. Hugging Face stores
// large models this way: model.safetensors.index.json has
//   {"metadata": {...}, "weight_map": {"tensor": "model-00001-of-00002.safetensors"}}
// Threading: like SafetensorsReader.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "hasten/io/safetensors.h"

namespace hasten {

class ShardedSafetensorsReader {
 public:
  /// Opens every file and compares it with the index. Reads no data.
  /// Throws InputError that names the index and all problems: it is not JSON; "weight_map" is
  ///   missing or has a name twice; a file is outside the folder or missing; a tensor is not in
  ///   its file, or is in a file but not mapped to it; the folder has another file of the same
  ///   numbered kind. Also throws what SafetensorsReader throws.
  explicit ShardedSafetensorsReader(const std::filesystem::path& index);

  const std::filesystem::path& path() const { return path_; }
  /// The files, by file name.
  const std::vector<SafetensorsReader>& shards() const { return shards_; }
  /// Names of all tensors, sorted.
  std::vector<std::string> names() const;
  bool contains(std::string_view name) const;
  /// Like SafetensorsReader's. Throw InputError if there is no such tensor.
  const SafetensorsEntry& entry(std::string_view name) const;
  at::Tensor tensor(std::string_view name) const;
  /// Reads all tensors into their own memory. Memory: all files.
  NamedTensors read_all() const;

 private:
  const SafetensorsReader& shard_of(std::string_view name) const;

  std::filesystem::path path_;
  std::vector<SafetensorsReader> shards_{};
  std::map<std::string, size_t, std::less<>> shard_{}; // index of its file [name]
};

} // namespace hasten
