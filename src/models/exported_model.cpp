#include "exported_model.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "exported/program_file.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/exported/exported_module.h"
#include "hasten/models/model_family.h"

namespace hasten::detail {

namespace fs = std::filesystem;

static constexpr const char* kExportedModelWhere = "models::exported";
static constexpr const char* kGraphFile = "model.pt2";

/// The graph computes the logits. Its parameters are this module's, under the same names.
class ExportedModel final : public PreTrainedModelImpl {
 public:
  ExportedModel(const ProgramFile& file, const PreTrainedConfig& config, ModelTask task)
      : PreTrainedModelImpl(config, task),
        module_(
            std::make_shared<ExportedModuleImpl>(file, ExportedModuleOptions{.weights = false})),
        output_(module_->output_layer("logits")) {
    if (!module_->parameters(false).empty() ||
        std::ranges::count(module_->outputs(), "logits") == 0) {
      throw InputError(kExportedModelWhere, "outputs " + joined(module_->outputs()),
                       "a model with logits, exported by python -m hasten.export");
    }
    for (const auto& child : module_->named_children()) {
      register_module(child.key(), child.value());
    }
    const bool labels =
        task == ModelTask::sequence_classification || task == ModelTask::token_classification;
    for (auto& parameter : named_parameters()) {
      const std::string& name = parameter.key();
      if (labels && !output_.empty() && name.substr(0, name.rfind('.')) == output_) {
        std::vector<int64_t> sizes = parameter.value().sizes().vec();
        sizes[0] = this->config().num_labels(); // the folder's, or new ones
        parameter.value().set_data(at::empty(sizes, parameter.value().options()));
      }
    }
  }

  at::Tensor logits(const ModelInputs& inputs) override {
    if (module_->is_training() != is_training()) {
      module_->train(is_training());
    }
    NamedTensors named;
    for (const ExportedInput& input : module_->inputs()) {
      named[input.name] = value_of(input.name, inputs);
    }
    return module_->forward(named).at("logits");
  }

  std::string output_layer() const override { return output_; }
  void save_program(const fs::path& folder) const override { module_->save_graph(folder); }

 private:
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
    throw InputError(kExportedModelWhere, "the graph takes " + name,
                     "input_ids, attention_mask and token_type_ids",
                     "export the model by python -m hasten.export");
  }

  ExportedModule module_;
  const std::string output_;
};

bool is_exported_folder(const fs::path& folder) {
  std::error_code ignored;
  return fs::is_regular_file(folder / kGraphFile, ignored);
}

/// "DebertaV2" and the task of "DebertaV2ForSequenceClassification".
static std::pair<std::string, ModelTask> class_and_task(const fs::path& folder,
                                                        const nlohmann::json& config) {
  const nlohmann::json classes = config.value("architectures", nlohmann::json::array());
  const std::string name = classes.is_array() && !classes.empty() && classes[0].is_string()
                               ? classes[0].get<std::string>()
                               : "";
  for (const ModelTask task : {ModelTask::sequence_classification, ModelTask::token_classification,
                               ModelTask::masked_lm}) {
    const std::string ending = "For" + std::string(task_name(task));
    if (name.size() > ending.size() && name.ends_with(ending)) {
      return {name.substr(0, name.size() - ending.size()), task};
    }
  }
  throw InputError(kExportedModelWhere,
                   (folder / "config.json").string() + ": architectures=" + classes.dump(),
                   "a class …ForSequenceClassification, …ForTokenClassification or …ForMaskedLM",
                   "export the model by python -m hasten.export --task");
}

/// The submodule with most of the parameters: "deberta".
static std::string base_of(const ProgramFile& file) {
  const ExportedModuleImpl module(file, {.weights = false});
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
        read_exported_file(other, false)->programs != read_exported_file(folder, false)->programs) {
      throw InputError(kExportedModelWhere,
                       folder.string() + ": model_type=" + type + " is that of " + other.string(),
                       "one graph for each model_type in a process");
    }
    return;
  }
  const auto [prefix, task] = class_and_task(folder, config);
  const auto file =
      read_exported_file(folder, false); // here, because a rehearsal has no memory to read
  ModelFamily family{.model_type = type,
                     .class_prefix = prefix,
                     .base_model_prefix = base_of(*file),
                     .tasks = {task},
                     .make = [file](const PreTrainedConfig& options,
                                    ModelTask of) -> std::shared_ptr<PreTrainedModelImpl> {
                       return std::make_shared<ExportedModel>(*file, options, of);
                     },
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
