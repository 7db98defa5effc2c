#include "hasten/exported/exported_module.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <utility>

#include "exported_program.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/core/block_call.h"
#include "hasten/core/deferred_init.h"
#include "hasten/core/linear.h"
#include "hasten/core/memory.h"
#include "hasten/core/named_tensors.h"
#include "hasten/io/safetensors.h"
#include "hasten/io/sharded_safetensors.h"
#include "module_tree.h"

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

void ExportedPart::set_layer(Layer layer, std::string settings) {
  layer_ = layer;
  settings_ = std::move(settings);
}

at::Tensor ExportedPart::tensor(const std::string& name) const {
  for (const auto& tensors : {named_parameters(false), named_buffers(false)}) {
    if (const at::Tensor* found = tensors.find(name)) {
      return *found;
    }
  }
  return {};
}

at::Tensor ExportedPart::product(const at::Tensor& x, const at::Tensor& weight,
                                 const at::Tensor& bias) const {
  const at::Tensor read = layer_ == Layer::conv1d ? weight.t() : weight;
  return product_ != nullptr ? product_(x, read, bias, weight) : fast_linear(x, read, bias);
}

at::Tensor ExportedPart::batch_norm_identity() const {
  const at::Tensor mean = layer_ == Layer::batch_norm ? tensor("running_mean") : at::Tensor();
  return mean.defined() || layer_ != Layer::batch_norm ? mean : tensor("weight");
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

static bool makes(const GraphNode& node, int slot) {
  return !node.outputs.empty() && node.outputs[0].tensor && node.outputs[0].slots[0] == slot;
}

/// The node of the linear layer that computes the output. `chosen`: also where rows of its result are
/// chosen after it, as those of the last tokens.
static std::optional<size_t> output_node(const ExportedProgram& program, const std::string& output,
                                         bool chosen) {
  static const std::set<std::string> kChoose{"aten.index.Tensor", "aten.select.int",
                                             "aten.slice.Tensor", "aten.squeeze.dim",
                                             "aten.contiguous.default"};
  const auto name = std::ranges::find(program.outputs, output);
  int slot = name == program.outputs.end()
                 ? -1
                 : program.graph.outputs[static_cast<size_t>(name - program.outputs.begin())].slot;
  for (size_t i = program.graph.nodes.size(); slot >= 0 && i-- > 0;) {
    const GraphNode& node = program.graph.nodes[i];
    if (!makes(node, slot)) {
      continue;
    }
    if (node.target == "aten.linear.default") {
      return i;
    }
    slot = chosen && kChoose.contains(node.target) ? node.arguments[0].slot : -1;
  }
  return std::nullopt;
}

/// The module whose weight it reads; empty if there is none.
static std::string output_module(const ExportedProgram& program, const std::string& output) {
  const std::optional<size_t> node = output_node(program, output, /*chosen=*/true);
  const auto weight = node ? program.leaf_of.find(program.graph.nodes[*node].arguments[1].slot)
                           : program.leaf_of.end();
  return weight == program.leaf_of.end() ? "" : parent_of(program.leaves[weight->second].name);
}

static std::set<std::string> output_modules(const ExportedProgram& program) {
  std::set<std::string> modules;
  for (const std::string& output : program.outputs) {
    modules.insert(output_module(program, output));
  }
  modules.erase("");
  return modules;
}

/// The folder's tensor under one of the names. `any_rows`: it may have other rows than the program.
static at::Tensor read_weight(const FolderWeights& folder, const std::vector<std::string>& names,
                              const WeightMeta& meta, bool any_rows) {
  const auto stored =
      std::ranges::find_if(names, [&](const auto& name) { return folder.find(name) != nullptr; });
  if (stored == names.end()) {
    throw InputError(kExportedLoad,
                     std::string(kWeightsFile) + " has no tensor " + joined(names, " or "),
                     "each weight of the program", "use the folder that was exported");
  }
  const SafetensorsReader& reader = *folder.find(*stored);
  const at::Tensor value = in_deferred_init() ? reader.tensor(*stored) : reader.read(*stored);
  std::vector<int64_t> sizes = meta.sizes;
  if (any_rows && value.dim() > 0 && !sizes.empty()) {
    sizes[0] = value.size(0);
  }
  if (value.sizes() != at::IntArrayRef(sizes)) {
    throw InputError(
        kExportedLoad,
        std::string(kWeightsFile) + ": " + *stored + " has sizes=" + c10::str(value.sizes()),
        c10::str(at::IntArrayRef(sizes)), "export the module again with these weights");
  }
  return in_deferred_init() || value.scalar_type() != meta.dtype
             ? at::empty(sizes, at::TensorOptions(meta.dtype)).copy_(value)
             : value;
}

/// The file's own values, or those of the folder. Tied names share one tensor. `values`: false for
/// parameters without values. `outputs`: modules that compute outputs, whose rows may be others.
static NamedTensors load_weights(const ProgramFile& file, const FolderWeights& folder, bool values,
                                 const std::set<std::string>& outputs) {
  const at::NoGradGuard no_grad;
  std::map<std::string, std::vector<std::string>> tied; // names by place
  for (const auto& [name, meta] : file.weights) {
    tied[meta.place].push_back(name);
  }
  NamedTensors weights = file.values;
  for (const auto& [place, names] : tied) {
    const WeightMeta& meta = file.weights.at(names[0]);
    const bool empty = !values && meta.parameter;
    if (empty || folder.present()) {
      const at::Tensor weight =
          empty ? at::empty(meta.sizes, at::TensorOptions(meta.dtype))
                : read_weight(folder, names, meta, outputs.contains(parent_of(names[0])));
      std::ranges::for_each(names, [&](const auto& name) { weights[name] = weight; });
    }
  }
  return weights;
}

static std::vector<std::shared_ptr<ExportedProgram>> read_programs(
    const ProgramFile& file, const ExportedModuleOptions& options) {
  std::vector<std::shared_ptr<ExportedProgram>> programs;
  for (size_t i = 0; i < file.names.size(); ++i) {
    programs.push_back(read_program(file.programs[i], file.names[i], file.constants[i], options));
    programs.back()->decides_mode = file.names.size() == 1;
  }
  return programs;
}

static void warn_of_newer(const ProgramFile& file) {
  int major = 0;
  int minor = 0;
  const std::string version = file.programs[0].value("torch_version", "");
  if (std::sscanf(version.c_str(), "%d.%d", &major, &minor) == 2 &&
      std::pair(major, minor) > std::pair(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR)) {
    log_warning(file.path.string() + " is of PyTorch " + std::to_string(major) + "." +
                std::to_string(minor) +
                ", which is newer than this LibTorch, " TORCH_VERSION
                ": its operators may have changed");
  }
}

} // namespace detail

