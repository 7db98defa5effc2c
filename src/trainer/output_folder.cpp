#include "hasten/trainer/output_folder.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string>
#include <string_view>
#include <system_error>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/text.h"

namespace hasten {

namespace detail {

namespace fs = std::filesystem;

constexpr std::string_view kCheckpointPrefix = "checkpoint-";
/// Records of a run: removed by clear_output_dir.
constexpr const char* kRunRecords[] = {
    "metrics.jsonl",     "trainer_state.json", kRunFile,          "train_results.json",
    "eval_results.json", "all_results.json",   "checkpoint-best", kReportFile};

/// N of "checkpoint-N"; empty for other names.
std::optional<int64_t> checkpoint_number(const std::string& name) {
  const auto number =
      name.starts_with(kCheckpointPrefix)
          ? parse_number<int64_t>(std::string_view(name).substr(kCheckpointPrefix.size()))
          : std::nullopt;
  return number.value_or(-1) < 0 ? std::nullopt : number;
}

void remove_tree(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) {
    throw Error("trainer::output_folder",
                "cannot remove path=" + path.string() + " (" + error.message() + ")", {}, {},
                kind_of_errno(error.value()));
  }
}

/// Renames it first. If this process is killed, the rest is no checkpoint, and
/// remove_unfinished_saves() removes it.
void remove_checkpoint(const fs::path& path) {
  fs::path renamed;
  const int error = make_beside(path, ".tmp-", renamed, [&](const auto& name) {
    return ::rename(path.c_str(), name.c_str()) == 0 ? 0 : errno;
  });
  remove_tree(error == 0 ? renamed : path);
}

} // namespace detail

std::vector<CheckpointFolder> checkpoint_folders(const std::filesystem::path& folder) {
  std::vector<CheckpointFolder> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const auto number = detail::checkpoint_number(entry.path().filename().string());
    if (number && entry.is_directory(error)) {
      found.push_back({*number, entry.path()});
    }
  }
  std::ranges::sort(found, {}, &CheckpointFolder::global_step);
  return found;
}

std::filesystem::path trace_of_a_run(const std::filesystem::path& folder) {
  const auto checkpoints = checkpoint_folders(folder);
  if (!checkpoints.empty()) {
    return checkpoints.front().path;
  }
  std::vector<const char*> names(std::begin(detail::kRunRecords), std::end(detail::kRunRecords));
  names.insert(names.end(), {"model.safetensors", "training_args.json"}); // of a model
  for (const char* name : names) {
    std::error_code error;
    if (std::filesystem::exists(folder / name, error)) {
      return folder / name;
    }
  }
  return {};
}

void require_free_output_dir(const TrainingArguments& arguments) {
  const std::filesystem::path folder = arguments.output_dir;
  if (folder.empty()) {
    return;
  }
  std::error_code error;
  if (std::filesystem::exists(folder, error) && !std::filesystem::is_directory(folder, error)) {
    throw InputError("trainer::output_folder", "output_dir=" + folder.string() + " is a file",
                     "a folder, or a path where a folder can be made");
  }
  const auto trace = trace_of_a_run(folder);
  if (!trace.empty() && !arguments.overwrite_output_dir) {
    throw InputError(
        "trainer::output_folder",
        "output_dir=" + folder.string() + " holds another run (" + trace.filename().string() + ")",
        "a new or empty folder",
        "choose another folder, or set overwrite_output_dir "
        "(--overwrite-output-dir) to replace that run");
  }
}

void clear_output_dir(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    throw InputError("trainer::output_folder",
                     "cannot make output_dir=" + folder.string() + " (" + error.message() + ")",
                     "a path where this user can make a folder");
  }
  for (const CheckpointFolder& checkpoint : checkpoint_folders(folder)) {
    detail::remove_checkpoint(checkpoint.path);
  }
  for (const char* name : detail::kRunRecords) {
    detail::remove_tree(folder / name);
  }
  remove_unfinished_saves(folder);
}

void link_best_checkpoint(const std::filesystem::path& folder, std::optional<int64_t> step) {
  const std::string target =
      std::string(detail::kCheckpointPrefix) + std::to_string(step.value_or(-1));
  const std::filesystem::path link = folder / "checkpoint-best";
  std::error_code error;
  if (!std::filesystem::exists(folder / target, error)) {
    std::filesystem::remove(link, error);
    return;
  }
  std::filesystem::path made;
  const int failed = make_beside(link, ".tmp-", made, [&](const auto& name) {
    return ::symlink(target.c_str(), name.c_str()) == 0 ? 0 : errno;
  });
  if (failed == 0 && ::rename(made.c_str(), link.c_str()) != 0) {
    ::unlink(made.c_str());
  }
}

void remove_unfinished_saves(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> found;
  std::error_code error;
  // A link is followed: the files are in and next to its target.
  auto real = std::filesystem::weakly_canonical(folder, error);
  if (!real.has_filename()) {
    real = real.parent_path();
  }
  const std::string beside = real.filename().string() + ".tmp-";
  for (const auto& in : {real, real.parent_path()}) {
    for (const auto& entry : std::filesystem::directory_iterator(in, error)) {
      const std::string name = entry.path().filename().string();
      if (is_temporary_name(name) && (in == real || name.rfind(beside, 0) == 0)) {
        found.push_back(entry.path());
      }
    }
  }
  for (const auto& path : found) {
    detail::remove_tree(path);
  }
}

std::vector<std::filesystem::path> rotate_checkpoints(const std::filesystem::path& folder,
                                                      int64_t limit,
                                                      std::optional<int64_t> best_step) {
  std::vector<std::filesystem::path> removed;
  if (limit <= 0) {
    return removed;
  }
  const auto checkpoints = checkpoint_folders(folder);
  auto surplus = static_cast<int64_t>(checkpoints.size()) - limit;
  for (size_t i = 0; i + 1 < checkpoints.size() && surplus > 0; ++i) {
    if (checkpoints[i].global_step != best_step) {
      detail::remove_checkpoint(checkpoints[i].path);
      removed.push_back(checkpoints[i].path);
      --surplus;
    }
  }
  return removed;
}

void keep_only_checkpoint(const std::filesystem::path& folder, int64_t step) {
  const auto checkpoints = checkpoint_folders(folder);
  const bool exists = std::ranges::count(checkpoints, step, &CheckpointFolder::global_step) > 0;
  for (const CheckpointFolder& checkpoint : checkpoints) {
    if (exists && checkpoint.global_step != step) {
      detail::remove_checkpoint(checkpoint.path);
    }
  }
}

} // namespace hasten
