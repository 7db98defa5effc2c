#include "checks.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/text/pretrained_folder.h"
#include "hasten/text/text_file.h"
#include "hasten/trainer/output_folder.h"
#include "hasten/trainer/resume.h"

namespace hasten {

namespace detail {

namespace files = std::filesystem;

void check_readable_file(const std::string& where, const std::string& flag,
                         const files::path& path) {
  const auto refuse = [&](const std::string& reason) {
    throw InputError(where, flag + "=" + path.string() + " " + reason,
                     "a .csv, .tsv or .jsonl file with samples");
  };
  std::error_code error;
  const files::file_status status = files::status(path, error);
  if (!files::exists(status)) {
    refuse("does not exist");
  }
  if (files::is_directory(status)) {
    refuse("is a folder");
  }
  if (::access(path.c_str(), R_OK) != 0) {
    refuse(std::string("cannot be read: ") + std::strerror(errno));
  }
  if (files::is_regular_file(status) && files::file_size(path, error) == 0) {
    refuse("is empty");
  }
}

void check_readable_files(const std::string& where, const std::string& flag,
                          const std::string& names) {
  for (const auto& path : matching_files(names, where, flag)) {
    check_readable_file(where, flag, path);
  }
}

/// Every process reads the file.
void check_read_by_all(const std::string& flag, const files::path& path, int processes) {
  std::error_code error;
  if (processes > 1 && !files::is_regular_file(path, error)) {
    throw InputError("cli::train",
                     flag + "=" + path.string() +
                         " is not a regular file, with processes=" + std::to_string(processes),
                     "a file, because only one process can read a pipe, and only once",
                     "write it to a file first, or train with --nproc 1");
  }
}

bool is_adapter_folder(const files::path& folder) {
  std::error_code error;
  return files::is_regular_file(folder / "adapter_config.json", error);
}

/// `shapes`: the model may also be the name of a shape. Returns the folder of any other.
files::path check_model(const std::string& where, const std::string& model, bool shapes) {
  std::error_code error;
  if (shapes && is_model_shape(model)) {
    return {};
  }
  const files::path folder = pretrained_folder(
      model, where, "--model", shapes ? model_shapes() : std::vector<std::string>());
  if (files::is_regular_file(folder / "config.json", error) || is_adapter_folder(folder)) {
    return folder;
  }
  throw InputError(where,
                   "--model=" + model + (folder == model ? "" : ": " + folder.string()) +
                       (files::is_directory(folder, error) ? " is a folder without config.json"
                                                           : " is not a folder"),
                   "a Hugging Face folder with config.json" +
                       (shapes ? ", or one of " + model_shapes_text() : std::string()),
                   hf_download_command(model));
}

void check_tokenizer_folder(const std::string& where, const std::string& folder) {
  std::error_code error;
  if (!files::is_directory(pretrained_folder(folder, where, "--tokenizer"), error)) {
    throw InputError(where, "--tokenizer=" + folder + " is not a folder",
                     "a folder with tokenizer.json or vocab.txt");
  }
}

bool is_writable_folder(const files::path& path) {
  std::error_code error;
  return files::is_directory(path, error) && ::access(path.c_str(), W_OK | X_OK) == 0;
}

/// `folder`, or the nearest parent folder that exists.
files::path nearest_existing(const files::path& folder) {
  std::error_code error;
  files::path existing = files::absolute(folder, error);
  while (!existing.empty() && !files::exists(existing, error) &&
         existing != existing.parent_path()) {
    existing = existing.parent_path();
  }
  return existing;
}

void check_output_dir(const TrainCommand& command) {
  constexpr const char* kWhere = "cli::train";
  const files::path folder = command.arguments.output_dir;
  const std::string said = "--output-dir=" + folder.string();
  std::error_code error;
  if (files::exists(folder, error)) {
    if (!files::is_directory(folder, error)) {
      throw InputError(kWhere, said + " is a file", "a folder, or a new name");
    }
    const files::path trace = trace_of_a_run(folder);
    if (!trace.empty() && !command.arguments.overwrite_output_dir &&
        command.arguments.resume_from_checkpoint.empty()) {
      throw InputError(kWhere, said + " holds another run: " + trace.filename().string(),
                       "an empty or new folder",
                       "choose another folder, resume that run "
                       "(--resume-from-checkpoint auto), or add --overwrite-output-dir");
    }
  }
  require_unlocked_output_dir(folder);
  const World world = outer_world(command.rendezvous);
  if (world.local_world_size >= world.world_size && !command.rendezvous.several()) {
    find_resume_point(command.arguments, /*verify_checksums=*/false);
  } // else hosts may have folders of their own, and the Trainer looks at all of them
  const files::path existing = nearest_existing(folder);
  if (!files::is_directory(existing, error)) {
    throw InputError(kWhere, said + " is inside a file: " + existing.string(), "a folder");
  }
  if (!is_writable_folder(existing)) {
    throw InputError(
        kWhere, said + " cannot be written: " + existing.string() + ": " + std::strerror(errno),
        "a writable folder");
  }
}

} // namespace detail

void check_inputs(const TrainCommand& command, bool fetched) {
  constexpr const char* kWhere = "cli::train";
  const auto folder =
      fetched ? detail::check_model(kWhere, command.model, true) : detail::files::path();
  if (!folder.empty() && detail::is_adapter_folder(folder)) {
    throw InputError(
        kWhere, "--model=" + command.model + " is an adapter", "a whole model",
        "merge it first: hasten merge --model " + command.model + " --output-dir FOLDER");
  }
  if (fetched && !command.tokenizer.empty()) {
    detail::check_tokenizer_folder(kWhere, command.tokenizer);
  }
  const std::string& output = command.arguments.output_dir;
  std::error_code error;
  if (detail::files::equivalent(folder, output, error)) {
    throw InputError(kWhere, "--output-dir=" + output + " is the folder of --model",
                     "another folder, because a run that fails could damage the model");
  }
  require_utf8(kWhere, described_inputs(command));
  const int processes =
      std::max(command.all_processes(), outer_world(command.rendezvous).world_size);
  for (const auto& [flag, file] : {std::pair("--train-file", &command.train_file),
                                   std::pair("--eval-file", &command.eval_file)}) {
    if (!file->empty()) {
      for (const auto& path : matching_files(*file, kWhere, flag)) {
        detail::check_readable_file(kWhere, flag, path);
        detail::check_read_by_all(flag, path, processes);
      }
    }
  }
  detail::check_output_dir(command);
  if (command.task != "text-generation") { // where a line may give several samples
    check_lines(command.train_file, command.all_processes());
  }
}

nlohmann::json described_inputs(const TrainCommand& command) {
  nlohmann::json inputs = {{"task", command.task},
                           {"model", command.model},
                           {"tokenizer", command.tokenizer},
                           {"vocab_size", command.vocab_size},
                           {"cased", command.cased},
                           {"train_file", command.train_file},
                           {"eval_file", command.eval_file},
                           {"eval_split", command.eval_split},
                           {"text_column", command.table.text_column},
                           {"text_pair_column", command.table.text_pair_column},
                           {"label_column", command.table.label_column},
                           {"label_columns", command.table.label_columns},
                           {"label_separator", command.table.label_separator},
                           {"filters", command.table.filters},
                           {"mlm_probability", command.mlm_probability},
                           {"whole_word_mask", command.whole_word_mask},
                           {"max_train_rows", command.max_train_rows},
                           {"max_eval_rows", command.max_eval_rows}};
  if (command.lora.r > 0) {
    inputs.update({{"lora_r", command.lora.r},
                   {"lora_alpha", command.lora.alpha},
                   {"lora_dropout", command.lora.dropout},
                   {"lora_target_modules", command.lora.target_modules},
                   {"lora_layers",
                    {command.lora.exclude_modules, command.lora.layers_to_transform,
                     command.lora.rank_pattern, command.lora.alpha_pattern, command.lora.bias,
                     command.lora.use_dora}},
                   {"lora_modules_to_save", command.lora.modules_to_save}});
  }
  return inputs;
}

bool is_finished_already(const TrainCommand& command, int world_size) {
  TrainingArguments now = command.arguments;
  if (now.resume_from_checkpoint != "auto" && now.resume_from_checkpoint != "latest") {
    return false;
  }
  if (!find_resume_point(now, /*verify_checksums=*/false).finished) {
    return false;
  }
  const SavedRun saved = read_saved_run(now.output_dir);
  // The run recorded its max_length after the model's limit was applied.
  if (const auto length = saved.arguments.find("max_length");
      length != saved.arguments.end() && length->is_number_integer()) {
    now.max_length = std::min(now.max_length, length->get<int64_t>());
  }
  const auto changes = changed_arguments(
      saved, now, now.per_device_train_batch_size * now.gradient_accumulation_steps * world_size);
  return describe_changes(changes, true).empty() &&
         saved.run.at("facts").value("listed", nlohmann::json()) == described_inputs(command);
}

std::string finished_line(const TrainCommand& command) {
  return "The run in " + command.arguments.output_dir + " is finished; there is nothing to do.";
}

static void check_texts(const char* where, const ModelFlags& command, bool fetched) {
  if (fetched) {
    detail::check_model(where, command.model, false);
  }
  if (!command.file.empty()) {
    detail::check_readable_files(where, "--file", command.file);
  }
}

void check_inputs(const PredictCommand& command, bool fetched) {
  check_texts("cli::predict", command, fetched);
}

void check_inputs(const GenerateCommand& command, bool fetched) {
  check_texts("cli::generate", command, fetched);
}

void check_inputs(const EvalCommand& command, bool fetched) {
  check_texts("cli::eval", command, fetched);
}

void check_inputs(const PlanCommand& command) {
  detail::check_model("cli::plan", command.model, true);
}

void check_inputs(const EstimateMemoryCommand& command) {
  detail::check_model("cli::estimate-memory", command.model, true);
}

void check_inputs(const CompareCommand& command, bool fetched) {
  if (fetched) {
    detail::check_model("cli::compare", command.model, true);
  }
  if (!command.json.empty() &&
      !detail::is_writable_folder(detail::files::absolute(command.json).parent_path())) {
    throw InputError("cli::compare", "--json=" + command.json + " cannot be written",
                     "a file in an existing, writable folder");
  }
}

void check_inputs(const StateCommand& command) {
  std::error_code error;
  for (const std::string& folder : command.folders) {
    if (!detail::files::is_regular_file(detail::files::path(folder) / "state.json", error)) {
      throw InputError("cli::state", folder + " has no state.json",
                       "a checkpoint-N folder of a run, or a folder of save_state()",
                       "pass the checkpoint-N folder inside the output folder");
    }
  }
}

void check_inputs(const MergeCommand& command, bool fetched) {
  std::error_code error;
  if (fetched &&
      !detail::is_adapter_folder(pretrained_folder(command.model, "cli::merge", "--model"))) {
    throw InputError("cli::merge", "--model=" + command.model + " has no adapter_config.json",
                     "the output of hasten train --lora-r, or another adapter in PEFT's layout");
  }
  if (detail::files::exists(command.output_dir, error) &&
      !(detail::files::is_directory(command.output_dir, error) &&
        detail::files::is_empty(command.output_dir, error))) {
    throw InputError("cli::merge", "--output-dir=" + command.output_dir + " is not empty",
                     "a new or empty folder");
  }
}

void check_inputs(const TokenizerCommand& command, bool fetched) {
  constexpr const char* kWhere = "cli::tokenizer";
  for (const std::string& file : command.files) {
    detail::check_readable_file(kWhere, "FILE", file);
  }
  if (command.action == "encode") {
    return fetched ? detail::check_tokenizer_folder(kWhere, command.tokenizer) : void();
  }
  const auto existing = detail::nearest_existing(command.output);
  if (!detail::is_writable_folder(existing)) {
    throw InputError(kWhere,
                     "--output=" + command.output + " cannot be written: " + existing.string() +
                         " is not a writable folder",
                     "a folder, or a new name in one");
  }
}

void check_nproc(const std::string& command, int nproc, bool oversubscribe, const World& world) {
  const int64_t most = int64_t{16} * allowed_cores();
  if (nproc > most && !oversubscribe) {
    throw InputError(
        "cli::" + command,
        "--nproc=" + std::to_string(nproc) + " on " + std::to_string(allowed_cores()) + " cores",
        "at most " + std::to_string(most) + ", 16 per core",
        "lower --nproc, or add --oversubscribe");
  }
  if (world.world_size > 1) {
    throw InputError("cli::" + command,
                     "--nproc=" + std::to_string(nproc) +
                         " inside the world of another launcher: WORLD_SIZE=" +
                         std::to_string(world.world_size) + " by " + world.source,
                     "one launcher", "leave --nproc out, or start without the other launcher");
  }
}

void check_lines(const std::string& train_file, int nproc) {
  int lines = 0;
  for (const auto& path : matching_files(train_file, "cli::train", "--train-file")) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error)) {
      return; // a pipe can be read only once
    }
    std::ifstream file(path);
    if (file.peek() == 0x1F) {
      return; // gzip
    }
    ++lines; // the last one may have no line break
    for (char c = 0; lines < nproc && file.get(c);) {
      lines += c == '\n' || c == '\r' ? 1 : 0;
    }
  }
  if (lines < nproc) {
    throw InputError("cli::train",
                     "more processes than samples: processes=" + std::to_string(nproc) + ", " +
                         train_file + " has at most " + std::to_string(lines) + " samples",
                     "at least one sample per process", "lower --nproc");
  }
}

