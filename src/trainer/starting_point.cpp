#include "starting_point.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/comm/agree.h"
#include "hasten/trainer/output_folder.h"
#include "hasten/trainer/resume.h"
#include "hasten/trainer/trainer_state.h"

namespace hasten::detail {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StartingPoint, folder, own_folder, finished, run, precision,
                                   notes, drop_batch)

int64_t total_batch(const TrainerParts& parts) {
  return parts.arguments.per_device_train_batch_size * parts.arguments.gradient_accumulation_steps *
         parts.accelerator->num_processes();
}

/// Facts are compared like arguments.
std::vector<ArgumentChange> changes_since(const SavedRun& saved, const TrainerParts& parts) {
  auto changes = changed_arguments(saved, parts.arguments, total_batch(parts));
  for (const auto& [facts, alters] :
       {std::pair(&parts.listed_facts, false), std::pair(&parts.altering_facts, true)}) {
    const auto before =
        saved.run.at("facts").value(alters ? "altering" : "listed", nlohmann::json::object());
    for (const auto& [name, value] : facts->items()) {
      if (const auto found = before.find(name); found != before.end() && *found != value) {
        changes.push_back({name, found->dump(), value.dump(), alters});
      }
    }
  }
  return changes;
}

/// A checksum of the samples' lengths: another file of the same size most likely has others.
std::string data_checksum(const Dataset& dataset) {
  std::string bytes;
  for (int64_t row = 0; row < dataset.size(); ++row) {
    bytes += std::to_string(dataset.length(row)) + ",";
  }
  return hash_hex(bytes);
}

/// Called on rank 0.
StartingPoint find_starting_point(const TrainerParts& parts,
                                  const std::vector<JudgedCheckpoint>* judged) {
  const TrainingArguments& a = parts.arguments;
  StartingPoint start;
  if (a.resume_from_checkpoint.empty()) {
    require_free_output_dir(a);
    return start;
  }
  const ResumePoint point = find_resume_point(a, /*verify_checksums=*/true, judged);
  if (point.finished) {
    const SavedRun saved = read_saved_run(a.output_dir);
    const auto changes = changes_since(saved, parts);
    require_same_trajectory(a.output_dir, changes, a.allow_changed_arguments);
    if (describe_changes(changes, true).empty()) {
      start.finished = true;
      start.run = saved.run;
      const auto file =
          std::filesystem::path(a.output_dir) / "trainer_state.json"; // rank 0's alone
      start.run["trainer_state"] =
          nlohmann::json::parse(trainer_state_json(read_trainer_state(file)));
      return start;
    }
    if (point.folder.empty()) {
      throw InputError(
          "trainer::resume",
          "the run in " + a.output_dir + " is finished and has no checkpoint to resume from",
          "a checkpoint-N (see save_strategy)", "choose another output_dir");
    }
  }
  for (const std::string& skipped : point.skipped) {
    start.notes.push_back("skipped " + skipped);
  }
  if (point.folder.empty()) {
    start.notes.push_back("no checkpoint in " + a.output_dir +
                          ": the run starts from the beginning");
    return start;
  }
  std::error_code error;
  const auto above = std::filesystem::absolute(point.folder).parent_path();
  start.own_folder = std::filesystem::equivalent(above, a.output_dir, error);
  if (!start.own_folder) {
    require_free_output_dir(a);
  }
  const SavedRun saved = read_saved_run(point.folder);
  const auto changes = changes_since(saved, parts);
  require_same_trajectory(point.folder, changes, a.allow_changed_arguments);
  start.folder = point.folder;
  start.run = saved.run;
  start.precision = saved.arguments.value("precision", "");
  if (a.dataloader_drop_last) {
    start.drop_batch = saved.run.at("drop_batch").get<int64_t>();
  }
  start.notes.push_back("resumes from " + point.folder.string() + ", after step " +
                        saved.run.at("global_step").dump());
  if (const std::string text = describe_changes(changes, false); !text.empty()) {
    start.notes.push_back("changed since: " + text);
  }
  const auto then = saved.run.at("world_size").get<int>();
  if (then != parts.accelerator->num_processes()) {
    start.notes.push_back("saved by " + std::to_string(then) +
                          (then == 1 ? " process" : " processes") +
                          ": the order of samples is the same, dropout differs");
  }
  return start;
}

/// Runs `look` on rank 0 and returns its result, or throws its error, on every rank. Collective.
nlohmann::json agreed_with_main(TrainerParts& parts, const char* what,
                                const std::function<nlohmann::json()>& look) {
  std::exception_ptr error;
  nlohmann::json result;
  if (parts.is_main()) {
    try {
      result = look();
    } catch (const std::exception& e) { // the others must not be left waiting
      error = std::current_exception();
      result = {{"refusal", e.what()}};
    }
  }
  result = parts.communicator().broadcast_object(result, what);
  if (error) {
    std::rethrow_exception(error);
  }
  if (result.contains("refusal")) {
    say_once_per_host(parts.communicator(), 0);
    throw PeerInputError("trainer::train",
                         "rank 0 failed: " + result.at("refusal").get<std::string>());
  }
  return result;
}

