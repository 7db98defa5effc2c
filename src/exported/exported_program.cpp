#include "exported_program.h"

#include <algorithm>

#include "graph_reader.h"
#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"

namespace hasten::detail {

using nlohmann::json;

static constexpr const char* kExportedForward = "exported::forward";

at::Tensor ExportedProgram::constant_on(const ExportedLeaf& leaf, const at::Device& device) const {
  if (device.is_cpu()) {
    return leaf.constant;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  at::Tensor& moved = moved_[{leaf.slot, device.index()}];
  if (!moved.defined()) {
    moved = leaf.constant.to(device);
  }
  return moved;
}

at::Device ExportedProgram::device(const GraphFrame& frame) const {
  const auto placed =
      std::ranges::find_if(leaves, [](const ExportedLeaf& leaf) { return leaf.owner != nullptr; });
  if (placed != leaves.end()) {
    return placed->owner->leaf(placed->buffer, placed->index).device();
  }
  return input_slots.empty() ? at::Device(at::kCPU) : frame[input_slots[0]].toTensor().device();
}

void ExportedProgram::fill(const std::vector<int>& slots, const at::Device& device,
                           GraphFrame& frame) const {
  for (const int slot : slots) {
    const ExportedLeaf& leaf = leaves[leaf_of.at(slot)];
    frame[slot] = leaf.constant.defined() ? constant_on(leaf, device)
                                          : leaf.owner->leaf(leaf.buffer, leaf.index);
  }
}

/// "s77" of "Symbol('s77', positive=True, integer=True)"; empty for an expression of several.
static std::string symbol_of(const std::string& expression) {
  constexpr std::string_view kBegin = "Symbol('";
  const size_t end = expression.find('\'', kBegin.size());
  const bool one = expression.starts_with(kBegin) && expression.ends_with(")") &&
                   expression.find("Symbol", kBegin.size()) == std::string::npos;
  return one ? expression.substr(kBegin.size(), end - kBegin.size()) : "";
}

static ExportedInput input_of(const std::string& name, const json& graph) {
  const json& value = graph.at("tensor_values").at(name);
  ExportedInput input{.name = name, .dtype = scalar_type_of(value.at("dtype").get<int64_t>())};
  for (const json& size : value.at("sizes")) {
    const std::string symbol = size.contains("as_expr")
                                   ? symbol_of(size.at("as_expr").at("expr_str").get<std::string>())
                                   : "";
    input.sizes.push_back(size.contains("as_int") ? std::to_string(size.at("as_int").get<int64_t>())
                          : symbol.empty()        ? "?"
                                                  : symbol);
  }
  return input;
}

/// Names of the leaves of a pytree, as the header says.
static void name_outputs(const json& spec, const std::string& prefix,
                         std::vector<std::string>& names) {
  if (spec.at("type").is_null()) {
    names.push_back(prefix.empty() ? "output" : prefix);
    return;
  }
  const json& text = spec.at("context");
  const json context = text.is_string() ? try_parse_json(text.get<std::string>()).value : json();
  const json& children = spec.at("children_spec");
  for (size_t i = 0; i < children.size(); ++i) {
    const bool named =
        context.is_array() && context.size() == children.size() && context[i].is_string();
    const std::string name = named ? context[i].get<std::string>() : std::to_string(i);
    name_outputs(children[i], prefix.empty() ? name : prefix + "." + name, names);
  }
}

class ProgramReader {
 public:
  ProgramReader(const json& source, const NamedTensors& constants,
                const ExportedModuleOptions& options)
      : source_(source),
        module_(source.at("graph_module")),
        constants_(constants),
        options_(options) {}

  std::shared_ptr<ExportedProgram> read(const std::string& name) {
    program_->name = name;
    require_known(source_, "the program",
                  {"graph_module", "opset_version", "range_constraints", "schema_version",
                   "verifiers", "torch_version", "guards_code"});
    require_known(
        module_, "the program's module",
        {"graph", "signature", "module_call_graph", "metadata", "treespec_namedtuple_fields"});
    require_known(module_.at("signature"), "the signature", {"input_specs", "output_specs"});
    ReadGraph read = read_graph(module_.at("graph"), options_.substitutions);
    program_->graph = std::move(read.graph);
    slots_ = std::move(read.slots);
    for (const json& spec : module_.at("signature").at("input_specs")) {
      read_input(spec);
    }
    for (const int slot : program_->graph.inputs) {
      if (program_->graph.tensor(slot) && !given_.contains(slot)) {
        refuse("an input of the graph that its signature does not have", "one entry for each");
      }
    }
    for (const json& spec : module_.at("signature").at("output_specs")) {
      if (entry_of(spec).first != "user_output") {
        refuse("an output that is " + entry_of(spec).first, "a program in the form of training");
      }
    }
    read_ranges();
    read_output_names();
    find_segments(program_->graph, options_.blocks, program_->scattered);
    for (GraphNode& node : program_->graph.nodes) {
      find_written_buffer(node);
    }
    return program_;
  }

 private:
  [[noreturn]] void refuse(const std::string& what, const std::string& expected) const {
    throw InputError(kExportedLoad, "program " + program_->name + " has " + what, expected,
                     "export it by torch.export.export(module.train(), …)");
  }

  /// Of a tensor that is an input of the graph, once.
  int slot_of(const json& argument) {
    const auto name = argument.at("name").get<std::string>();
    const int slot = slots_.at(name);
    if (!program_->graph.tensor(slot) ||
        std::ranges::find(program_->graph.inputs, slot) == program_->graph.inputs.end() ||
        !given_.insert(slot).second) {
      refuse("an input " + name + " that is no input of the graph, or is there twice",
             "one entry for each");
    }
    return slot;
  }

  void add_leaf(ExportedLeaf leaf) {
    if (leaf.name.empty() && !leaf.constant.defined()) {
      refuse("a tensor without a name", "the name in Python");
    }
    program_->graph.is_leaf[static_cast<size_t>(leaf.slot)] = true;
    program_->leaf_of.emplace(leaf.slot, program_->leaves.size());
    program_->leaves.push_back(std::move(leaf));
  }

  void read_input(const json& spec) {
    const auto [kind, entry] = entry_of(spec);
    const json& value = *entry;
    require_known(value, "an input of the signature",
                  {"arg", "name", "value", "parameter_name", "buffer_name", "persistent",
                   "tensor_constant_name"});
    if (kind == "parameter") {
      add_leaf({.slot = slot_of(value.at("arg")),
                .name = value.at("parameter_name").get<std::string>()});
    } else if (kind == "buffer" && value.at("persistent").get<bool>()) {
      add_leaf({.slot = slot_of(value.at("arg")),
                .name = value.at("buffer_name").get<std::string>(),
                .buffer = true});
    } else if (kind == "buffer" || kind == "tensor_constant") {
      const auto name = value.at(kind + "_name").get<std::string>();
      const auto found = constants_.find(name);
      if (found == constants_.end()) {
        refuse("no values of the constant " + name, "each constant in the file");
      }
      add_leaf({.slot = slot_of(value.at("arg")), .constant = found->second});
    } else if (kind == "constant_input") {
      program_->constant_inputs.insert(value.at("name").get<std::string>());
    } else if (kind == "user_input" && value.at("arg").contains("as_tensor")) {
      const json& argument = value.at("arg").at("as_tensor");
      program_->input_slots.push_back(slot_of(argument));
      program_->inputs.push_back(
          input_of(argument.at("name").get<std::string>(), module_.at("graph")));
    } else {
      refuse("an input that is " + shortened(spec.dump(), 80), "tensors, None and fixed numbers");
    }
  }

  void read_ranges() {
    for (const auto& [name, range] : source_.at("range_constraints").items()) {
      SizeRange sizes;
      // Export writes 2 where it took no less for a size that may change. 1 works.
      if (const json& least = range.at("min_val");
          least.is_number_integer() && least.get<int64_t>() > 2) {
        sizes.least = least.get<int64_t>();
      }
      if (const json& most = range.at("max_val"); most.is_number_integer()) {
        sizes.most = most.get<int64_t>();
      }
      program_->ranges.emplace(name, sizes);
    }
  }

  void read_output_names() {
    const json& signature = module_.at("module_call_graph").at(0).at("signature");
    const json spec =
        parse_json(kExportedLoad, "out_spec", signature.at("out_spec").get<std::string>());
    name_outputs(spec.at(1), "", program_->outputs);
    if (program_->outputs.size() != program_->graph.outputs.size()) {
      refuse(std::to_string(program_->graph.outputs.size()) + " outputs and " +
                 std::to_string(program_->outputs.size()) + " names",
             "a name for each output");
    }
  }

  /// BatchNorm counts its batches and writes its statistics.
  void find_written_buffer(GraphNode& node) const {
    if (!node.op || node.arguments.empty() || node.op->schema().arguments().empty()) {
      return;
    }
    const c10::AliasInfo* alias = node.op->schema().arguments()[0].alias_info();
    const int slot = node.arguments[0].slot;
    const auto leaf = program_->leaf_of.find(slot);
    if (alias != nullptr && alias->isWrite() && leaf != program_->leaf_of.end() &&
        program_->leaves[leaf->second].buffer) {
      node.written_buffer = slot;
    }
  }

  const json& source_;
  const json& module_;
  const NamedTensors& constants_;
  const ExportedModuleOptions& options_;
  std::map<std::string, int> slots_{};
  std::set<int> given_{}; // inputs of the graph that the signature has
  std::shared_ptr<ExportedProgram> program_ = std::make_shared<ExportedProgram>();
};

std::shared_ptr<ExportedProgram> read_program(const json& source, const std::string& name,
                                              const NamedTensors& constants,
                                              const ExportedModuleOptions& options) {
  return ProgramReader(source, constants, options).read(name);
}

std::set<std::string> whole_blocks(const std::vector<std::shared_ptr<ExportedProgram>>& programs) {
  std::set<std::string> paths;
  for (const auto& program : programs) {
    for (const GraphSegment& segment : program->graph.segments) {
      paths.insert(segment.path());
    }
  }
  paths.erase("");
  for (const auto& program : programs) {
    for (const GraphSegment& segment : program->graph.segments) {
      for (const int slot : segment.leaves) {
        const std::string& name = program->leaves[program->leaf_of.at(slot)].name;
        std::erase_if(paths, [&](const std::string& path) {
          return path != segment.path() && name.starts_with(path + ".");
        });
      }
    }
  }
  return paths;
}

static std::string signature_of(const ExportedProgram& program) {
  return joined(mapped(program.inputs,
                       [](const ExportedInput& input) {
                         return input.name + " " + c10::toString(input.dtype) + " [" +
                                joined(input.sizes) + "]";
                       }),
                ", ");
}

static bool same_kind(at::ScalarType a, at::ScalarType b) {
  return a == b || (at::isFloatingType(a) && at::isFloatingType(b)) ||
         (at::isIntegralType(a, false) && at::isIntegralType(b, false));
}

[[noreturn]] static void refuse_input(const ExportedProgram& program, const ExportedInput& input,
                                      const at::Tensor& got, const std::string& expected) {
  throw InputError(kExportedForward,
                   "input " + input.name +
                       ": dtype=" + std::string(c10::toString(got.scalar_type())) +
                       ", sizes=" + c10::str(got.sizes()),
                   expected + "; the module takes " + signature_of(program),
                   "export it with this size as Dim.DYNAMIC");
}

void check_inputs(const ExportedProgram& program, const std::vector<at::Tensor>& inputs) {
  std::map<std::string, std::pair<int64_t, std::string>>
      sizes; // by name: size and the input that has it
  for (size_t i = 0; i < inputs.size(); ++i) {
    const ExportedInput& input = program.inputs[i];
    const at::Tensor& got = inputs[i];
    if (!got.defined()) {
      throw InputError(kExportedForward, "input " + input.name + " is missing",
                       "tensors for " + signature_of(program));
    }
    if (!same_kind(got.scalar_type(), input.dtype) || got.dim() != std::ssize(input.sizes)) {
      refuse_input(program, input, got,
                   std::to_string(input.sizes.size()) + " sizes of " + c10::toString(input.dtype));
    }
    for (size_t d = 0; d < input.sizes.size(); ++d) {
      const std::string& name = input.sizes[d];
      const int64_t size = got.size(static_cast<int64_t>(d));
      const auto at = " at dimension " + std::to_string(d);
      if (const auto fixed = parse_number<int64_t>(name); fixed) {
        if (*fixed != size) {
          refuse_input(program, input, got, name + at);
        }
        continue;
      }
      const auto range = program.ranges.find(name);
      const SizeRange limits = range == program.ranges.end() ? SizeRange{} : range->second;
      if (size < limits.least || size > limits.most) {
        refuse_input(program, input, got,
                     (size < limits.least ? "at least " + std::to_string(limits.least)
                                          : "at most " + std::to_string(limits.most)) +
                         at);
      }
      const auto first =
          name == "?" ? sizes.end() : sizes.emplace(name, std::pair(size, input.name)).first;
      if (first != sizes.end() && first->second.first != size) {
        refuse_input(
            program, input, got,
            std::to_string(first->second.first) + at + ", as in input " + first->second.second);
      }
    }
  }
}

} // namespace hasten::detail
