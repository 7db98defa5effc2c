#include <nlohmann/json.hpp>

#include "classifier.h"
#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/log.h"
#include "hasten/models/auto_model.h"
#include "hasten/tasks/pipelines.h"
#include "hasten/text/pretrained_folder.h"
#include "predictions.h"
#include "run.h"

namespace hasten {

namespace detail {

/// The model's options, with those of the command line.
GenerationConfig generation_config(const GenerateCommand& command) {
  GenerationConfig config = GenerationConfig::from_pretrained(command.model);
  const auto set = [](auto& field, const auto& flag) { field = flag.value_or(field); };
  set(config.max_new_tokens, command.max_new_tokens);
  set(config.temperature, command.temperature);
  set(config.top_k, command.top_k);
  set(config.top_p, command.top_p);
  set(config.repetition_penalty, command.repetition_penalty);
  config.do_sample = config.do_sample || command.do_sample;
  if (!command.stop_strings.empty()) {
    config.stop_strings = command.stop_strings;
  }
  config.seed = command.seed;
  config.use_cache = !command.no_cache;
  config.validate();
  if (!config.do_sample && (command.temperature || command.top_k || command.top_p)) {
    throw InputError("cli::generate",
                     "--temperature, --top-k or --top-p without --do-sample has no effect",
                     "--do-sample, or none of them");
  }
  return config;
}

PreTrainedModel load_generator(const GenerateCommand& command, const Tokenizer& tokenizer) {
  const PreTrainedConfig config = AutoConfig::from_pretrained(command.model);
  if (!config.has_head(ModelTask::causal_lm)) {
    throw InputError(
        "cli::generate",
        command.model + " is a " +
            (config.architectures.empty() ? config.model_type : config.architectures[0]),
        "a causal language model, such as GPT2LMHeadModel or LlamaForCausalLM",
        "train one with hasten train --task text-generation");
  }
  PreTrainedModel model = model_from_pretrained(command.model, ModelTask::causal_lm);
  check_vocabulary(command.model, model->config(), tokenizer);
  if (!model->supports_cache()) {
    log_info(command.model +
             " is a graph without a cache: each token computes its whole text again");
  }
  if (LoraConfig::is_adapter(pretrained_folder(command.model))) {
    merge_and_unload(*model); // each token then costs what it costs the base
  }
  return model;
}

} // namespace detail

int run_command(const GenerateCommand& command) {
  using namespace detail;
  const GenerationConfig config = generation_config(command);
  const Tokenizer tokenizer = tokenizer_of(command.model);
  const PreTrainedModel model = load_generator(command, tokenizer);
  std::vector<std::string> pairs; // none
  const auto prompts = given_texts("cli::generate", command, task_of(model->config()), pairs);
  const auto answers =
      generate_texts(model, tokenizer, prompts, config, {.batch_size = command.batch_size});
  std::string text;
  for (size_t i = 0; i < answers.size(); ++i) {
    if (command.json || !command.output.empty()) {
      text += nlohmann::ordered_json{{"prompt", prompts[i]},
                                     {"generated_text", answers[i].generated_text},
                                     {"token_ids", answers[i].token_ids},
                                     {"finish_reason", answers[i].stopped ? "stop" : "length"}}
                  .dump() +
              "\n";
    } else {
      text += (i > 0 ? "\n" : "") + prompts[i] + answers[i].generated_text + "\n";
    }
  }
  write_answers("cli::generate", command.output, text, std::ssize(answers));
  return kExitOk;
}

} // namespace hasten
