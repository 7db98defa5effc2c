// A module that PyTorch's torch.export wrote, as a torch::nn::Module: any model that Python can
// export trains here, without Python.
//
//   auto net = hasten::ExportedModule::load("resnet.pt2");
//   auto logits = net->forward({{"x", images}}).at("logits");
//
// In Python, once, with sizes that may change named by Dim.DYNAMIC:
//
//   program = torch.export.export(model.train(), (), {"x": images}, dynamic_shapes={"x": {0: Dim.DYNAMIC}})
//   torch.export.save(program, "resnet.pt2")
//
// The file is a graph of ATen operators, and weights. The operators are called one after the other
// through LibTorch's dispatcher, so autograd, autocast and devices work as for a module in C++, and
// with equal inputs results and gradients have the bits of Python's. It has time and memory of Python without
// compilation: a value is freed after its last use.
//
// The file is untrusted input. On the CPU an operator that asks for more memory than the host has left
// (host_memory.h), or makes a list of more than a million tensors, is an InputError that names it. forward()
// installs the memory meter (memory.h) and limits it.
//
// Parameters and buffers have their names in Python. As in Python's parameters(), a tied one is there once,
// under its first name, so an optimizer steps it once.
// Modes: a program that was exported in training mode serves both modes. In evaluation, dropout,
// batch_norm and scaled_dot_product_attention are called with their flag off, and operators that
// write a buffer do not run. A model whose own code asks for the mode needs two programs in the file,
// "train" and "eval": package_pt2(path, exported_programs={"train": a, "eval": b}).
// Blocks: consecutive operators of one numbered submodule (encoder.layer.0) run as one call of
// call_block, so they are units of FSDP and of activation checkpointing.
// Threading: one thread per module, as for torch::nn::Module.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hasten/core/stateful.h"
#include "hasten/parallel/sync_batch_norm.h"

namespace hasten {

/// An input of an exported module.
struct ExportedInput {
  std::string name{};
  at::ScalarType dtype = at::kFloat;
  /// Each size: a number where the export fixed it, else the name of what it stands for. Sizes of one
  /// name are equal in a call.
  std::vector<std::string> sizes{};
};

/// The linear layer that computes an output.
struct ExportedOutputLayer {
  at::Tensor input{}; // [..., in]
  at::Tensor weight{}; // [out, in]
  at::Tensor bias{}; // [out]; undefined: none
};

struct ExportedModuleOptions {
  /// Whether numbered submodules are called as blocks. Without blocks, FSDP gathers the whole module,
  /// and activation checkpointing finds nothing to recompute. Costs nothing.
  bool blocks = true;
  /// Whether hasten's operators run instead of torch's where they are quicker: fast_linear (linear.h) for
  /// linear, and for addmm of a weight as GPT-2 has it. False: the bits of Python. Costs nothing.
  bool substitutions = true;
  /// False: parameters have no values, for a caller that reads them. Buffers have their values.
  bool weights = true;
};

namespace detail {

class GraphFrame;
struct ExportedProgram;
struct ProgramFile;

/// The file, or the folder's model.pt2, for several modules. If the folder has weights, those of the file are not read.
std::shared_ptr<const ProgramFile> read_exported_file(const std::filesystem::path& path);

/// Runs one segment of a program's graph.
struct ExportedCall {
  std::shared_ptr<const ExportedProgram> program{};
  std::shared_ptr<const torch::nn::Module> root{}; // alive until a recomputation in backward
  size_t segment = 0;
  at::Device device = at::kCPU;
  bool training = true;
};

/// A submodule: parameters, buffers and, if it is a block, a segment of the graph.
class ExportedPart : public torch::nn::Module, public CallsBatchNorm {
 public:
  /// What operators do with its tensors `weight` and `bias`. conv1d: linear with a weight [in, out].
  enum class Layer { other, linear, conv1d, batch_norm };
  /// linear(x, weight, bias). `parameter`: the module's, of which weight may be the transpose.
  using Product = at::Tensor (*)(const at::Tensor& x, const at::Tensor& weight,
                                 const at::Tensor& bias, const at::Tensor& parameter);

  struct Values {
    std::vector<at::Tensor> tensors{};
    std::vector<c10::IValue> numbers{}; // sizes
    template <typename Visit>
    friend void flatten(Visit& visit, Values& values) {
      visit(values.tensors);
    }
  };

  ExportedPart() : torch::nn::Module("ExportedPart") {}
  Values forward(Values inputs, const ExportedCall& call);
  /// The parameter or buffer that is now in this place.
  const at::Tensor& leaf(bool buffer, size_t index) const;
  /// Register a tensor and return its place.
  size_t add_buffer(const std::string& name, const at::Tensor& buffer);
  size_t add_parameter(const std::string& name, const at::Tensor& parameter, bool requires_grad);
  using torch::nn::Module::to;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;

