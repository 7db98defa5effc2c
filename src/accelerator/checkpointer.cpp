// Saving. The order: every rank reports whether it can save, one rank creates the folder, all write
// their part, and the one commits it by a rename.
#include "checkpointer.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <optional>

#include "accelerator_core.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/text.h"
#include "hasten/io/commit.h"
#include "hasten/io/safetensors.h"
#include "state/host_folders.h"

namespace hasten::detail {

void Checkpointer::collect_models(StateToSave& parts) const {
  auto& own = parts.own_values;
  auto& shared = parts.shared_values;
  shared["models"] = nlohmann::json::array();
  bool hooks = false;
  for (size_t i = 0; i < models_.size(); ++i) {
    nlohmann::json names = nlohmann::json::array();
    for (const auto& [name, tensor] : models_.saved_tensors(i)) {
      names.push_back(name);
    }
    shared["models"].push_back(
        {{"tensors", std::move(names)}, {"non_finite", checks_.non_finite(i)}});
    hooks = hooks || models_[i].parallel->comm_hook() != nullptr;
  }
  windows_.collect(parts);
  shared["loss_scale"] = precision_.save();
  shared["comm_hooks"] = hooks;
  shared["strategy"] = strategy_name(run_.strategy());
  if (models_.shard_group()) {
    shared["shard_size"] = models_.ranks_per_replica();
  }
  // The gradients of a window that is complete are the same on every rank.
  // A communication hook's errors are each rank's own.
  const bool per_rank = shared.at("open_window").get<bool>() || hooks ||
                        shared.at("local").get<bool>() || run_.strategy() != Strategy::ddp;
  auto& gradients = per_rank ? own["gradients"] : shared["gradients"];
  gradients = nlohmann::json::array();
  for (size_t i = 0; i < models_.size(); ++i) {
    const std::string prefix = "gradients." + std::to_string(i) + ".";
    gradients.push_back(
        save_stateful(*models_[i].parallel, prefix, per_rank ? parts.own : parts.shared, prefix));
  }
}

void Checkpointer::collect_objects(StateToSave& parts) const {
  auto& shared = parts.shared_values["objects"] = nlohmann::json::object();
  auto& own = parts.own_values["objects"] = nlohmann::json::object();
  for (const RegisteredObject& object : objects_) {
    const bool per_rank = object.scope == StateScope::per_rank;
    const std::string prefix = "object." + object.name + ".";
    nlohmann::json values = save_stateful(*object.object, "\"" + object.name + "\"",
                                          per_rank ? parts.own : parts.shared, prefix);
    shared[object.name] = {{"scope", per_rank ? "per_rank" : "shared"}};
    (per_rank ? own[object.name] : shared[object.name]["values"]) = std::move(values);
  }
}

StateToSave Checkpointer::collect() const {
  StateToSave parts;
  local_.collect(parts);
  collect_models(parts);
  optimizers_.collect(parts);
  loaders_.collect(parts, run_.device());
  collect_objects(parts);
  auto& shared = parts.shared_values;
  shared["format"] = 1;
  shared["hasten_version"] = HASTEN_VERSION;
  shared["world_size"] = run_.world().world_size;
  shared["seed"] = run_.options().seed ? nlohmann::json(*run_.options().seed) : nullptr;
  return parts;
}

// Model files. Tensors that the user's own file has are not written again; missing ones go with the
// rest of the state.
void Checkpointer::write_models(const std::filesystem::path& folder, NamedTensors& shared) const {
  for (size_t i = 0; i < models_.size(); ++i) {
    const auto path = folder / model_file_name(i);
    NamedTensors tensors = models_.saved_tensors(i);
    if (models_.holds_parts(i)) { // parameters are in the ranks' files
      for (const auto& item : models_[i].parallel->module()->named_parameters()) {
        tensors.erase(item.key());
      }
    }
    if (!std::filesystem::exists(path)) {
      write_safetensors(path, tensors);
      continue;
    }
    const SafetensorsReader written(path);
    for (const auto& [name, tensor] : tensors) {
      if (written.contains(name)) {
        const at::Tensor there = written.tensor(name);
        if (there.scalar_type() == tensor.scalar_type() && there.sizes() == tensor.sizes() &&
            at::equal(there, tensor.cpu())) {
          continue;
        }
      }
      shared.emplace("model." + std::to_string(i) + "." + name, tensor);
    }
  }
}

std::unique_ptr<FolderCommit> begin_state_folder(const std::filesystem::path& folder,
                                                 const SaveStateOptions& options) {
  std::error_code error;
  const auto status = std::filesystem::status(folder, error);
  if (std::filesystem::is_directory(status) && !options.replace_any &&
      !std::filesystem::is_empty(folder, error) &&
      !std::filesystem::exists(folder / kStateFile, error)) {
    throw InputError(
        kSaveWhere,
        folder.string() + " holds something other than a state: it has no " + kStateFile,
        "a new or empty folder, or one that holds a state", "use another folder");
  }
  return std::make_unique<FolderCommit>(folder, CommitMode::replace);
}

void Checkpointer::write_shared(FolderCommit& commit, StateToSave& parts,
                                const SaveStateOptions& options) {
  if (options.also_write && run_.strategy() == Strategy::ddp) {
    options.also_write(commit.folder());
  }
  write_models(commit.folder(), parts.shared);
  write_safetensors(commit.folder() / kStateTensorsFile, parts.shared);
  commit.write(kStateFile, parts.shared_values.dump(2) + "\n");
}

// Hosts may call the folder's parent differently.
void require_one_place(const std::vector<nlohmann::json>& answers) {
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    const auto& on_host = answers[answers[rank].at("host").get<size_t>()];
    if (answers[rank].at("place") != answers[0].at("place") ||
        answers[rank].at("folder") != on_host.at("folder")) {
      throw InputError(
          kSaveWhere,
          "rank " + std::to_string(rank) +
              " saves another folder, or is elsewhere in its window, than the ranks before it",
          "the same call at the same place of the loop on every rank");
    }
  }
}

