#include "commands.h"
#include "flags.h"

namespace hasten::detail {

constexpr const char* kFromModel = " (default: that of generation_config.json";

void declare_sampling(FlagTable& flags, GenerateCommand& command) {
  const std::string or_else = std::string(kFromModel) + ", or else ";
  flags.group("Tokens");
  flags.value("--max-new-tokens", command.max_new_tokens, "TOKENS",
              "most tokens of an answer" + or_else + "256, or what the model has positions for)",
              NumberRange{1, kTokens.most});
  flags.flag("--do-sample", command.do_sample,
             "draw tokens by their probabilities instead of taking the most probable");
  flags.value(
      "--temperature", command.temperature, "FACTOR",
      "divide the logits by it; below 1 makes probable tokens more probable" + or_else + "1)");
  flags.value("--top-k", command.top_k, "N",
              "draw from the N most probable tokens; 0: from all" + or_else + "50)",
              NumberRange{0, kPieces.most});
  flags.value("--top-p", command.top_p, "SHARE",
              "draw from the fewest tokens whose probabilities sum up to it" + or_else + "1)");
  flags.value("--repetition-penalty", command.repetition_penalty, "FACTOR",
              "above 1 makes tokens less probable that are there already" + or_else + "1)");
  flags.values("--stop-string", command.stop_strings, "TEXT",
               "end an answer that contains this; may be repeated");
  flags.value("--seed", command.seed, "N", "seed of the draws");
  flags.flag("--no-cache", command.no_cache,
             "compute all tokens for each new one, to compare: the answers are the same");
}

Command parse_generate(const CommandEntry& entry, std::vector<std::string> arguments) {
  GenerateCommand command;
  command.batch_size = 8;
  FlagTable flags(
      entry, {.usage = "--model FOLDER [PROMPT... | --file FILE | -] [flags]",
              .examples = {"hasten generate --model out \"Once upon a time\"",
                           "hasten generate --model out --do-sample --top-p 0.9 \\\n"
                           "    --file prompts.jsonl --output answers.jsonl"},
              .notes = "Prints each prompt with its continuation. Without --do-sample it takes "
                       "the most probable token, unless the model's generation_config.json "
                       "says otherwise. - reads one prompt per line from stdin."});
  flags.group("Model and prompts");
  flags.value(
      "--model", command.model, "FOLDER|NAME",
      "causal language model: output of hasten train, or another folder in the Hugging Face "
      "layout, or the name of one on Hugging Face's hub");
  flags.required();
  declare_offline(flags, command.offline);
  flags.value("--file", command.file, "FILE,...",
              "prompts, .csv, .tsv or .jsonl, also .gz; several files with commas or as a pattern");
  flags.value("--text-column", command.table.text_column, "NAME",
              "column with the prompt (default: prompt)");
  flags.value("--max-rows", command.max_rows, "SAMPLES",
              "use only the first SAMPLES of the file; 0 uses all", kAnyRows);
  declare_sampling(flags, command);
  flags.group("Output");
  flags.value("--output", command.output, "FILE", "write .jsonl instead of printing");
  flags.flag("--json", command.json, "print one JSON object per line");
  flags.group("Batches");
  flags.value("--batch-size", command.batch_size, "PROMPTS", "prompts per batch", kBatchRows);
  command.texts = flags.parse_words(std::move(arguments));
  flags.require(command.texts.empty() != command.file.empty(),
                command.file.empty() ? "no prompt and no --file"
                                     : "--file=" + command.file + " together with a prompt",
                "prompts, or --file FILE, or - for stdin");
  flags.require(command.output.empty() || command.output.ends_with(".jsonl"),
                "--output=" + command.output, "a file name that ends in .jsonl");
  if (command.table.text_column.empty()) {
    command.table.text_column = "prompt";
  }
  return command;
}

Command parse_merge(const CommandEntry& entry, std::vector<std::string> arguments) {
  MergeCommand command;
  FlagTable flags(entry, {.usage = "--model ADAPTER --output-dir FOLDER",
                          .examples = {"hasten merge --model out --output-dir merged"},
                          .notes = "Adds the updates of a LoRA adapter to its base's weights. The "
                                   "folder is a whole model in the Hugging Face layout."});
  flags.group("Folders");
  flags.value(
      "--model", command.model, "ADAPTER",
      "folder with adapter_config.json, or the name of one on Hugging Face's hub: output of "
      "hasten train --lora-r, or of PEFT");
  flags.required();
  declare_offline(flags, command.offline);
  flags.value("--output-dir", command.output_dir, "FOLDER", "new or empty folder to write");
  flags.required();
  flags.parse(std::move(arguments));
  return command;
}

} // namespace hasten::detail