  void set_layer(Layer layer, std::string settings);
  Layer layer() const { return layer_; }
  /// Its own tensor; undefined if it has none of that name.
  at::Tensor tensor(const std::string& name) const;
  /// Replaces the products of a linear or conv1d layer. Null: fast_linear.
  void set_product(Product product) { product_ = product; }
  at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) const;
  at::Tensor batch_norm_identity() const override;
  std::string batch_norm_settings() const override { return settings_; }

 private:
  std::vector<at::Tensor> buffers_in_order_{}; // the registered ones
  Layer layer_ = Layer::other;
  std::string settings_{};
  Product product_ = nullptr;
};

} // namespace detail

class ExportedModuleImpl : public detail::ExportedPart {
 public:
  /// Called by ExportedModule::load().
  ExportedModuleImpl(const detail::ProgramFile& file, const ExportedModuleOptions& options);

  /// The outputs by name: keys of a dictionary or of a dataclass; "0", "1" … of a tuple; "output" for a
  /// single tensor; "hidden_states.0" inside another. Outputs that are None are left out.
  /// Throws InputError that names the input and the signature for an input that is missing or
  /// unknown, and for a dtype or a size that was not exported. Errors of operators name the operator, its
  /// module and the line of Python.
  NamedTensors forward(const NamedTensors& inputs);
  /// The same with inputs in the order of inputs().
  NamedTensors forward(const std::vector<at::Tensor>& inputs);

  /// forward() up to the linear layer that computes this output, for a loss that needs no logits in
  /// memory (linear_cross_entropy.h). None if another operator computes it. Throws as forward() does.
  std::optional<ExportedOutputLayer> forward_to_output_layer(const NamedTensors& inputs,
                                                             const std::string& output);

  /// The inputs of the mode, in the order of Python's forward.
  const std::vector<ExportedInput>& inputs() const;
  /// The module whose linear layer computes this output, or rows of which are chosen for it: "classifier".
  /// Empty if another operator computes it.
  std::string output_layer(const std::string& output) const;
  /// Names of the outputs.
  const std::vector<std::string>& outputs() const;
  /// "x: Float [s77, 3, 32, 32]", one line for each input, then one for the outputs and one for the blocks.
  std::string describe() const;
  /// Names of the submodules that are called as blocks, in the order of their first call.
  std::vector<std::string> block_names() const;
  /// Parameters that no output depends on with gradients. They do not require gradients, so DDP needs no
  /// find_unused_parameters.
  const std::vector<std::string>& unused_parameters() const { return unused_; }

  /// Writes model.pt2, without weights, and model.safetensors into an existing folder. load() reads the
  /// folder, and Hugging Face reads the weights. Local: call it on one rank. Throws Error with path and reason.
  void save(const std::filesystem::path& folder) const;
  /// Writes model.pt2 alone. Accelerator::save_model() writes the weights of a sharded module.
  void save_graph(const std::filesystem::path& folder) const;

 private:
  void build(const detail::ProgramFile& file, const ExportedModuleOptions& options);
  const detail::ExportedProgram& mode() const;
  /// Checks the inputs and puts them into a frame.
  detail::GraphFrame frame_of(const std::vector<at::Tensor>& inputs) const;
  std::vector<at::Tensor> in_order(const NamedTensors& inputs) const;
  /// Runs the nodes before `end`, and returns the call.
  detail::ExportedCall run(size_t end, detail::GraphFrame& frame);

  std::filesystem::path file_;
  /// One program, or those of training and evaluation.
  std::vector<std::shared_ptr<const detail::ExportedProgram>> programs_{};
  std::vector<std::string> unused_{};
};

class ExportedModule : public torch::nn::ModuleHolder<ExportedModuleImpl> {
 public:
  using torch::nn::ModuleHolder<ExportedModuleImpl>::ModuleHolder;

  /// Reads a file of torch.export.save() or package_pt2(), or a folder with such a file, model.pt2, and
  /// model.safetensors or its index. Weights of the folder come before those of the file. A linear layer
  /// that computes an output may have another number of rows there: labels of a fine-tuned model. Local.
  /// In deferred_init() weights are read where they are needed, so each rank of FSDP reads its part.
  /// Memory: the weights.
  /// Throws InputError if a file is missing or damaged, was written by another major version of the format,
  /// has an operator that this LibTorch lacks or that hasten does not allow, or a weight is missing or has
  /// another shape.
  static ExportedModule load(const std::filesystem::path& path,
                             const ExportedModuleOptions& options = {});
};

} // namespace hasten
