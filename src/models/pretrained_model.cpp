#include "hasten/models/pretrained_model.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "base/known_keys.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/io/safetensors.h"
#include "hasten/models/auto_model.h"
#include "hasten/models/key_value_cache.h"
#include "hasten/models/model_family.h"
#include "hasten/parallel/fully_shard.h"

namespace hasten {

PreTrainedModelImpl::PreTrainedModelImpl(PreTrainedConfig config, ModelTask task)
    : config_(std::move(config)), task_(task) {
  config_.validate();
  config_.architectures = {model_family(config_.model_type).class_name(task)};
}

void PreTrainedModelImpl::check_inputs(const ModelInputs& inputs) const {
  const int64_t past = inputs.past_key_values ? inputs.past_key_values->length() : 0;
  if (!inputs.input_ids.defined() || inputs.input_ids.dim() != 2 ||
      past + inputs.input_ids.size(1) > config_.max_tokens()) {
    throw InputError("models::PreTrainedModel",
                     "input_ids=" + (inputs.input_ids.defined() ? c10::str(inputs.input_ids.sizes())
                                                                : std::string("undefined")),
                     "[samples, tokens] of at most max_tokens=" +
                         std::to_string(config_.max_tokens()) + " tokens",
                     "truncate the texts (max_length)");
  }
}

LinearCrossEntropy PreTrainedModelImpl::causal_loss(const ModelInputs& inputs) {
  check_inputs(inputs);
  if (task_ != ModelTask::causal_lm || !inputs.labels.defined() ||
      inputs.labels.sizes() != inputs.input_ids.sizes() || inputs.past_key_values) {
    throw InputError(
        "models::causal_loss",
        std::string("task=") + std::string(task_name(task_)) + ", labels=" +
            (inputs.labels.defined() ? c10::str(inputs.labels.sizes()) : std::string("undefined")),
        "task=CausalLM, labels of the shape of input_ids, no past_key_values");
  }
  return next_token_loss(inputs, shifted_labels(inputs.labels));
}

LinearCrossEntropy PreTrainedModelImpl::next_token_loss(const ModelInputs& inputs,
                                                        const at::Tensor& labels) {
  return loss_of_tokens(logits(inputs), labels);
}

LinearCrossEntropy PreTrainedModelImpl::loss_of_tokens(const at::Tensor& logits,
                                                       const at::Tensor& labels) {
  const at::Tensor scores = logits.to(at::kFloat);
  const at::Tensor losses =
      at::cross_entropy_loss(scores.flatten(0, 1), labels.flatten(), {}, at::Reduction::None);
  return {.loss_sum = losses.sum(), .token_losses = losses.detach().view(labels.sizes())};
}

ModelOutput PreTrainedModelImpl::forward(const ModelInputs& inputs) {
  check_inputs(inputs);
  ModelOutput output;
  output.logits = logits(inputs);
  if (inputs.labels.defined()) {
    output.loss = loss_of(output.logits, inputs.labels);
  }
  return output;
}

at::Tensor PreTrainedModelImpl::loss_of(const at::Tensor& logits, const at::Tensor& labels) const {
  if (task_ == ModelTask::causal_lm) { // a token's label is that of the next
    return at::cross_entropy_loss(logits.slice(1, 0, -1).flatten(0, 1),
                                  labels.slice(1, 1).flatten());
  }
  if (task_ != ModelTask::sequence_classification) {
    return at::cross_entropy_loss(logits.flatten(0, 1), labels.flatten());
  }
  std::string type = config_.problem_type;
  if (type.empty()) {
    type = config_.num_labels() == 1                         ? "regression"
           : at::isIntegralType(labels.scalar_type(), false) ? "single_label_classification"
                                                             : "multi_label_classification";
  }
  if (type == "single_label_classification") {
    return at::cross_entropy_loss(logits, labels.flatten());
  }
  const at::Tensor numbers = labels.to(logits.scalar_type());
  if (type == "multi_label_classification") {
    return at::binary_cross_entropy_with_logits(logits, numbers);
  }
  if (type != "regression") {
    throw InputError("models::PreTrainedModel", "problem_type=" + type.substr(0, 80),
                     "regression, single_label_classification or multi_label_classification");
  }
  return at::mse_loss(logits, numbers.view_as(logits));
}

void PreTrainedModelImpl::init_weight(const std::string& name, const at::Tensor& weight) {
  if (weight.dim() > 1) {
    weight.normal_(0, config_.initializer_range);
  } else {
    weight.fill_(name.ends_with("bias") ? 0 : 1);
  }
}

void PreTrainedModelImpl::untie_weights() {
  const TiedWeight tied = tied_weight();
  if (tied.output.empty()) {
    return;
  }
  const at::Tensor shared = named_parameters()[tied.embeddings];
  at::Tensor own = make_output_weight();
  if (!own.defined()) {
    throw InputError("models::PreTrainedModel", tied.output + " has other values",
                     "those of " + tied.embeddings + ", because " + joined(config_.architectures) +
                         " uses them in its output layer");
  }
  const at::NoGradGuard no_grad;
  own.set_data(shared.detach().clone());
  own.requires_grad_(shared.requires_grad());
  auto options = parse_json("models::PreTrainedModel", "other_keys", config_.other_keys);
  options["tie_word_embeddings"] = false;
  config_.other_keys = options.dump();
}

void PreTrainedModelImpl::init_weights() {
  const at::NoGradGuard no_grad;
  for (const auto& parameter : named_parameters()) {
    init_weight(parameter.key(), parameter.value());
  }
}

void PreTrainedModelImpl::save_pretrained(const std::filesystem::path& folder) const {
  NamedTensors weights;
  for (const auto& parameter : named_parameters()) {
    weights[parameter.key()] = parameter.value().detach();
  }
  write_file_atomically(folder / "config.json", config_.to_json().dump(2) + "\n");
  if (!generation_config_.empty()) {
    write_file_atomically(folder / "generation_config.json", generation_config_);
  }
  save_program(folder);
  write_safetensors(folder / "model.safetensors", weights);
}

void PreTrainedModelImpl::gradient_checkpointing_enable(
    const GradientCheckpointingOptions& options) {
  hasten::gradient_checkpointing_enable(shared_from_this(), options);
}

void PreTrainedModelImpl::gradient_checkpointing_disable() {
  hasten::gradient_checkpointing_disable(shared_from_this());
}

std::vector<std::shared_ptr<torch::nn::Module>> PreTrainedModelImpl::blocks() const {
  return repeated_blocks(*this);
}

PreTrainedModel model_from_config(const PreTrainedConfig& config, ModelTask task, bool initialize) {
  const ModelFamily& family = model_family(config.model_type);
  if (std::ranges::find(family.tasks, task) == family.tasks.end()) {
    throw InputError(
        "models::AutoModel", config.model_type + " has no head for " + std::string(task_name(task)),
        "one for " + joined(mapped(family.tasks,
                                   [](ModelTask each) { return std::string(task_name(each)); })));
  }
  const auto options = parse_json("models::AutoModel", "other_keys", config.other_keys);
  if (family.program.empty()) { // a graph has what config.json says
    detail::check_known_keys("models::pretrained", "config.json", "config.json",
                             config.model_type + ":" + std::string(task_name(task)), options);
  }
  PreTrainedModel model(family.make(config, task));
  if (initialize) {
    model->init_weights();
  }
  return model;
}

} // namespace hasten
