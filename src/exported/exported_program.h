// A program: its graph, the places of its parameters in the module tree, and what its inputs may be.
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "graph.h"
#include "hasten/core/stateful.h"
#include "hasten/exported/exported_module.h"
#include "program_file.h"

namespace hasten::detail {

/// A parameter, a buffer, or a constant, which is no part of the module's state.
struct ExportedLeaf {
  int slot = -1;
  std::string name{}; // of a parameter or buffer, in Python
  bool buffer = false;
  at::Tensor constant{}; // on the CPU; undefined for a parameter or buffer
  // Its place, found when the module tree is built.
  const ExportedPart* owner = nullptr;
  size_t index = 0;
};

struct SizeRange {
  int64_t least = 1;
  int64_t most = std::numeric_limits<int64_t>::max();
};

struct ExportedProgram {
  std::string name{};
  Graph graph{};
  std::vector<ExportedLeaf> leaves{};
  std::map<int, size_t> leaf_of{}; // by slot
  std::vector<int> inline_leaves{}; // slots that segments without a block read, or outputs
  std::vector<ExportedInput> inputs{};
  std::vector<int> input_slots{}; // [input]
  std::set<std::string> constant_inputs{}; // that were None or a number when it was exported
  std::map<std::string, SizeRange> ranges{}; // by the name of a size
  std::vector<std::string> outputs{};
  std::map<std::string, std::shared_ptr<ExportedPart>> blocks{}; // by path
  std::vector<std::string> scattered{}; // blocks whose nodes are not consecutive
  std::vector<std::shared_ptr<const torch::nn::Module>> owners{}; // of leaves, but the root
  bool decides_mode = true; // its flags follow train() and eval()

  /// The device of the first parameter, else of the first input.
  at::Device device(const GraphFrame& frame) const;
  /// Puts the values of the leaves into the frame.
  void fill(const std::vector<int>& slots, const at::Device& device, GraphFrame& frame) const;

 private:
  at::Tensor constant_on(const ExportedLeaf& leaf, const at::Device& device) const;

  mutable std::mutex mutex_{};
  mutable std::map<std::pair<int, at::DeviceIndex>, at::Tensor> moved_{}; // constants on a device
};

/// Throws InputError that names what is not as in the format, or not allowed.
std::shared_ptr<ExportedProgram> read_program(const nlohmann::json& source, const std::string& name,
                                              const NamedTensors& constants,
                                              const ExportedModuleOptions& options);

/// Paths of the blocks of these programs whose parameters nothing else reads.
std::set<std::string> whole_blocks(const std::vector<std::shared_ptr<ExportedProgram>>& programs);

/// Throws InputError for a dtype, a number of dimensions or a size that the module was not exported with.
void check_inputs(const ExportedProgram& program, const std::vector<at::Tensor>& inputs);

} // namespace hasten::detail