void Checkpointer::save(const std::filesystem::path& folder, const SaveStateOptions& options) {
  if (loaders_.in_pass() && !run_.alone()) {
    batch_.agree({.buffers = true}); // finds ranks that are elsewhere
  }
  sync_buffers(models_);
  StateToSave parts;
  const auto path = folder.has_filename() ? folder : folder.parent_path();
  std::error_code error;
  const auto place = folder_of(std::filesystem::is_symlink(path, error)
                                   ? std::filesystem::weakly_canonical(path, error)
                                   : path);
  const int first = ranks_of_host(*run_.communicator()).front();
  const bool hosts = on_several_hosts(*run_.communicator());
  std::optional<HostMark> mark;
  const auto answers = on_every_rank(*run_.communicator(), kSaveWhere, [&] {
    models_.reshard(kSaveWhere);
    parts = collect();
    if (hosts) {
      mark.emplace(*run_.communicator(), place);
    }
    return nlohmann::json{
        {"mark", mark ? mark->said() : nlohmann::json()},
        {"place", {path.filename().string(), parts.shared_values.at("open_window")}},
        {"folder", path.string()},
        {"host", first},
        {"also", options.also_write != nullptr}};
  });
  require_one_place(answers);
  const HostFolders folders =
      hosts ? find_host_folders(
                  *run_.communicator(), kSaveWhere, place,
                  mapped(answers, [](const auto& answer) { return answer.at("mark"); }), 1)
            : one_folder(run_.world().world_size);
  require_replicas(folders, options.replicas, kSaveWhere);
  const int rank = run_.world().rank;
  const auto writer = static_cast<size_t>(folders.writer[static_cast<size_t>(rank)]);
  std::unique_ptr<FolderCommit> commit;
  const auto made = on_every_rank(*run_.communicator(), kSaveWhere, [&] {
    if (rank != folders.writer[static_cast<size_t>(rank)]) {
      return nlohmann::json();
    }
    commit = begin_state_folder(folder, options);
    return nlohmann::json(commit->folder().string());
  });
  if (answers[0].at("also").get<bool>() && run_.strategy() != Strategy::ddp) {
    models_.summon_full_params(models_.in(~uint64_t{0}),
                               [&] { options.also_write(commit->folder()); });
  }
  if (folders.several()) {
    parts.shared_values["placement"] = folders.placement();
  }
  on_every_rank(*run_.communicator(), kSaveWhere, [&] {
    std::filesystem::path own = made[writer].get<std::string>();
    if (answers[writer].at("host") != first) { // another host may call it otherwise
      own = place / own.filename();
    }
    require_apart(folders, rank, place);
    split_shards(parts, models_.shards(), models_.held_rows(), models_.ranks_per_replica(), rank,
                 folders.writer);
    write_safetensors(own / rank_file_name(rank), parts.own,
                      {{"format", "pt"}, {"values", parts.own_values.dump()}});
    if (commit) {
      write_shared(*commit, parts, options);
    }
    return nlohmann::json();
  });
  mark.reset();
  if (folders.several()) {
    share_files(*run_.communicator(), folders, options.replicas, commit.get());
  }
  on_every_rank(*run_.communicator(), kSaveWhere, [&] {
    if (commit) {
      commit->commit();
    }
    return nlohmann::json();
  });
}

void Checkpointer::add(std::string name, std::shared_ptr<Stateful> object, StateScope scope) {
  constexpr const char* kWhere = "accelerator::register_for_checkpointing";
  if (name.empty() || !object) {
    throw InputError(kWhere, "name=\"" + name + "\"" + (object ? "" : ", object=null"),
                     "a name and an object");
  }
  for (RegisteredObject& other : objects_) {
    if (other.name == name) {
      // Its owner is gone, or registers it again.
      if (other.object.use_count() == 1 || other.object == object) {
        other = {std::move(name), std::move(object), scope};
        return;
      }
      throw InputError(kWhere, "name=\"" + name + "\" is taken", "a unique name");
    }
  }
  objects_.push_back({std::move(name), std::move(object), scope});
}

} // namespace hasten::detail
