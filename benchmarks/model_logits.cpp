// Reads a Hugging Face folder, computes the logits of a batch and saves the model again, for
// tools/check_families.py, which compares both with transformers.
//   model_logits FOLDER SequenceClassification|TokenClassification|MaskedLM|CausalLM INPUTS OUT
// INPUTS is a safetensors file with input_ids and attention_mask. OUT is a folder: it gets the model,
// and the logits as logits.safetensors. Prints the seconds of the forward.
//   model_logits --jobs
// Answers jobs, for tools/check_keys.py: each line of stdin is a JSON object with the job, each line of
// stdout one with its results, or with "error", and what was logged.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/json.h"
#include "hasten/base/log.h"
#include "hasten/io/safetensors.h"
#include "hasten/models/auto_model.h"
#include "hasten/models/generation.h"
#include "hasten/models/lora.h"
#include "hasten/text/tokenizer.h"

namespace hasten {

static ModelTask task_of(const std::string& wanted) {
  for (const ModelTask each : {ModelTask::sequence_classification, ModelTask::token_classification,
                               ModelTask::masked_lm, ModelTask::causal_lm}) {
    if (task_name(each) == wanted) {
      return each;
    }
  }
  throw InputError("model_logits", "task=" + wanted, "SequenceClassification or another task");
}

static void save_model(const PreTrainedModel& model, const std::string& folder,
                       const std::filesystem::path& out) {
  if (LoraConfig::is_adapter(folder)) {
    save_adapter(*model, LoraConfig::from_pretrained(folder), out);
  } else {
    model->save_pretrained(out);
  }
}

static int write_logits(const std::string& folder, const std::string& wanted,
                        const std::string& inputs, const std::filesystem::path& out) {
  PreTrainedModel model = model_from_pretrained(folder, task_of(wanted));
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
  save_model(model, folder, out);
  write_safetensors(out / "logits.safetensors", {{"logits", logits}});
  std::printf("%.3f\n", seconds.count());
  return 0;
}

static nlohmann::json logits_job(const nlohmann::json& job) {
  const std::string folder = job.at("model");
  PreTrainedModel model = model_from_pretrained(folder, task_of(job.at("task")));
  model->eval();
  const torch::NoGradGuard no_grad;
  const NamedTensors batch = SafetensorsReader(std::string(job.at("inputs"))).read_all();
  const at::Tensor logits =
      model->forward({batch.at("input_ids"), batch.at("attention_mask")}).logits;
  write_safetensors(std::string(job.at("output")), {{"logits", logits}});
  if (job.contains("save") && !job.at("save").is_null()) {
    std::filesystem::create_directories(std::string(job.at("save")));
    save_model(model, folder, std::string(job.at("save")));
  }
  return {{"report", model->loading_info().report}};
}

static nlohmann::json encode_job(const nlohmann::json& job) {
  const Tokenizer tokenizer = AutoTokenizer::from_pretrained(std::string(job.at("tokenizer")));
  const auto pairs = job.value("pairs", nlohmann::json());
  nlohmann::json ids = nlohmann::json::array(), types = nlohmann::json::array();
  for (size_t i = 0; i < job.at("texts").size(); ++i) {
    const std::string text = job.at("texts")[i];
    const Encoding encoding =
        pairs.is_array() ? tokenizer.encode(text, std::string(pairs[i])) : tokenizer.encode(text);
    ids.push_back(encoding.ids);
    types.push_back(encoding.token_type_ids);
  }
  return {{"ids", ids}, {"type_ids", types}};
}

static nlohmann::json decode_job(const nlohmann::json& job) {
  const Tokenizer tokenizer = AutoTokenizer::from_pretrained(std::string(job.at("tokenizer")));
  nlohmann::json texts = nlohmann::json::array();
  for (const auto& ids : job.at("ids")) {
    texts.push_back(tokenizer.decode(ids.get<std::vector<int64_t>>()));
  }
  return {{"texts", texts}};
}

static nlohmann::json generate_job(const nlohmann::json& job) {
  const std::string folder = job.at("model");
  GenerationConfig config = GenerationConfig::from_pretrained(folder);
  if (job.contains("max_new_tokens") && !job.at("max_new_tokens").is_null()) {
    config.max_new_tokens = job.at("max_new_tokens");
  }
  PreTrainedModel model = model_from_pretrained(folder, ModelTask::causal_lm);
  return {{"ids", generate(model, job.at("prompts"), config)}};
}

static int answer_jobs() {
  nlohmann::json lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines.push_back(std::string(line)); });
  for (std::string line; std::getline(std::cin, line);) {
    lines = nlohmann::json::array();
    nlohmann::json answer;
    try {
      const nlohmann::json job = parse_json("model_logits", "the job", line);
      const std::string what = job.at("do");
      answer = what == "logits"   ? logits_job(job)
               : what == "encode" ? encode_job(job)
               : what == "decode" ? decode_job(job)
                                  : generate_job(job);
    } catch (const std::exception& error) {
      answer = {{"error", error.what()}};
    }
    answer["log"] = lines;
    std::cout << answer.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << std::endl;
  }
  return 0;
}

} // namespace hasten

int main(int argc, char** argv) {
  if (argc == 2 && std::string_view(argv[1]) == "--jobs") {
    return hasten::record([] { return hasten::answer_jobs(); });
  }
  if (argc != 5) {
    std::fprintf(stderr, "usage: model_logits FOLDER TASK INPUTS OUT | --jobs\n");
    return 2;
  }
  return hasten::record([&] { return hasten::write_logits(argv[1], argv[2], argv[3], argv[4]); });
}
