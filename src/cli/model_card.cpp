// What hasten train leaves next to the final model: results as JSON and a model card.
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <regex>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/config/spelling.h"
#include "hasten/report/report.h"
#include "hasten/text/pretrained_folder.h"
#include "hasten/trainer/evaluation_metrics.h"
#include "hasten/trainer/output_folder.h"
#include "train_run.h"

namespace hasten::detail {

/// A file README.md without this line is the user's and stays.
constexpr const char* kCardMark = "<!-- written by hasten train -->";

/// A string of JSON is one of YAML, too.
std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// The text in a cell of a table or in a heading.
std::string markdown_text(const std::string& text) {
  const std::string escaped = std::regex_replace(text, std::regex(R"([|<`*_\\])"), R"(\$&)");
  return std::regex_replace(escaped, std::regex("[[:cntrl:]]"), " ");
}

std::string card_row(const std::string& name, const std::string& value) {
  return "| " + markdown_text(name) + " | " + markdown_text(value) + " |\n";
}

/// The names of the files, or the patterns, without folders.
std::string data_name(const std::string& files) {
  std::error_code error;
  const bool one = std::filesystem::exists(files, error);
  return files.empty() ? "synthetic reviews"
                       : joined(mapped(one ? std::vector<std::string>{files} : split(files),
                                       [](const std::filesystem::path& file) {
                                         return file.filename().string();
                                       }));
}

/// Hugging Face's front matter.
std::string front_matter(const TrainCommand& command, const nlohmann::json& evaluation) {
  const std::string name =
      std::filesystem::absolute(command.arguments.output_dir).lexically_normal().filename();
  const std::string& task = command.task;
  std::string text = "---\nlibrary_name: transformers\npipeline_tag: " + task + "\n";
  if (!is_model_shape(command.model)) {
    const bool folder = hf_download_command(command.model).empty();
    text += "base_model: " +
            quoted(folder ? std::filesystem::path(command.model).filename().string()
                          : command.model.substr(0, command.model.find('@'))) +
            "\n";
  }
  text += "tags:\n- " + task + "\n- hasten\nmodel-index:\n- name: " + quoted(name) + "\n  results:";
  std::string metrics;
  for (const auto& [key, value] : evaluation.items()) {
    if (key.starts_with("eval_") && key != "eval_runtime" && key != "eval_samples" &&
        !key.ends_with("_per_second") && value.is_number()) {
      metrics += "    - type: " + quoted(key.substr(5)) + "\n      value: " + value.dump() + "\n";
    }
  }
  if (metrics.empty()) {
    return text + " []\n---\n";
  }
  return text + "\n  - task:\n      type: " + task +
         "\n    dataset:\n      type: " + quoted("csv") + "\n      name: " +
         quoted(data_name(command.eval_file.empty() ? command.train_file : command.eval_file)) +
         "\n    metrics:\n" + metrics + "---\n";
}

std::string model_card(const TrainCommand& command, const TrainInputs& in, Trainer& trainer,
                       const nlohmann::json& train, const nlohmann::json& evaluation) {
  const TrainingArguments& a = trainer.arguments();
  std::string text =
      front_matter(command, evaluation) + kCardMark + "\n\n# " + markdown_text(command.model) +
      " fine-tuned on " + markdown_text(data_name(command.train_file)) +
      "\n\nTask: " + in.task->name +
      (in.task->problem_types.size() > 1 ? " (" + spelling(in.head) + ")" : "") + ".\n" +
      (in.head == Head::unlabelled
           ? ""
           : "Labels: " + joined(mapped(in.model->config().id2label, markdown_text)) + ".\n") +
      "\n## Results\n\n| metric | value |\n|---|---|\n";
  for (const nlohmann::json& values : {train, evaluation}) {
    for (const auto& [name, value] : values.items()) {
      if (value.is_number() || value.is_string()) {
        text += card_row(name,
                         value.is_string() ? json_text(value) : format_digits(value.get<double>()));
      }
    }
  }
  const std::string tables = report_text(evaluation);
  text += tables.empty() ? "" : "\n```\n" + tables + "```\n";
  text += "\n## Training\n\n| argument | value |\n|---|---|\n";
  const nlohmann::json arguments = a;
  for (const char* name :
       {"learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps",
        "num_train_epochs", "max_steps", "lr_scheduler_type", "optim", "precision", "strategy",
        "local_sgd_steps", "gradient_checkpointing", "max_length", "seed"}) {
    text += card_row(name, arguments.at(name).dump());
  }
  const std::string example = example_text(*in.task, in.data->tokenizer);
  return text + "\nProcesses: " + std::to_string(trainer.accelerator().num_processes()) +
         ". training_args.json has all arguments. In the folder where the run was started, this "
         "command repeats it:\n\n    hasten train --config " +
         (std::filesystem::path(a.output_dir) / "training_args.json").string() +
         " --output-dir again\n\n## Use\n\nIn this folder, with Python:\n\n"
         "```python\nfrom transformers import pipeline\n\nanswer = pipeline(\"" +
         in.task->name + "\", model=\".\")\nprint(answer(\"" + example +
         "\"))\n```\n\nWith hasten:\n\n    hasten predict --model . \"" + example + "\"\n";
}

void leave_results(Trainer& trainer, const TrainCommand& command, const TrainInputs& in,
                   const TrainOutput& output) {
  nlohmann::json train = output.metrics;
  train["train_samples"] = in.train->size();
  trainer.save_metrics("train", train);
  nlohmann::json evaluation = nlohmann::json::object();
  if (in.eval) {
    const TrainerState& state = trainer.state();
    const auto& history = state.log_history;
    const auto last = std::find_if(history.rbegin(), history.rend(),
                                   [](const auto& r) { return r.contains("eval_runtime"); });
    const bool of_final_model =
        !trainer.evaluation_report().is_null() && last != history.rend() &&
        last->at("step") == state.global_step &&
        (!trainer.arguments().load_best_model_at_end ||
         state.best_global_step.value_or(state.global_step) == state.global_step);
    evaluation = of_final_model ? *last : trainer.evaluate();
    evaluation["eval_samples"] = in.eval->size();
    evaluation.update(trainer.evaluation_report());
    if (trainer.accelerator().is_main_process() && command.report_texts == "on" &&
        evaluation.contains("most_wrong")) {
      for (auto& sample : evaluation["most_wrong"]) {
        const Batch batch = in.eval->collate({sample["sample"].get<int64_t>()});
        const at::Tensor& ids = batch["input_ids"];
        sample["text"] = in.data->tokenizer.decode(
            {ids.const_data_ptr<int64_t>(), ids.const_data_ptr<int64_t>() + ids.numel()},
            {.skip_special_tokens = true});
      }
    }
    trainer.save_metrics("eval", evaluation);
  }
  if (!trainer.accelerator().is_main_process()) {
    return;
  }
  const std::filesystem::path folder = command.arguments.output_dir;
  if (const std::string tables =
          report_text(evaluation, terminal_columns(STDOUT_FILENO), folder / "eval_results.json");
      !tables.empty()) {
    std::cout << "\n" << tables << std::flush;
  }
  if (std::filesystem::exists(folder / kReportFile)) { // now with the results
    write_report({{.path = folder}}, folder / kReportFile);
  }
  const auto card = folder / "README.md";
  std::error_code error;
  if (std::filesystem::exists(card, error) &&
      read_file(card).find(kCardMark) == std::string::npos) {
    log_warning(card.string() + " was there before and is kept; no model card is written");
    return;
  }
  write_file_atomically(card, model_card(command, in, trainer, train, evaluation));
}

} // namespace hasten::detail