using detail::ExportedProgram;

std::shared_ptr<const detail::ProgramFile> detail::read_exported_file(const fs::path& path) {
  const bool folder = fs::is_directory(path);
  const bool beside = folder && FolderWeights(path).present();
  return std::make_shared<const ProgramFile>(
      read_program_file(folder ? path / kProgramFile : path, !beside));
}

ExportedModuleImpl::ExportedModuleImpl(const detail::ProgramFile& file,
                                       const ExportedModuleOptions& options)
    : file_(file.path) {
  try {
    build(file, options);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& problem) { // JSON in another form, or names that no module has
    const std::string text = problem.what();
    throw InputError(
        detail::kExportedLoad,
        file_.string() + ": the program is damaged (" + text.substr(0, text.find('\n')) + ")",
        "a program of torch.export", "export the module again", error_kind(problem));
  }
}

void ExportedModuleImpl::build(const detail::ProgramFile& file,
                               const ExportedModuleOptions& options) {
  const bool in_folder = file_.filename() == detail::kProgramFile;
  const detail::FolderWeights folder(in_folder ? detail::folder_of(file_) : "");
  const auto programs = detail::read_programs(file, options);
  const std::set<std::string> blocks = detail::whole_blocks(programs);
  detail::ModuleTree tree(*this, programs, blocks);
  const NamedTensors weights =
      detail::load_weights(file, folder, options.weights, detail::output_modules(*programs[0]));
  detail::LeafPlaces places;
  for (const auto& program : programs) {
    for (detail::ExportedLeaf& leaf : program->leaves) {
      if (!leaf.name.empty()) {
        const std::string parent = detail::parent_of(leaf.name);
        detail::place_leaf(leaf, tree.part(parent), file, weights, places);
        if (!parent.empty()) {
          program->owners.push_back(tree.shared_part(parent));
        }
      }
    }
    detail::bind_layers(*program, tree, options.substitutions);
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
  detail::warn_of_newer(file);
  if (std::ranges::none_of(parameters(), &at::Tensor::requires_grad)) {
    log_info("no parameter of " + file_.string() +
             " requires gradients, so it evaluates but does not train: export the module before "
             "its parameters are frozen");
  }
  programs_.assign(programs.begin(), programs.end());
}

const ExportedProgram& ExportedModuleImpl::mode() const {
  return *programs_[is_training() || programs_.size() < 2 ? 0 : 1];
}

static std::string input_names(const ExportedProgram& program) {
  return joined(mapped(program.inputs, [](const ExportedInput& input) { return input.name; }));
}

std::vector<at::Tensor> ExportedModuleImpl::in_order(const NamedTensors& inputs) const {
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
  return ordered;
}

detail::GraphFrame ExportedModuleImpl::frame_of(const std::vector<at::Tensor>& inputs) const {
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
  return frame;
}

NamedTensors ExportedModuleImpl::forward(const NamedTensors& inputs) {
  return forward(in_order(inputs));
}

NamedTensors ExportedModuleImpl::forward(const std::vector<at::Tensor>& inputs) {
  const ExportedProgram& program = mode();
  detail::GraphFrame frame = frame_of(inputs);
  const detail::ExportedCall call = run(program.graph.nodes.size(), frame);
  NamedTensors outputs;
  for (size_t i = 0; i < program.graph.outputs.size(); ++i) {
    const c10::IValue value =
        detail::value_of(program.graph.outputs[i], frame, {call.device, call.training});
    if (value.isTensor()) {
      outputs[program.outputs[i]] = value.toTensor();
    }
  }
  return outputs;
}

std::optional<ExportedOutputLayer> ExportedModuleImpl::forward_to_output_layer(
    const NamedTensors& inputs, const std::string& output) {
  const ExportedProgram& program = mode();
  const std::optional<size_t> node = detail::output_node(program, output, /*chosen=*/false);
  const auto segment = std::ranges::find_if(
      program.graph.segments, [&](const auto& each) { return node && *node < each.end; });
  if (!node || program.blocks.contains(segment->path())) { // a block runs as a whole
    return std::nullopt;
  }
  detail::GraphFrame frame = frame_of(in_order(inputs));
  const detail::ExportedCall call = run(*node, frame);
  const auto read = [&](size_t argument) {
    const c10::IValue value = detail::value_of(program.graph.nodes[*node].arguments[argument],
                                               frame, {call.device, call.training});
    return value.isTensor() ? value.toTensor() : at::Tensor();
  };
  return ExportedOutputLayer{.input = read(0), .weight = read(1), .bias = read(2)};
}

detail::ExportedCall ExportedModuleImpl::run(size_t end, detail::GraphFrame& frame) {
  const ExportedProgram& program = mode();
  detail::ExportedCall call{.program = programs_[&program == programs_[0].get() ? 0 : 1],
                            .root = shared_from_this(),
                            .training = is_training() || !program.decides_mode};
  call.device = program.device(frame);
  const detail::Graph& graph = program.graph;
  program.fill(program.inline_leaves, call.device, frame);
  for (call.segment = 0; call.segment < graph.segments.size(); ++call.segment) {
    const detail::GraphSegment& segment = graph.segments[call.segment];
    if (segment.begin >= end) {
      break;
    }
    const auto block = program.blocks.find(segment.path());
    if (block == program.blocks.end()) {
      detail::run_nodes(graph, segment.begin, std::min(segment.end, end), frame,
                        {call.device, call.training});
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
  return call;
}

const std::vector<ExportedInput>& ExportedModuleImpl::inputs() const { return mode().inputs; }
const std::vector<std::string>& ExportedModuleImpl::outputs() const { return mode().outputs; }

std::string ExportedModuleImpl::output_layer(const std::string& output) const {
  return detail::output_module(*programs_[0], output);
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
  return ExportedModule(
      std::make_shared<ExportedModuleImpl>(*detail::read_exported_file(path), options));
}

} // namespace hasten
