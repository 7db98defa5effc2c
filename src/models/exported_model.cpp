#include "exported_model.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "encoder.h"
#include "exported/program_file.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/exported/exported_module.h"
#include "hasten/models/model_family.h"
#include "lora_layer.h"

namespace hasten::detail {

namespace fs = std::filesystem;

static constexpr const char* kExportedModelWhere = "models::exported";
static constexpr const char* kGraphFile = "model.pt2";

/// The graph computes the logits. Its parameters are this module's, under the same names.
class ExportedModel final : public PreTrainedModelImpl {
 public:
  /// `labels`: of the graph, for a task with labels.
  ExportedModel(const ProgramFile& file, const PreTrainedConfig& config, ModelTask task,
                int64_t labels)
      : PreTrainedModelImpl(config, task),
        module_(
            std::make_shared<ExportedModuleImpl>(file, ExportedModuleOptions{.weights = false})),
        output_(module_->output_layer("logits")) {
    if (!module_->parameters(false).empty() ||
        std::ranges::count(module_->outputs(), "logits") == 0) {
      throw InputError(kExportedModelWhere, "outputs " + joined(module_->outputs()),
                       "a model with logits, exported by hasten export");
    }
    for (const auto& child : module_->named_children()) {
      register_module(child.key(), child.value());
    }
    const bool has_labels =
        task == ModelTask::sequence_classification || task == ModelTask::token_classification;
    if (has_labels && output_.empty() && labels != config.num_labels()) {
      throw InputError(kExportedModelWhere, std::to_string(config.num_labels()) + " labels",
                       std::to_string(labels) +
                           ", because the last operator of the graph is no linear layer that could "
                           "be made anew",
                       "export the model with --num-labels " + std::to_string(config.num_labels()));
    }
    for (auto& parameter : named_parameters()) {
      const std::string& name = parameter.key();
      if (has_labels && !output_.empty() && name.substr(0, name.rfind('.')) == output_) {
        std::vector<int64_t> sizes = parameter.value().sizes().vec();
        sizes[0] = this->config().num_labels(); // the folder's, or new ones
        parameter.value().set_data(at::empty(sizes, parameter.value().options()));
      }
    }
  }

  at::Tensor logits(const ModelInputs& inputs) override {
    if (inputs.logits_to_keep > 0) {
      if (const auto layer = module_->forward_to_output_layer(named(inputs), "logits")) {
        const at::Tensor last =
            layer->input.narrow(1, -inputs.logits_to_keep, inputs.logits_to_keep);
        return product_of({}, last, layer->weight, layer->bias);
      }
    }
    const at::Tensor all = module_->forward(named(inputs)).at("logits");
    return inputs.logits_to_keep > 0 ? all.narrow(1, -inputs.logits_to_keep, inputs.logits_to_keep)
                                     : all;
  }

  LinearCrossEntropy next_token_loss(const ModelInputs& inputs, const at::Tensor& labels) override {
    const auto layer = module_->forward_to_output_layer(named(inputs), "logits");
    if (!layer) {
      return PreTrainedModelImpl::next_token_loss(inputs, labels);
    }
    if (layer->bias.defined() || lora_mark(layer->weight)) {
      return loss_of_tokens(product_of({}, layer->input, layer->weight, layer->bias), labels);
    }
    return linear_cross_entropy(layer->input, layer->weight, labels);
  }

  bool supports_packing() override;

  std::string output_layer() const override { return output_; }
  void save_program(const fs::path& folder) const override { module_->save_graph(folder); }

 private:
  NamedTensors named(const ModelInputs& inputs) {
    if (module_->is_training() != is_training()) {
      module_->train(is_training());
    }
    NamedTensors values;
    for (const ExportedInput& input : module_->inputs()) {
      values[input.name] = value_of(input.name, inputs);
    }
    return values;
  }

  /// 0, 1, … in each text. Padding stands apart, because its places do not rise.
  static at::Tensor positions(const ModelInputs& inputs) {
    if (inputs.position_ids.defined() || !inputs.attention_mask.defined()) {
      return inputs.position_ids.defined()
                 ? inputs.position_ids
                 : at::arange(inputs.input_ids.size(1), inputs.input_ids.options())
                       .expand_as(inputs.input_ids);
    }
    const at::Tensor mask = inputs.attention_mask.to(at::kLong);
    return (mask.cumsum(1) - 1) * mask;
  }

