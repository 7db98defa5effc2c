#include "hasten/exported/exported_module.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "exported_program.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/core/block_call.h"
#include "hasten/core/deferred_init.h"
#include "hasten/core/named_tensors.h"
#include "hasten/io/safetensors.h"
#include "hasten/io/sharded_safetensors.h"

namespace hasten {

namespace detail {

namespace fs = std::filesystem;

static constexpr const char* kProgramFile = "model.pt2";
static constexpr const char* kWeightsFile = "model.safetensors";

const at::Tensor& ExportedPart::leaf(bool buffer, size_t index) const {
  return buffer ? buffers_in_order_[index] : parameters_[index].value();
}

size_t ExportedPart::add_buffer(const std::string& name, const at::Tensor& buffer) {
  buffers_in_order_.push_back(register_buffer(name, buffer));
  return buffers_in_order_.size() - 1;
}

size_t ExportedPart::add_parameter(const std::string& name, const at::Tensor& parameter,
                                   bool requires_grad) {
  register_parameter(name, parameter, requires_grad);
  return parameters_.size() - 1;
}

// As in Python, and unlike torch::nn::Module, numbers that count stay whole.
void ExportedPart::to(torch::Dtype dtype, bool non_blocking) {
  for (const auto& child : children()) {
    child->to(dtype, non_blocking);
  }
  for (const auto& tensors : {parameters(false), buffers(false)}) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.is_floating_point()) {
        tensor.set_data(tensor.to(dtype, non_blocking));
      }
    }
  }
}

void ExportedPart::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  to(dtype, non_blocking);
  to(device, non_blocking);
}

ExportedPart::Values ExportedPart::forward(Values inputs, const ExportedCall& call) {
  const ExportedProgram& program = *call.program;
  const GraphSegment& segment = program.graph.segments[call.segment];
  GraphFrame frame(program.graph);
  program.fill(segment.leaves, call.device, frame);
  for (size_t i = 0; i < segment.tensors_in.size(); ++i) {
    frame[segment.tensors_in[i]] = std::move(inputs.tensors[i]);
  }
  for (size_t i = 0; i < segment.numbers_in.size(); ++i) {
    frame[segment.numbers_in[i]] = std::move(inputs.numbers[i]);
  }
  run_nodes(program.graph, segment.begin, segment.end, frame, {call.device, call.training});
  Values outputs;
  for (const int slot : segment.tensors_out) {
    outputs.tensors.push_back(frame[slot].toTensor());
  }
  for (const int slot : segment.numbers_out) {
    outputs.numbers.push_back(frame[slot]);
  }
  return outputs;
}

/// The weights of a folder, if it has a file of them.
class FolderWeights {
 public:
  explicit FolderWeights(const fs::path& folder) {
    const fs::path index = folder / (std::string(kWeightsFile) + ".index.json");
    if (fs::exists(folder / kWeightsFile)) {
      files_.emplace_back(folder / kWeightsFile);
    } else if (fs::exists(index)) {
      files_ = ShardedSafetensorsReader(index).shards();
    }
  }
  bool present() const { return !files_.empty(); }
  /// The file that has the tensor; null if none has.
  const SafetensorsReader* find(const std::string& name) const {
    const auto found =
        std::ranges::find_if(files_, [&](const auto& file) { return file.contains(name); });
    return found == files_.end() ? nullptr : &*found;
  }

 private:
  std::vector<SafetensorsReader> files_{};
};

