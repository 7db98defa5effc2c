// LoRA (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models") with the names, rules and
// files of PEFT. An adapted layer computes
//
//   W x + b + scaling * B A dropout(x)      A [r, in], B [out, r], scaling = lora_alpha / r
//
// and W stays as it is. B is 0 at first, so the model starts with the results of its base.
//
//   const hasten::LoraConfig config = hasten::get_peft_model(model, {.r = 8, .lora_alpha = 16});
//   … train …
//   hasten::save_adapter(*model, config, folder); // a few megabytes, which PEFT can load
//
// Any torch::nn::Linear or Embedding of any module can be adapted, in place: its A and B become the child
// modules `lora_A` and `lora_B` of the layer, or `lora_embedding_A` and `lora_embedding_B`, so optimizers, DDP,
// FSDP, Local SGD and checkpoints see them like other parameters. The layer is known by its weight (the
// TensorImpl, which set_data, to() and FSDP keep). The first adaptation registers kernels of linear,
// matmul, addmm and embedding for the CPU and CUDA, also under autocast and in inference mode; other layers continue to torch's own. Models of this
// library are adapted on every device. A module that reads the weight by another operator, or a copy of
// it by clone(), computes without the adapter. Cost of a layer: 2 r (in + out) operations for each row; memory (in + out) r
// elements.
// All functions are local. Call them in the same way on all ranks, before the model is prepared,
// unless a function says otherwise.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace hasten {

/// PEFT's LoraConfig.
struct LoraConfig {
  /// Rank of the update, at least 1.
  int64_t r = 8;
  double lora_alpha = 8;
  /// Of the input of A, in training mode; from 0 to below 1. Drawn like the models' dropout.
  double lora_dropout = 0;
  /// Names of linear layers and embeddings, or ends of names after a dot ("q_proj"); not of embeddings of
  /// exported programs. {"all-linear"}: all linear layers but the head. Empty: PEFT's choice for the
  /// model's type: query and value, q_proj and v_proj, or c_attn.
  std::vector<std::string> target_modules{};
  /// Layers that target_modules names but that are not adapted, by the same rule.
  std::vector<std::string> exclude_modules{};
  /// Numbers of the blocks whose layers are adapted: the first number in a layer's name. Empty: all. It
  /// does not change layers that target_modules names in full.
  std::vector<int64_t> layers_to_transform{};
  /// Modules that are trained whole and saved with the adapter, by the same rule. Models for sequences
  /// or tokens add their `classifier` or `score`.
  std::vector<std::string> modules_to_save{};
  /// Other values of r and lora_alpha, by regular expressions (std::regex) of names or of ends of names
  /// after a dot. The first that matches counts, in the order of the text, as in PEFT's files. One that matches
  /// no layer does nothing.
  std::map<std::string, int64_t> rank_pattern{};
  std::map<std::string, double> alpha_pattern{};
  /// Biases that are trained and saved: "none", "all", or "lora_only" (of adapted layers).
  std::string bias = "none";
  /// scaling = lora_alpha / sqrt(r) (Kalajdzievski 2023).
  bool use_rslora = false;
  /// DoRA (Liu et al. 2024): the length of each row of W + scaling * B A is trained apart, as
  /// `lora_magnitude_vector` [out]. A forward takes r in out operations and 2 in out elements more, and
  /// cast_frozen_weights() leaves such layers as they are.
  bool use_dora = false;
  /// The weights of the adapted layers are [in, out], as in GPT-2. get_peft_model() sets it.
  bool fan_in_fan_out = false;
  /// Where the frozen weights come from. Not read by get_peft_model().
  std::string base_model_name_or_path{};
  /// SEQ_CLS, TOKEN_CLS or CAUSAL_LM. get_peft_model() sets it for models of this library.
  std::string task_type{};

  /// Throws InputError that names the value that is out of range.
  void validate() const;
  /// The rank of the layer of this name, and its scaling.
  int64_t rank(const std::string& module) const;
  double scaling(const std::string& module) const;
  /// Reads a folder's adapter_config.json. Throws InputError for a file that is missing or damaged,
  /// a peft_type other than LORA, or an option that changes the computation and that this struct
  /// does not have.
  static LoraConfig from_pretrained(const std::filesystem::path& folder);
  /// Its base_model_name_or_path. Throws InputError if it is empty, no model that is there
  /// (hasten/text/pretrained_folder.h), or an adapter itself.
  static std::string base_of(const std::filesystem::path& folder);
  /// Whether a folder has an adapter_config.json.
  static bool is_adapter(const std::filesystem::path& folder);
};

/// Adapts the layers that the configuration names and freezes all other parameters, but for those of
/// modules_to_save. A is drawn from uniform(-1 / sqrt(in), 1 / sqrt(in)) by torch's default generator,
/// fp32. Returns the configuration with what was chosen, for save_adapter().
/// If the word embeddings share the weight of the output layer, and one of them is named, they get a weight each.
/// Throws InputError if a name matches no module or one that is neither linear nor an embedding, all
/// layers are left out, the model has an adapter, or its weights were made in inference mode.
LoraConfig get_peft_model(const std::shared_ptr<torch::nn::Module>& model, LoraConfig config);

/// Writes adapter_config.json and adapter_model.safetensors, fp32, with PEFT's names, into an existing
/// folder. Call it where the parameters are whole (ModelFiles::save, summon_full_params).
/// Throws InputError if the model has no adapter or is merged; Error with path and reason.
void save_adapter(const torch::nn::Module& model, const LoraConfig& config,
                  const std::filesystem::path& folder);

/// Reads such a folder, of PEFT or of this library. Adapts the model first if it has no adapter.
/// Throws InputError if names or shapes differ from the model's, before anything is changed but for
/// the adaptation.
LoraConfig load_adapter(const std::shared_ptr<torch::nn::Module>& model,
                        const std::filesystem::path& folder);

/// Adds scaling * B A to the weights, and gives them DoRA's lengths. They then give the same results without
/// the additional products; unmerge_adapter() takes it out again (equal but for rounding). Both do nothing if the
/// weights are already in that state. Throws InputError without an adapter, or if the weights are
/// shards.
void merge_adapter(torch::nn::Module& model);
void unmerge_adapter(torch::nn::Module& model);
/// Merges and removes the adapter: the model has its base's parameters again, all trainable.
void merge_and_unload(torch::nn::Module& model);

/// Converts the frozen weights and biases of linear layers to bf16 or fp16. Under autocast in that
/// dtype the results stay the same, bit for bit, and they need half the memory.
void cast_frozen_weights(torch::nn::Module& model, at::ScalarType dtype);

/// Elements of the trainable parameters, and of all. Tied ones count once.
std::pair<int64_t, int64_t> get_nb_trainable_parameters(const torch::nn::Module& model);

} // namespace hasten