  static at::Tensor value_of(const std::string& name, const ModelInputs& inputs) {
    if (name == "input_ids") {
      return inputs.input_ids;
    }
    if (name == "attention_mask") {
      return inputs.attention_mask.defined() ? inputs.attention_mask.to(at::kLong)
                                             : at::ones_like(inputs.input_ids);
    }
    if (name == "token_type_ids") {
      return inputs.token_type_ids.defined() ? inputs.token_type_ids
                                             : at::zeros_like(inputs.input_ids);
    }
    if (name == "position_ids") {
      return positions(inputs);
    }
    throw InputError(kExportedModelWhere, "the graph takes " + name,
                     "input_ids, attention_mask, token_type_ids and position_ids",
                     "export the model by hasten export");
  }

  ExportedModule module_;
  const std::string output_;
};

// Each text of a row has the logits that it has alone, whatever the other is.
bool ExportedModel::supports_packing() {
  const auto& taken = module_->inputs();
  if (std::ranges::count(taken, "position_ids", &ExportedInput::name) == 0) {
    return false;
  }
  const c10::InferenceMode no_grad;
  const bool training = is_training();
  eval();
  const auto restore = c10::make_scope_exit([&] { train(training); });
  constexpr int64_t kTokens = 4;
  const at::Device device = parameters()[0].device();
  const at::Tensor ids = at::arange(3 * kTokens, at::TensorOptions(at::kLong).device(device))
                             .remainder(config().vocab_size)
                             .view({3, 1, kTokens});
  const at::Tensor places = at::arange(kTokens, ids.options()).unsqueeze(0);
  const auto together = [&](int64_t first, int64_t second) {
    return logits({.input_ids = at::cat({ids[first], ids[second]}, 1),
                   .position_ids = at::cat({places, places}, 1)});
  };
  const auto equal = [](const at::Tensor& a, const at::Tensor& b) {
    return at::allclose(a, b, 1e-4, 1e-4 * b.abs().max().item<double>());
  };
  const at::Tensor both = together(0, 1);
  return equal(both.narrow(1, 0, kTokens), logits({.input_ids = ids[0]})) &&
         equal(both.narrow(1, kTokens, kTokens), logits({.input_ids = ids[1]})) &&
         equal(both.narrow(1, kTokens, kTokens), together(2, 1).narrow(1, kTokens, kTokens)) &&
         equal(both.narrow(1, 0, kTokens), together(0, 2).narrow(1, 0, kTokens));
}

bool is_exported_folder(const fs::path& folder) {
  std::error_code ignored;
  return fs::is_regular_file(folder / kGraphFile, ignored);
}

/// The class of the folder, "DebertaV2ForSequenceClassification" or "GPT2LMHeadModel", "DebertaV2", and
/// the task.
struct ExportedClass {
  std::string name{};
  std::string prefix{};
  ModelTask task{};
};

static ExportedClass class_of(const fs::path& folder, const nlohmann::json& config) {
  const nlohmann::json classes = config.value("architectures", nlohmann::json::array());
  const std::string name = classes.is_array() && !classes.empty() && classes[0].is_string()
                               ? classes[0].get<std::string>()
                               : "";
  for (const auto& [ending, task] :
       {std::pair("ForSequenceClassification", ModelTask::sequence_classification),
        std::pair("ForTokenClassification", ModelTask::token_classification),
        std::pair("ForMaskedLM", ModelTask::masked_lm),
        std::pair("ForCausalLM", ModelTask::causal_lm),
        std::pair("LMHeadModel", ModelTask::causal_lm)}) {
    if (name.size() > std::string_view(ending).size() && name.ends_with(ending)) {
      return {name, name.substr(0, name.size() - std::string_view(ending).size()), task};
    }
  }
  throw InputError(kExportedModelWhere,
                   (folder / "config.json").string() + ": architectures=" + classes.dump(),
                   "a class …ForSequenceClassification, …ForTokenClassification, …ForMaskedLM, "
                   "…ForCausalLM or …LMHeadModel",
                   "export the model by hasten export --task");
}

/// The projections of query and value, by the names that PEFT adapts in most families. Empty: none.
static std::vector<std::string> query_and_value(const ProgramFile& file) {
  for (const auto& names : std::vector<std::vector<std::string>>{{"q_proj", "v_proj"},
                                                                 {"query", "value"},
                                                                 {"query_proj", "value_proj"},
                                                                 {"q_lin", "v_lin"},
                                                                 {"query_key_value"},
                                                                 {"qkv_proj"},
                                                                 {"c_attn"},
                                                                 {"Wqkv"},
                                                                 {"in_proj"},
                                                                 {"q", "v"}}) {
    const auto has = [&](const std::string& name) {
      return std::ranges::any_of(file.weights, [&](const auto& weight) {
        return weight.first.ends_with("." + name + ".weight");
      });
    };
    if (std::ranges::all_of(names, has)) {
      return names;
    }
  }
  return {};
}

/// The name that the model has for a tied weight's other names.
static std::function<std::string(const std::string&)> first_names(const torch::nn::Module& module,
                                                                  const ProgramFile& file) {
  std::map<std::string, std::string> registered; // by place
  for (const std::string& name : module.named_parameters().keys()) {
    registered.emplace(file.weights.at(name).place, name);
  }
  std::map<std::string, std::string> names;
  for (const auto& [name, meta] : file.weights) {
    if (const auto first = registered.find(meta.place); first != registered.end()) {
      names.emplace(name, first->second);
    }
  }
  return [names](const std::string& name) {
    const auto found = names.find(name);
    return found == names.end() ? name : found->second;
  };
}

/// The submodule with most of the parameters: "deberta".
static std::string base_of(const torch::nn::Module& module) {
  std::string base;
  int64_t most = -1;
  for (const auto& child : module.named_children()) {
    int64_t count = 0;
    for (const at::Tensor& parameter : child.value()->parameters()) {
      count += parameter.numel();
    }
    if (count > most) {
      most = count;
      base = child.key();
    }
  }
  return base;
}

void register_exported_family(const fs::path& folder, const nlohmann::json& config) {
  const nlohmann::json name = config.value("model_type", nlohmann::json());
  const std::string type = name.is_string() ? name.get<std::string>() : "";
  if (const ModelFamily* known = find_model_family(type)) {
    const fs::path& other = known->program;
    if (!other.empty() && other != folder &&
        read_exported_file(other)->programs != read_exported_file(folder)->programs) {
      throw InputError(kExportedModelWhere,
                       folder.string() + ": model_type=" + type + " is that of " + other.string(),
                       "one graph for each model_type in a process");
    }
    return;
  }
  const auto [class_name, prefix, task] = class_of(folder, config);
  const auto file = read_exported_file(folder); // here, because a rehearsal has no memory to read
  const ExportedModuleImpl module(*file, {.weights = false});
  const nlohmann::json two = {0, 1}; // transformers' default
  ModelFamily family{.model_type = type,
                     .class_prefix = prefix,
                     .class_names = {{task, class_name}},
                     .base_model_prefix = base_of(module),
                     .tasks = {task},
                     .make = [file, labels = std::ssize(config.value("id2label", two))](
                                 const PreTrainedConfig& options,
                                 ModelTask of) -> std::shared_ptr<PreTrainedModelImpl> {
                       return std::make_shared<ExportedModel>(*file, options, of, labels);
                     },
                     .lora_target_modules = query_and_value(*file),
                     .current_name = first_names(module, *file),
                     .program = folder};
  // The graph has what config.json says. hasten reads these fields alone, if they are there.
  family.defaults.pad_token_id = -1;
  family.defaults.max_position_embeddings = 1'000'000;
  for (const char* field :
       {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "intermediate_size", "max_position_embeddings", "type_vocab_size", "pad_token_id",
        "hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range",
        "layer_norm_eps", "classifier_dropout"}) {
    const bool size = std::string_view(field) == "vocab_size" ||
                      std::string_view(field) == "hidden_size" ||
                      std::string_view(field) == "num_hidden_layers" ||
                      std::string_view(field) == "max_position_embeddings" ||
                      std::string_view(field) == "pad_token_id";
    if (!size || !config.contains(field) || !config[field].is_number_integer()) {
      family.attribute_map[field] = "";
    }
  }
  register_model_family(std::move(family));
}

} // namespace hasten::detail