/// The file's own values, or those of the folder. Tied names share one tensor. `values`: false for
/// parameters without values.
static NamedTensors load_weights(const ProgramFile& file, const FolderWeights& folder,
                                 bool values) {
  if (!folder.present()) {
    return file.values;
  }
  const at::NoGradGuard no_grad;
  std::map<std::string, std::vector<std::string>> tied; // names by place
  for (const auto& [name, meta] : file.weights) {
    tied[meta.place].push_back(name);
  }
  NamedTensors weights;
  for (const auto& [place, names] : tied) {
    if (const WeightMeta& meta = file.weights.at(names[0]); !values && meta.parameter) {
      weights[names[0]] = at::empty(meta.sizes, at::TensorOptions(meta.dtype));
      continue;
    }
    const auto stored =
        std::ranges::find_if(names, [&](const auto& name) { return folder.find(name) != nullptr; });
    if (stored == names.end()) {
      throw InputError(kExportedLoad,
                       std::string(kWeightsFile) + " has no tensor " + joined(names, " or "),
                       "each weight of the program", "use the folder that was exported");
    }
    const WeightMeta& meta = file.weights.at(*stored);
    const SafetensorsReader& reader = *folder.find(*stored);
    const at::Tensor value = in_deferred_init() ? reader.tensor(*stored) : reader.read(*stored);
    if (value.sizes() != at::IntArrayRef(meta.sizes)) {
      throw InputError(
          kExportedLoad,
          std::string(kWeightsFile) + ": " + *stored + " has sizes=" + c10::str(value.sizes()),
          c10::str(at::IntArrayRef(meta.sizes)), "export the module again with these weights");
    }
    at::Tensor weight = value;
    if (in_deferred_init() || value.scalar_type() != meta.dtype) {
      weight = at::empty(meta.sizes, at::TensorOptions(meta.dtype)).copy_(value);
    }
    for (const std::string& name : names) {
      weights[name] = weight;
    }
  }
  return weights;
}

static std::string parent_of(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}
static std::string last_of(const std::string& path) { return path.substr(path.rfind('.') + 1); }

