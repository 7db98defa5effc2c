// The file of torch.export.save() or package_pt2(): a zip with graphs as JSON and weights as raw bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/core/stateful.h"

namespace hasten::detail {

/// A parameter or a persistent buffer as the file describes it.
struct WeightMeta {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes{};
  bool parameter = false; // else a buffer
  bool requires_grad = false;
  std::string place{}; // equal for names that share a tensor
};

struct ProgramFile {
  std::filesystem::path path{};
  /// "model", or "train" and "eval".
  std::vector<std::string> names{};
  std::vector<nlohmann::json> programs{}; // [name]
  std::map<std::string, WeightMeta> weights{};
  /// Tied names share one tensor. Empty where the file has shapes alone.
  NamedTensors values{};
  /// Constants and buffers that are no part of the state, for each program.
  std::vector<NamedTensors> constants{};
};

/// `read_values`: false if the weights are in another file.
/// Throws InputError if the file is missing, damaged, or of another kind or version.
ProgramFile read_program_file(const std::filesystem::path& path, bool read_values);

/// Writes the file again without the values of its weights. Throws Error with path and reason.
void write_without_weights(const std::filesystem::path& from, const std::filesystem::path& to);

} // namespace hasten::detail
