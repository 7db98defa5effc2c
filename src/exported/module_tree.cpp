#include "module_tree.h"

#include <algorithm>
#include <tuple>

#include "hasten/base/error.h"
#include "hasten/base/text.h"

namespace hasten::detail {

std::string parent_of(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}
static std::string last_of(const std::string& path) { return path.substr(path.rfind('.') + 1); }

static constexpr size_t kMostEntries = 10'000; // of a list
static constexpr int64_t kMostLevels = 100; // each is a recursion

ModuleTree::ModuleTree(ExportedPart& root,
                       const std::vector<std::shared_ptr<ExportedProgram>>& programs,
                       const std::set<std::string>& blocks)
    : root_(root), blocks_(blocks) {
  for (const auto& program : programs) {
    for (const ExportedLeaf& leaf : program->leaves) {
      if (!leaf.name.empty()) {
        with_tensors_.insert(parent_of(leaf.name));
        add_path(parent_of(leaf.name));
      }
    }
  }
  for (const std::string& path : blocks) {
    add_path(path);
  }
  std::ranges::for_each(order_, [this](const std::string& path) { make(path); });
}

std::shared_ptr<ExportedPart> ModuleTree::shared_part(const std::string& path) const {
  const auto found = parts_.find(path);
  return found == parts_.end() ? nullptr : found->second;
}

void ModuleTree::add_path(const std::string& path) {
  if (std::ranges::count(path, '.') > kMostLevels) {
    throw InputError(kExportedLoad, "the program has a module " + shortened(path, 80),
                     "at most " + std::to_string(kMostLevels) + " levels");
  }
  if (children_.try_emplace(path).second && !path.empty()) {
    add_path(parent_of(path));
    children_[parent_of(path)].insert(last_of(path));
    order_.push_back(path);
  }
}

bool ModuleTree::is_list(const std::string& path) const {
  const std::set<std::string>& names = children_.at(path);
  return !path.empty() && !names.empty() && !with_tensors_.contains(path) &&
         std::ranges::all_of(names, [&](const std::string& name) {
           const auto index = parse_number<size_t>(name);
           return index && *index < kMostEntries && blocks_.contains(path + "." + name);
         });
}

torch::nn::Module& ModuleTree::module_at(const std::string& path) {
  const auto list = lists_.find(path);
  return list != lists_.end() ? static_cast<torch::nn::Module&>(*list->second) : part(path);
}

void ModuleTree::make(const std::string& path) {
  const std::string name = last_of(path);
  if (const auto list = lists_.find(parent_of(path)); list != lists_.end()) {
    const size_t index = *parse_number<size_t>(name);
    while (list->second->size() <= index) {
      list->second->push_back(std::make_shared<ExportedPart>());
    }
    parts_[path] = std::dynamic_pointer_cast<ExportedPart>((*list->second)[index]);
  } else if (is_list(path)) {
    lists_[path] = module_at(parent_of(path))
                       .register_module(name, std::make_shared<torch::nn::ModuleListImpl>());
  } else {
    parts_[path] =
        module_at(parent_of(path)).register_module(name, std::make_shared<ExportedPart>());
  }
}

void place_leaf(ExportedLeaf& leaf, ExportedPart& part, const ProgramFile& file,
                const NamedTensors& weights, LeafPlaces& places) {
  const auto meta = file.weights.find(leaf.name);
  if (meta == file.weights.end() || meta->second.parameter == leaf.buffer) {
    throw InputError(kExportedLoad,
                     std::string("the program reads the ") +
                         (leaf.buffer ? "buffer " : "parameter ") + leaf.name +
                         ", which the file does not describe",
                     "each weight in the file");
  }
  const std::string key = std::string(leaf.buffer ? "buffer " : "") + meta->second.place;
  if (!places.contains(key)) {
    const std::string name = last_of(leaf.name);
    const auto value = weights.find(leaf.name);
    if (value == weights.end()) {
      throw InputError(kExportedLoad, "the program reads " + leaf.name + ", which has no values",
                       "each weight in the file");
    }
    const size_t index = leaf.buffer
                             ? part.add_buffer(name, value->second)
                             : part.add_parameter(name, value->second, meta->second.requires_grad);
    places.emplace(key, std::pair(&part, index));
  }
  std::tie(leaf.owner, leaf.index) = places.at(key);
}

/// The module whose own parameter `name` is in the slot; null if there is none.
static ExportedPart* owner_of(const ExportedProgram& program, int slot, const char* name,
                              ModuleTree& tree) {
  const auto leaf = program.leaf_of.find(slot);
  if (leaf == program.leaf_of.end()) {
    return nullptr;
  }
  const std::string& path = program.leaves[leaf->second].name;
  return !path.empty() && last_of(path) == name ? &tree.part(parent_of(path)) : nullptr;
}

static bool is_one(const GraphArgument& argument) {
  return argument.constant.isScalar() && argument.constant.toScalar().toDouble() == 1;
}

void bind_layers(ExportedProgram& program, ModuleTree& tree, bool substitutions) {
  for (GraphNode& node : program.graph.nodes) {
    const auto& arguments = node.arguments;
    if (node.target == "aten.batch_norm.default" && node.mode_argument >= 0) {
      const int mean = arguments[3].slot;
      if (ExportedPart* part = mean >= 0 ? owner_of(program, mean, "running_mean", tree)
                                         : owner_of(program, arguments[1].slot, "weight", tree)) {
        part->set_layer(ExportedPart::Layer::batch_norm,
                        c10::str(" momentum=", arguments[6].constant.toDouble(),
                                 " eps=", arguments[7].constant.toDouble()));
      }
      continue;
    }
    const bool linear = node.target == "aten.linear.default";
    const bool addmm = node.target == "aten.addmm.default" && is_one(arguments[3]) &&
                       is_one(arguments[4]) && program.leaf_of.contains(arguments[0].slot);
    ExportedPart* part = linear || addmm
                             ? owner_of(program, arguments[linear ? 1 : 2].slot, "weight", tree)
                             : nullptr;
    if (part == nullptr) {
      continue;
    }
    part->set_layer(linear ? ExportedPart::Layer::linear : ExportedPart::Layer::conv1d, "");
    if (substitutions) {
      node.function = [part, linear](GraphValues& stack, const GraphContext&) {
        const c10::IValue& bias = stack[linear ? 2 : 0];
        at::Tensor result =
            part->product(stack[linear ? 0 : 1].toTensor(), stack[linear ? 1 : 2].toTensor(),
                          bias.isNone() ? at::Tensor() : bias.toTensor());
        stack.assign(1, std::move(result));
      };
    }
  }
}

void find_inline_leaves(ExportedProgram& program) {
  std::set<int> slots;
  for (const GraphSegment& segment : program.graph.segments) {
    if (!program.blocks.contains(segment.path())) {
      slots.insert(segment.leaves.begin(), segment.leaves.end());
    }
  }
  for (const GraphArgument& output : program.graph.outputs) {
    each_slot(output, [&](int slot) {
      if (program.leaf_of.contains(slot)) {
        slots.insert(slot);
      }
    });
  }
  program.inline_leaves.assign(slots.begin(), slots.end());
}

/// Slots that outputs depend on with gradients. What an operator writes in place may be read under another
/// name.
static std::set<int> slots_with_gradients(const Graph& graph) {
  std::set<int> slots;
  const auto add = [&](int slot) { slots.insert(slot); };
  std::ranges::for_each(graph.outputs, [&](const auto& output) { each_slot(output, add); });
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    const bool writes =
        node->op && std::ranges::any_of(node->op->schema().arguments(), [](const auto& argument) {
          return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
        });
    const bool counts =
        writes || std::ranges::any_of(node->outputs, [&](const auto& output) {
          return std::ranges::any_of(output.slots, [&](int slot) { return slots.contains(slot); });
        });
    if (counts && !node->without_gradient) {
      std::ranges::for_each(node->arguments, [&](const auto& each) { each_slot(each, add); });
    }
  }
  return slots;
}

std::vector<std::string> freeze_unused(
    torch::nn::Module& module, const std::vector<std::shared_ptr<ExportedProgram>>& programs) {
  std::set<const at::TensorImpl*> read;
  for (const auto& program : programs) {
    const std::set<int> slots = slots_with_gradients(program->graph);
    for (const ExportedLeaf& leaf : program->leaves) {
      if (leaf.owner != nullptr && slots.contains(leaf.slot)) {
        read.insert(leaf.owner->leaf(leaf.buffer, leaf.index).unsafeGetTensorImpl());
      }
    }
  }
  std::vector<std::string> unused;
  for (auto& parameter : module.named_parameters()) {
    if (!read.contains(parameter.value().unsafeGetTensorImpl())) {
      parameter.value().set_requires_grad(false);
      unused.push_back(parameter.key());
    }
  }
  return unused;
}

} // namespace hasten::detail