void check_launch_outside(const std::string& command, const ProcessFlags& processes,
                          const World& world) {
  if (world.world_size > 1 &&
      (processes.logs.any() || processes.signals_to_handle != ProcessFlags{}.signals_to_handle)) {
    throw InputError("cli::" + command,
                     "--signals-to-handle, --local-ranks-filter, --log-dir, --redirects or --tee "
                     "inside the world of another launcher: WORLD_SIZE=" +
                         std::to_string(world.world_size) + " by " + world.source,
                     "one launcher, which handles the output of its processes",
                     "pass them to that launcher");
  }
}

void check_free_space(const std::filesystem::path& folder, int64_t bytes) {
  std::error_code error;
  const auto existing = detail::nearest_existing(folder);
  const auto space = std::filesystem::space(existing, error);
  if (error) {
    return; // the free space is unknown; writing would report a full disk
  }
  uintmax_t free = space.available;
  for (std::filesystem::recursive_directory_iterator entry(folder, error), end;
       !error && entry != end; entry.increment(error)) {
    std::error_code ignored;
    if (entry->is_regular_file(ignored)) {
      free += entry->file_size(ignored);
    }
  }
  if (free < static_cast<uintmax_t>(bytes)) {
    throw InputError("cli::train",
                     "--output-dir=" + folder.string() + " needs " + format_bytes(bytes) +
                         ", but its disk has " + format_bytes(static_cast<int64_t>(free)) + " free",
                     {},
                     "make room, choose another folder, or keep fewer saves "
                     "(--save-total-limit, --save-strategy no)");
  }
}

} // namespace hasten
