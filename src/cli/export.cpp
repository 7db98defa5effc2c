// hasten export: Python runs once and writes the graph of a model.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "commands.h"
#include "export_script.h"
#include "flags.h"
#include "hasten/base/error.h"

namespace hasten {

namespace detail {

Command parse_export(const CommandEntry& entry, std::vector<std::string> arguments) {
  ExportCommand command;
  command.arguments = arguments;
  FlagTable flags(
      entry,
      {.usage = "--model MODEL --task TASK --output-dir FOLDER [flags]",
       .examples = {"hasten export --model microsoft/deberta-v3-small \\\n"
                    "    --task text-classification --output-dir deberta",
                    "hasten train --model deberta --train-file reviews.csv --output-dir out",
                    "hasten export --describe deberta"},
       .notes = "For models that hasten does not have itself. Runs python3 once, which needs "
                "torch and transformers. The folder is a model's in the Hugging Face layout, and "
                "model.pt2, the graph of its logits. Training needs no Python."});
  std::string text; // Python reads the values
  std::optional<int64_t> number;
  bool random = false;
  flags.group("Model");
  flags.value("--model", text, "FOLDER|NAME", "a model of transformers");
  flags.value("--task", text, "NAME", joined(task_choices()) + ", image-classification");
  flags.value("--num-labels", number, "N", "labels of a new head (default: the model's)",
              NumberRange{1, 1'048'576});
  flags.flag("--from-config", random, "random weights: --model needs no more than config.json");
  flags.value("--seed", number, "N", "of the random weights (default: 42)");
  flags.group("Output");
  flags.value("--output-dir", text, "FOLDER", "new or empty folder to write");
  flags.value("--describe", command.describe, "FOLDER|FILE",
              "print inputs, outputs and blocks of a graph that is there, and write nothing");
  flags.parse(std::move(arguments));
  const bool exports =
      flags.given("--model") && flags.given("--task") && flags.given("--output-dir");
  flags.require(exports != flags.given("--describe"),
                exports ? "--describe with --model" : "--model, --task or --output-dir is missing",
                "--model, --task and --output-dir, or --describe alone");
  return command;
}

} // namespace detail

void export_model(const ExportCommand& command) {
  const std::string script = detail::kExportScript;
  std::vector<const char*> argv{"python3", "-c", script.c_str()};
  for (const std::string& argument : command.arguments) {
    argv.push_back(argument.c_str());
  }
  argv.push_back(nullptr);
  ::execvp(argv[0], const_cast<char**>(argv.data()));
  throw InputError("cli::export", "cannot start python3: " + std::string(std::strerror(errno)),
                   "Python in PATH, for this command alone",
                   "install it with torch and transformers, here or on another machine: "
                   "pip install torch transformers");
}

} // namespace hasten
