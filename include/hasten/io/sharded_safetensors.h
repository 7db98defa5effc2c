// Weights that lie in several safetensors files behind one index, as Hugging Face
// stores large models: model.safetensors.index.json with
//   {"metadata": {...}, "weight_map": {"tensor": "model-00001-of-00002.safetensors"}}
// Threading: as SafetensorsReader.
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
  /// Maps every shard and compares it with the index; reads no data.
  /// Throws InputError, naming the index and all that is wrong: no JSON, no
  ///   "weight_map", a name in it twice, a file outside the folder; a shard that is
  ///   missing; a tensor that its shard lacks, or that lies in a shard and is not
  ///   mapped to it; a shard of the same numbered kind that the index does not
  ///   name; and what SafetensorsReader throws.
  explicit ShardedSafetensorsReader(const std::filesystem::path& index);

  const std::filesystem::path& path() const { return path_; }
  /// The shards, by file name.
  const std::vector<SafetensorsReader>& shards() const { return shards_; }
  /// Names of all tensors, sorted.
  std::vector<std::string> names() const;
  bool contains(std::string_view name) const;
  /// As SafetensorsReader's. Throw InputError where there is none of that name.
  const SafetensorsEntry& entry(std::string_view name) const;
  at::Tensor tensor(std::string_view name) const;
  /// All tensors, each in memory of its own. Memory: all files.
  NamedTensors read_all() const;

 private:
  const SafetensorsReader& shard_of(std::string_view name) const;

  std::filesystem::path path_;
  std::vector<SafetensorsReader> shards_{};
  std::map<std::string, size_t, std::less<>> shard_{}; // number of its shard [name]
};

} // namespace hasten