/// Makes submodules where Python has them. Lists whose entries are blocks are ModuleLists, in which FSDP
/// finds its units.
class ModuleTree {
 public:
  ModuleTree(ExportedPart& root, const std::vector<std::shared_ptr<ExportedProgram>>& programs,
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

  ExportedPart& part(const std::string& path) { return path.empty() ? root_ : *parts_.at(path); }
  std::shared_ptr<ExportedPart> shared_part(const std::string& path) const {
    const auto found = parts_.find(path);
    return found == parts_.end() ? nullptr : found->second;
  }

 private:
  static constexpr size_t kMostEntries = 10'000;

  void add_path(const std::string& path) {
    if (children_.try_emplace(path).second && !path.empty()) {
      add_path(parent_of(path));
      children_[parent_of(path)].insert(last_of(path));
      order_.push_back(path);
    }
  }

  bool is_list(const std::string& path) const {
    const std::set<std::string>& names = children_.at(path);
    return !path.empty() && !names.empty() && !with_tensors_.contains(path) &&
           std::ranges::all_of(names, [&](const std::string& name) {
             const auto index = parse_number<size_t>(name);
             return index && *index < kMostEntries && blocks_.contains(path + "." + name);
           });
  }

  torch::nn::Module& module_at(const std::string& path) {
    const auto list = lists_.find(path);
    return list != lists_.end() ? static_cast<torch::nn::Module&>(*list->second) : part(path);
  }

  void make(const std::string& path) {
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

  ExportedPart& root_;
  const std::set<std::string>& blocks_;
  std::set<std::string> with_tensors_{}; // modules that have parameters or buffers of their own
  std::map<std::string, std::set<std::string>> children_{}; // by path
  std::vector<std::string> order_{}; // as in Python, a parent before its children
  std::map<std::string, std::shared_ptr<ExportedPart>> parts_{};
  std::map<std::string, std::shared_ptr<torch::nn::ModuleListImpl>> lists_{};
};

/// Where tensors have been registered: by name, or by `WeightMeta::place` if tied ones are one.
using LeafPlaces = std::map<std::string, std::pair<const ExportedPart*, size_t>>;

/// Registers the leaf's tensor in its part, unless another program or a tied name has.
static void place_leaf(ExportedLeaf& leaf, ExportedPart& part, const ProgramFile& file,
                       const NamedTensors& weights, bool once, LeafPlaces& places) {
  const auto meta = file.weights.find(leaf.name);
  if (meta == file.weights.end()) {
    throw InputError(kExportedLoad,
                     "the program reads " + leaf.name + ", which the file does not describe",
                     "each weight in the file");
  }
  const std::string& key = once ? meta->second.place : leaf.name;
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

/// Slots of leaves that are read outside of blocks, and whether any node reads a leaf.
static void find_inline_leaves(ExportedProgram& program) {
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

/// Parameters without a reader in any program. They lose requires_grad.
static std::vector<std::string> freeze_unused(
    torch::nn::Module& module, const std::vector<std::shared_ptr<ExportedProgram>>& programs) {
  std::set<const at::TensorImpl*> read;
  for (const auto& program : programs) {
    std::set<int> slots(program->inline_leaves.begin(), program->inline_leaves.end());
    for (const GraphSegment& segment : program->graph.segments) {
      slots.insert(segment.leaves.begin(), segment.leaves.end());
    }
    for (const int slot : slots) {
      const ExportedLeaf& leaf = program->leaves[program->leaf_of.at(slot)];
      if (leaf.owner != nullptr) {
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

static std::vector<std::shared_ptr<ExportedProgram>> read_programs(
    const ProgramFile& file, const fs::path& path, const ExportedModuleOptions& options) {
  std::vector<std::shared_ptr<ExportedProgram>> programs;
  try {
    for (size_t i = 0; i < file.names.size(); ++i) {
      programs.push_back(read_program(file.programs[i], file.names[i], file.constants[i], options));
      programs.back()->decides_mode = file.names.size() == 1;
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& problem) { // JSON in another form
    const std::string text = problem.what();
    throw InputError(
        kExportedLoad,
        path.string() + ": the program is damaged (" + text.substr(0, text.find('\n')) + ")",
        "a program of torch.export", "export the module again");
  }
  return programs;
}

} // namespace detail

using detail::ExportedProgram;

std::shared_ptr<const detail::ProgramFile> detail::read_exported_file(const fs::path& path,
                                                                      bool values) {
  const bool folder = fs::is_directory(path);
  const bool beside = folder && FolderWeights(path).present();
  return std::make_shared<const ProgramFile>(
      read_program_file(folder ? path / kProgramFile : path, values && !beside));
}

ExportedModuleImpl::ExportedModuleImpl(const detail::ProgramFile& file,
                                       const ExportedModuleOptions& options)
    : file_(file.path) {
  const bool in_folder = file_.filename() == detail::kProgramFile;
  const detail::FolderWeights folder(in_folder ? detail::folder_of(file_) : "");
  const auto programs = detail::read_programs(file, file_, options);
  const std::set<std::string> blocks = detail::whole_blocks(programs);
  detail::ModuleTree tree(*this, programs, blocks);
  const NamedTensors weights = detail::load_weights(file, folder, options.weights);
  detail::LeafPlaces places;
  for (const auto& program : programs) {
    for (detail::ExportedLeaf& leaf : program->leaves) {
      if (!leaf.name.empty()) {
        const std::string parent = detail::parent_of(leaf.name);
        detail::place_leaf(leaf, tree.part(parent), file, weights, !options.weights, places);
        if (!parent.empty()) {
          program->owners.push_back(tree.shared_part(parent));
        }
      }
    }
    for (const std::string& block : blocks) {
      program->blocks.emplace(block, tree.shared_part(block));
    }
    detail::find_inline_leaves(*program);
  }
  if (!programs[0]->scattered.empty()) {
    log_info("these submodules of " + file_.string() +
             " are not called as blocks, because other operators run between theirs: " +
             joined(programs[0]->scattered));
  }
  unused_ = detail::freeze_unused(*this, programs);
  programs_.assign(programs.begin(), programs.end());
}

const ExportedProgram& ExportedModuleImpl::mode() const {
  return *programs_[is_training() || programs_.size() < 2 ? 0 : 1];
}

static std::string input_names(const ExportedProgram& program) {
  return joined(mapped(program.inputs, [](const ExportedInput& input) { return input.name; }));
}

NamedTensors ExportedModuleImpl::forward(const NamedTensors& inputs) {
  const ExportedProgram& program = mode();
  std::vector<at::Tensor> ordered(program.inputs.size());
  for (const auto& [name, tensor] : inputs) {
    const auto input = std::ranges::find(program.inputs, name, &ExportedInput::name);
    if (input != program.inputs.end()) {
      ordered[static_cast<size_t>(input - program.inputs.begin())] = tensor;
    } else if (tensor.defined()) {
      throw InputError("exported::forward", "input " + name, input_names(program),
                       program.constant_inputs.contains(name)
                           ? "export the module with a tensor for it"
                           : "write the name as in Python's forward");
    }
  }
  return forward(ordered);
}

NamedTensors ExportedModuleImpl::forward(const std::vector<at::Tensor>& inputs) {
  const ExportedProgram& program = mode();
  if (inputs.size() != program.inputs.size()) {
    throw InputError("exported::forward", std::to_string(inputs.size()) + " inputs",
                     std::to_string(program.inputs.size()) + ": " + input_names(program));
  }
  detail::check_inputs(program, inputs);
  detail::GraphFrame frame(program.graph);
  for (size_t i = 0; i < inputs.size(); ++i) {
    frame[program.input_slots[i]] = inputs[i];
  }
  return run(program, std::move(frame));
}

NamedTensors ExportedModuleImpl::run(const ExportedProgram& program, detail::GraphFrame frame) {
  detail::ExportedCall call{.program = programs_[&program == programs_[0].get() ? 0 : 1],
                            .root = shared_from_this(),
                            .training = is_training() || !program.decides_mode};
  call.device = program.device(frame);
  const detail::Graph& graph = program.graph;
  program.fill(program.inline_leaves, call.device, frame);
  for (call.segment = 0; call.segment < graph.segments.size(); ++call.segment) {
    const detail::GraphSegment& segment = graph.segments[call.segment];
    const auto block = program.blocks.find(segment.path());
    if (block == program.blocks.end()) {
      detail::run_nodes(graph, segment.begin, segment.end, frame, {call.device, call.training});
      continue;
    }
    Values values;
    for (const int slot : segment.tensors_in) {
      values.tensors.push_back(frame[slot].toTensor());
    }
    for (const int slot : segment.numbers_in) {
      values.numbers.push_back(frame[slot]);
    }
    for (const int slot : segment.released) {
      frame[slot] = {};
    }
    values = call_block(block->second, std::move(values), call);
    for (size_t i = 0; i < segment.tensors_out.size(); ++i) {
      frame[segment.tensors_out[i]] = std::move(values.tensors[i]);
    }
    for (size_t i = 0; i < segment.numbers_out.size(); ++i) {
      frame[segment.numbers_out[i]] = std::move(values.numbers[i]);
    }
  }
  NamedTensors outputs;
  for (size_t i = 0; i < graph.outputs.size(); ++i) {
    const c10::IValue value =
        detail::value_of(graph.outputs[i], frame, {call.device, call.training});
    if (value.isTensor()) {
      outputs[program.outputs[i]] = value.toTensor();
    }
  }
  return outputs;
}

const std::vector<ExportedInput>& ExportedModuleImpl::inputs() const { return mode().inputs; }
const std::vector<std::string>& ExportedModuleImpl::outputs() const { return mode().outputs; }

std::string ExportedModuleImpl::output_layer(const std::string& output) const {
  const ExportedProgram& program = *programs_[0];
  const auto name = std::ranges::find(program.outputs, output);
  const int slot =
      name == program.outputs.end()
          ? -1
          : program.graph.outputs[static_cast<size_t>(name - program.outputs.begin())].slot;
  for (const detail::GraphNode& node : program.graph.nodes) {
    if (slot >= 0 && node.target == "aten.linear.default" && node.outputs[0].slots[0] == slot) {
      const auto weight = program.leaf_of.find(node.arguments[1].slot);
      return weight == program.leaf_of.end()
                 ? ""
                 : detail::parent_of(program.leaves[weight->second].name);
    }
  }
  return {};
}

std::vector<std::string> ExportedModuleImpl::block_names() const {
  std::vector<std::string> names;
  for (const detail::GraphSegment& segment : mode().graph.segments) {
    if (mode().blocks.contains(segment.path()) && std::ranges::count(names, segment.path()) == 0) {
      names.push_back(segment.path());
    }
  }
  return names;
}

std::string ExportedModuleImpl::describe() const {
  std::string text;
  for (const ExportedInput& input : inputs()) {
    text += input.name + ": " + c10::toString(input.dtype) + " [" + joined(input.sizes) + "]\n";
  }
  return text + "outputs: " + joined(outputs()) + "\nblocks: " + joined(block_names());
}

void ExportedModuleImpl::save_graph(const std::filesystem::path& folder) const {
  const std::filesystem::path to = folder / detail::kProgramFile;
  std::error_code error;
  if (!std::filesystem::equivalent(file_, to, error)) {
    detail::write_without_weights(file_, to);
  }
}

void ExportedModuleImpl::save(const std::filesystem::path& folder) const {
  save_graph(folder);
  write_safetensors(folder / detail::kWeightsFile, detail::named_model_tensors(*this));
}

ExportedModule ExportedModule::load(const std::filesystem::path& path,
                                    const ExportedModuleOptions& options) {
  return ExportedModule(std::make_shared<ExportedModuleImpl>(
      *detail::read_exported_file(path, options.weights), options));
}

} // namespace hasten
