// Reads a Hugging Face folder, computes the logits of a batch and saves the model again, for
// tools/check_families.py, which compares both with transformers.
//   model_logits FOLDER SequenceClassification|TokenClassification|MaskedLM|CausalLM INPUTS OUT
// INPUTS is a safetensors file with input_ids and attention_mask. OUT is a folder: it gets the model,
// and the logits as logits.safetensors. Prints the seconds of the forward.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <filesystem>

#include "hasten/base/exit_code.h"
#include "hasten/io/safetensors.h"
#include "hasten/models/auto_model.h"
#include "hasten/models/lora.h"

namespace hasten {

static int write_logits(const std::string& folder, const std::string& wanted,
                        const std::string& inputs, const std::filesystem::path& out) {
  std::optional<ModelTask> task;
  for (const ModelTask each : {ModelTask::sequence_classification, ModelTask::token_classification,
                               ModelTask::masked_lm, ModelTask::causal_lm}) {
    if (task_name(each) == wanted) {
      task = each;
    }
  }
  if (!task) {
    std::fprintf(stderr, "no task %s\n", wanted.c_str());
    return 2;
  }
  PreTrainedModel model = model_from_pretrained(folder, *task);
  for (const std::string& line : model->loading_info().report) {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
  model->eval();
  const torch::NoGradGuard no_grad;
  const NamedTensors batch = SafetensorsReader(inputs).read_all();
  const auto start = std::chrono::steady_clock::now();
  const at::Tensor logits =
      model->forward({batch.at("input_ids"), batch.at("attention_mask")}).logits;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::filesystem::create_directories(out);
  if (LoraConfig::is_adapter(folder)) {
    save_adapter(*model, LoraConfig::from_pretrained(folder), out);
  } else {
    model->save_pretrained(out);
  }
  write_safetensors(out / "logits.safetensors", {{"logits", logits}});
  std::printf("%.3f\n", seconds.count());
  return 0;
}

} // namespace hasten

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: model_logits FOLDER TASK INPUTS OUT\n");
    return 2;
  }
  return hasten::record([&] { return hasten::write_logits(argv[1], argv[2], argv[3], argv[4]); });
}
