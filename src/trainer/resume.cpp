#include "hasten/trainer/resume.h"

#include <algorithm>
#include <limits>
#include <set>
#include <sstream>
#include <system_error>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/io/commit.h"
#include "hasten/state/saved_state.h"
#include "hasten/trainer/output_folder.h"

namespace hasten {

namespace detail {

constexpr const char* kResumeWhere = "trainer::resume";

void check_file_sizes(const std::filesystem::path& folder) {
  for (const auto& [name, entry] : read_manifest(folder)) {
    std::error_code error;
    const auto size = std::filesystem::file_size(folder / name, error);
    if (error || size != entry.size) {
      throw InputError(kResumeWhere,
                       (folder / name).string() + ": " +
                           (error ? error.message() : "size=" + std::to_string(size)),
                       std::to_string(entry.size) + " bytes, as saved");
    }
  }
}

std::string why_not_resumable(const std::filesystem::path& folder, bool verify_checksums) {
  try {
    verify_checksums ? verify_manifest(folder) : check_file_sizes(folder);
    std::error_code error;
    if (!std::filesystem::exists(folder / kStateFile, error)) {
      return "it holds a model without its training state (" + std::string(kStateFile) +
             " is missing), as saved with save_only_model";
    }
    read_saved_run(folder);
  } catch (const InputError& error) {
    return error.what();
  }
  return {};
}

bool is_finished_run(const std::filesystem::path& output_dir) {
  std::error_code error;
  if (!std::filesystem::exists(output_dir / kRunFile, error)) {
    return false;
  }
  try {
    check_file_sizes(output_dir);
    return read_saved_run(output_dir).run.value("finished", false);
  } catch (const InputError&) {
    return false;
  }
}

} // namespace detail

ResumePoint find_resume_point(const TrainingArguments& arguments, bool verify_checksums,
                              const std::vector<JudgedCheckpoint>* judged) {
  const std::string& asked = arguments.resume_from_checkpoint;
  const std::filesystem::path output_dir = arguments.output_dir;
  const std::string said = "resume_from_checkpoint=" + asked;
  ResumePoint point;
  if (asked.empty()) {
    return point;
  }
  if (asked != "auto" && asked != "latest") {
    const std::string reason =
        judged ? judged->at(0).fault : detail::why_not_resumable(asked, verify_checksums);
    if (!reason.empty()) {
      throw InputError(detail::kResumeWhere, said + " cannot be resumed from: " + reason,
                       "a complete checkpoint-N folder, auto or latest");
    }
    point.folder = asked;
    return point;
  }
  point.finished = detail::is_finished_run(output_dir);
  std::vector<JudgedCheckpoint> candidates;
  if (judged != nullptr) {
    candidates = *judged;
  } else {
    for (const CheckpointFolder& checkpoint : checkpoint_folders(output_dir)) {
      candidates.insert(candidates.begin(), {checkpoint.path, {}});
    }
  }
  for (const JudgedCheckpoint& candidate : candidates) {
    const std::string reason =
        judged ? candidate.fault : detail::why_not_resumable(candidate.folder, verify_checksums);
    if (reason.empty()) {
      point.folder = candidate.folder;
      break;
    }
    point.skipped.push_back(candidate.folder.filename().string() + ": " + reason);
  }
  if (point.finished || !point.folder.empty()) {
    return point;
  }
  if (!point.skipped.empty()) {
    throw InputError(detail::kResumeWhere,
                     said + ": no checkpoint in " + output_dir.string() +
                         " can be resumed from: " + joined(point.skipped, "; "),
                     "a complete checkpoint-N",
                     "inspect them; to start again use another output_dir, or "
                     "overwrite_output_dir without resume_from_checkpoint");
  }
  if (asked == "latest") {
    throw InputError(detail::kResumeWhere,
                     said + ": there is no checkpoint-N in " + output_dir.string(), "a saved run",
                     "use auto, which starts from the beginning if there is none");
  }
  const auto trace = trace_of_a_run(output_dir);
  std::error_code error;
  if (!trace.empty() && !std::filesystem::exists(output_dir / "metrics.jsonl", error) &&
      !std::filesystem::exists(output_dir / kRunFile, error)) {
    throw InputError(detail::kResumeWhere,
                     said + ": " + output_dir.string() + " holds a model (" +
                         trace.filename().string() + ") but no run",
                     "a new folder, or the folder of a run", "choose another output_dir");
  }
  return point;
}

SavedRun read_saved_run(const std::filesystem::path& folder) {
  const auto read = [&](const char* name) {
    const auto path = folder / name;
    nlohmann::json json = read_json_file(detail::kResumeWhere, path);
    if (!json.is_object()) {
      throw InputError(detail::kResumeWhere, path.string() + ": not a JSON object");
    }
    return json;
  };
  SavedRun saved{read("training_args.json"), read(kRunFile)};
  struct Field {
    const char* name;
    const char* expected; // of JSON's types
    int64_t least = 0; // of a number
    const char* file = kRunFile;
  };
  constexpr Field kFields[] = {{"global_step", "number", 0, "trainer_state.json"},
                               {"gradient_accumulation_steps", "number", 1, "training_args.json"},
                               {"epoch_index", "number"},
                               {"epoch_rows_seen", "number"},
                               {"samples_seen", "number"},
                               {"tokens_seen", "number"},
                               {"drop_batch", "number", 1},
                               {"total_batch", "number", 1},
                               {"world_size", "number", 1},
                               {"at_epoch_end", "boolean"},
                               {"finished", "boolean"},
                               {"facts", "object"}};
  for (const auto& [name, expected, least, file] : kFields) {
    const auto value = (file == kRunFile ? saved.run : read(file)).value(name, nlohmann::json());
    if (value.type_name() != std::string_view(expected) ||
        (value.is_number() && !(value.is_number_integer() && value >= least &&
                                value <= std::numeric_limits<int64_t>::max()))) {
      throw InputError(
          detail::kResumeWhere, (folder / file).string() + ": " + name + "=" + value.dump(),
          std::string("a ") + expected + ", whole and in range, as written by this version");
    }
    saved.run[name] = value;
  }
  return saved;
}

std::vector<ArgumentChange> changed_arguments(const SavedRun& saved, const TrainingArguments& now,
                                              int64_t total_batch) {
  // Arguments that change neither the trajectory of the parameters nor the choice of the best
  // model.
  static const std::set<std::string> harmless = {
      "per_device_train_batch_size", // compared as total_batch
      "gradient_accumulation_steps",
      "auto_find_batch_size",
      "memory_limit",
      "gradient_checkpointing",
      "strategy", // changes only the order of sums
      "shard_size",
      "device",
      "cuda_graphs",
      "full_determinism",
      "use_cpu",
      "ddp_backend",
      "per_device_eval_batch_size",
      "dataloader_num_workers",
      "dataloader_prefetch_factor",
      "logging_steps",
      "log_gradient_norms",
      "eval_strategy",
      "eval_steps",
      "eval_delay",
      "eval_on_start",
      "save_strategy",
      "save_steps",
      "save_total_limit",
      "save_only_model",
      "save_replicas",
      "save_on_each_node",
      "load_best_model_at_end"};
  // bf16 and fp16 are compared as precision.
  static const std::set<std::string> left_out = {"output_dir",
                                                 "overwrite_output_dir",
                                                 "resume_from_checkpoint",
                                                 "allow_changed_arguments",
                                                 "disable_tqdm",
                                                 "ddp_timeout",
                                                 "heartbeat_timeout",
                                                 "report_to",
                                                 "logging_dir",
                                                 "bf16",
                                                 "fp16"};
  std::vector<ArgumentChange> changes;
  const auto compare = [&](const std::string& name, const nlohmann::json& before,
                           const nlohmann::json& value, bool alters) {
    if (before != value) {
      changes.push_back({name, before.dump(), value.dump(), alters});
    }
  };
  nlohmann::json json_now = now;
  json_now["precision"] = precision_name(now.effective_precision());
  if (now.effective_precision() == Precision::automatic) {
    json_now.erase("precision"); // the run keeps its choice
  }
  for (const auto& [name, value] : json_now.items()) {
    const auto before = saved.arguments.find(name);
    if (before != saved.arguments.end() && !left_out.contains(name)) {
      compare(name, *before, value, !harmless.contains(name));
    }
  }
  compare("total_batch", saved.run.at("total_batch"), total_batch, true);
  return changes;
}

std::string describe_changes(const std::vector<ArgumentChange>& changes, bool only_altering) {
  std::string text;
  for (const ArgumentChange& change : changes) {
    if (change.alters_trajectory || !only_altering) {
      text += (text.empty() ? "" : ", ") + change.name + ": " + change.before + " -> " + change.now;
    }
  }
  return text;
}

void require_same_trajectory(const std::filesystem::path& folder,
                             const std::vector<ArgumentChange>& changes, bool allowed) {
  const std::string text = describe_changes(changes, true);
  if (!text.empty() && !allowed) {
    throw InputError(detail::kResumeWhere,
                     "the run in " + folder.string() + " was started with other arguments: " + text,
                     "its original arguments",
                     "pass these again, or set allow_changed_arguments "
                     "(--allow-changed-arguments) to continue with the new ones");
  }
}

namespace detail {

/// Records of steps up to `global_step`, without the records that will be written again.
std::string records_until(const std::string& text, int64_t global_step) {
  std::istringstream lines(text);
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    const auto json = try_parse_json(line).value;
    if (!json.is_object()) {
      continue; // incomplete because of a kill
    }
    const auto step = json.find("step");
    const std::string type = json.value("type", "");
    const bool reported_again = type == "epoch" || type == "end";
    if (type == "start" || (step != json.end() && step->is_number_integer() &&
                            step->get<int64_t>() - (reported_again ? 0 : 1) < global_step)) {
      kept += line + "\n";
    }
  }
  return kept;
}

void rename_abandoned(const std::filesystem::path& folder) {
  std::error_code error;
  for (int i = 1; i < 10000; ++i) {
    std::filesystem::path target = folder;
    target += ".set-aside" + (i == 1 ? std::string() : "-" + std::to_string(i));
    if (!std::filesystem::exists(target, error)) {
      std::filesystem::rename(folder, target, error);
      break;
    }
  }
  if (error) {
    throw Error(kResumeWhere,
                "cannot rename path=" + folder.string() + " (" + error.message() + ")", {}, {},
                kind_of_errno(error.value()));
  }
}

} // namespace detail

void prepare_resumed_dir(const std::filesystem::path& output_dir, int64_t global_step,
                         std::optional<int64_t> best_step) {
  for (const CheckpointFolder& checkpoint : checkpoint_folders(output_dir)) {
    if (checkpoint.global_step > global_step) {
      detail::rename_abandoned(checkpoint.path);
    }
  }
  remove_unfinished_saves(output_dir);
  std::error_code error;
  if (!std::filesystem::exists(output_dir / "checkpoint-best", error)) { // renamed, or no link
    link_best_checkpoint(output_dir, best_step);
  }
  for (const char* name : {"trainer_state.json", kRunFile}) {
    std::filesystem::remove(output_dir / name, error);
  }
  const auto metrics = output_dir / "metrics.jsonl";
  if (std::filesystem::exists(metrics, error)) {
    write_file_atomically(metrics, detail::records_until(read_file(metrics), global_step));
  }
}

} // namespace hasten
