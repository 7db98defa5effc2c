// The modules of an exported program: their tree, and which tensors and operators are theirs.
#pragma once

#include <torch/nn/modules/container/modulelist.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "exported_program.h"
#include "program_file.h"

namespace hasten::detail {

/// "encoder.layer" of "encoder.layer.0".
std::string parent_of(const std::string& path);

/// Makes submodules where Python has them. Lists whose entries are blocks are ModuleLists, in which FSDP
/// finds its units.
class ModuleTree {
 public:
  ModuleTree(ExportedPart& root, const std::vector<std::shared_ptr<ExportedProgram>>& programs,
             const std::set<std::string>& blocks);

  ExportedPart& part(const std::string& path) { return path.empty() ? root_ : *parts_.at(path); }
  /// Null if there is none.
  std::shared_ptr<ExportedPart> shared_part(const std::string& path) const;

 private:
  void add_path(const std::string& path);
  bool is_list(const std::string& path) const;
  torch::nn::Module& module_at(const std::string& path);
  void make(const std::string& path);

  ExportedPart& root_;
  const std::set<std::string>& blocks_;
  std::set<std::string> with_tensors_{}; // modules that have parameters or buffers of their own
  std::map<std::string, std::set<std::string>> children_{}; // by path
  std::vector<std::string> order_{}; // as in Python, a parent before its children
  std::map<std::string, std::shared_ptr<ExportedPart>> parts_{};
  std::map<std::string, std::shared_ptr<torch::nn::ModuleListImpl>> lists_{};
};

/// Where tensors have been registered: by name, or by `WeightMeta::place` if tied ones are one. That of a
/// buffer is after "buffer ".
using LeafPlaces = std::map<std::string, std::pair<const ExportedPart*, size_t>>;

/// Registers the leaf's tensor in its part, unless another program or a tied name has.
void place_leaf(ExportedLeaf& leaf, ExportedPart& part, const ProgramFile& file,
                const NamedTensors& weights, LeafPlaces& places);

/// Sets which layer each module is, and has hasten's linear layer compute their products.
void bind_layers(ExportedProgram& program, ModuleTree& tree, bool substitutions);

/// Finds the slots of leaves that are read outside of blocks.
void find_inline_leaves(ExportedProgram& program);

/// Parameters that no output of a program depends on with gradients. They lose requires_grad.
std::vector<std::string> freeze_unused(
    torch::nn::Module& module, const std::vector<std::shared_ptr<ExportedProgram>>& programs);

} // namespace hasten::detail