void lock_output_dir(TrainerParts& parts) {
  const TrainingArguments& a = parts.arguments;
  const std::filesystem::path folder = a.output_dir;
  if (folder.empty()) {
    return;
  }
  parts.folders = one_folder(parts.accelerator->num_processes());
  if (on_several_hosts(parts.communicator()) &&
      (a.save_strategy != SaveStrategy::no || !a.resume_from_checkpoint.empty() ||
       a.save_on_each_node)) { // hosts write or read there
    std::optional<HostMark> mark;
    const auto marks = on_every_rank(parts.communicator(), "trainer::train", [&] {
      return mark.emplace(parts.communicator(), folder).said();
    });
    parts.folders = find_host_folders(parts.communicator(), "trainer::train", folder, marks, 50);
  }
  on_every_rank(parts.communicator(), "trainer::train", [&] {
    if (parts.leads_folder()) {
      parts.output_lock = std::make_unique<OutputDirLock>(folder);
    }
    return nlohmann::json();
  });
  if (a.save_strategy != SaveStrategy::no && !a.save_only_model) {
    require_replicas(parts.folders, a.save_replicas, "trainer::train");
  }
}

/// The checkpoint of this rank's host that rank 0 calls `folder`.
std::filesystem::path own_checkpoint(const TrainingArguments& a, const std::string& folder) {
  const std::string& asked = a.resume_from_checkpoint;
  return asked == "auto" || asked == "latest"
             ? std::filesystem::path(a.output_dir) / std::filesystem::path(folder).filename()
             : std::filesystem::path(asked);
}

/// The checkpoints of hosts with folders of their own, newest first, up to the first from which all can
/// resume. Its shared files are then in every folder. Collective.
std::vector<JudgedCheckpoint> judge_checkpoints(TrainerParts& parts) {
  constexpr const char* kWhere = "trainer::train";
  const TrainingArguments& a = parts.arguments;
  std::set<std::pair<int64_t, std::string>> names; // by step
  const auto found = on_every_rank(parts.communicator(), kWhere, [&] {
    auto list = nlohmann::json::array();
    if (parts.leads_folder()) {
      for (const CheckpointFolder& checkpoint : checkpoint_folders(a.output_dir)) {
        list.push_back({checkpoint.global_step, checkpoint.path.filename().string()});
      }
    }
    return list;
  });
  for (const auto& list : found) {
    for (const auto& item : list) {
      names.emplace(item.at(0).get<int64_t>(), item.at(1).get<std::string>());
    }
  }
  if (own_checkpoint(a, "") == a.resume_from_checkpoint) {
    names = {{0, a.resume_from_checkpoint}};
  }
  std::vector<JudgedCheckpoint> judged;
  for (auto name = names.rbegin(); name != names.rend(); ++name) {
    const auto folder = own_checkpoint(a, name->second);
    SavedFolders folders = look_at_folders(parts.communicator(), kWhere, folder, [&] {
      if (const auto reason = why_not_resumable(folder, true); !reason.empty()) {
        throw InputError(kWhere, reason);
      }
    });
    if (folders.files.size() == 1 && folders.fault.empty()) { // one folder, which nobody has read
      folders.fault = agreed_with_main(parts, "checkpoint", [&] {
                        return nlohmann::json{{"fault", why_not_resumable(folder, true)}};
                      }).at("fault");
    }
    judged.push_back({folder, folders.fault});
    if (folders.fault.empty()) {
      complete_folders(parts.communicator(), kWhere, folders, nullptr);
      break;
    }
  }
  return judged;
}

StartingPoint decide_starting_point(TrainerParts& parts) {
  const TrainingArguments& a = parts.arguments;
  std::optional<std::vector<JudgedCheckpoint>> judged;
  if (parts.folders.several()) {
    on_every_rank(parts.communicator(), "trainer::train", [&] {
      if (parts.leads_folder() && a.resume_from_checkpoint.empty()) {
        require_free_output_dir(a);
      }
      return nlohmann::json();
    });
    if (!a.resume_from_checkpoint.empty()) {
      judged = judge_checkpoints(parts);
    }
  }
  StartingPoint start =
      agreed_with_main(parts, "start of the run", [&] {
        if (!parts.altering_facts.contains("train_data")) {
          parts.altering_facts["train_data"] = data_checksum(*parts.train);
        }
        return nlohmann::json(find_starting_point(parts, judged ? &*judged : nullptr));
      }).get<StartingPoint>();
  if (judged && !start.folder.empty()) {
    start.folder = own_checkpoint(a, start.folder.string());
  }
  return start;
}

int64_t first_batch_size(const TrainerParts& parts, const StartingPoint& start) {
  const TrainingArguments& a = parts.arguments;
  const int64_t rows = a.per_device_train_batch_size * a.gradient_accumulation_steps;
  if (!a.auto_find_batch_size || start.folder.empty()) {
    return a.per_device_train_batch_size;
  }
  const auto then = start.run.at("gradient_accumulation_steps").get<int64_t>();
  return rows % then == 0 ? std::min(a.per_device_train_batch_size, rows / then)
                          : a.per_device_train_batch_size;
}

int64_t step_shift_of(const StartingPoint& start, const TrainingPlan& plan,
                      const TrainerParts& parts, int64_t epoch_rows) {
  if (start.folder.empty()) {
    return 0;
  }
  const auto ceil_of = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const auto epoch = start.run.at("epoch_index").get<int64_t>();
  const auto step = start.run.at("global_step").get<int64_t>();
  int64_t left = 0; // steps left in the current epoch
  if (!start.run.at("at_epoch_end").get<bool>()) {
    const int64_t rows = epoch_rows - start.run.at("epoch_rows_seen").get<int64_t>();
    const int64_t batches = ceil_of(
        rows, parts.arguments.per_device_train_batch_size * parts.accelerator->num_processes());
    left = ceil_of(batches, parts.arguments.gradient_accumulation_steps);
  }
  return (epoch + 1) * plan.steps_per_epoch - step - left;
}

} // namespace hasten::detail
