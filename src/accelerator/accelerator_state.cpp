// Accelerator::save_state. Order of things: every rank says whether it can; one
// makes the folder; all write their part; the one commits it by a rename.
#include "accelerator_state.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>

#include "accelerator_core.h"
#include "hasten/base/error.h"
#include "hasten/io/commit.h"
#include "hasten/io/safetensors.h"
#include "hasten/optim/optimizer_state.h"

namespace hasten {

namespace detail {

constexpr const char* kSaveWhere = "accelerator::save_state";

std::string model_file_name(size_t model) {
  return model == 0 ? "model.safetensors" : "model_" + std::to_string(model) + ".safetensors";
}

std::string rank_file_name(int rank) {
  return "state_rank_" + std::to_string(rank) + ".safetensors";
}

void put_below(NamedTensors& tensors, const std::string& prefix, const NamedTensors& more) {
  for (const auto& [name, tensor] : more) {
    tensors.emplace(prefix + name, tensor);
  }
}

// JSON writes null for NaN and infinity: a state that lost them is not exact.
void require_finite_values(const nlohmann::json& values, const std::string& whose) {
  if (values.is_number_float() && !std::isfinite(values.get<double>())) {
    throw InputError(kSaveWhere,
                     "the JSON values of " + whose + " hold a number that is not finite",
                     "finite numbers", "keep it in a tensor");
  }
  if (values.is_structured()) {
    for (const auto& value : values) {
      require_finite_values(value, whose);
    }
  }
}

nlohmann::json save_stateful(const Stateful& object, const std::string& name, NamedTensors& tensors,
                             const std::string& prefix) {
  NamedTensors own;
  nlohmann::json values = nlohmann::json::object();
  object.save_state(own, values);
  require_finite_values(values, name);
  put_below(tensors, prefix, own);
  return values;
}

ParameterNames AcceleratorCore::parameter_names() const {
  ParameterNames names;
  for (const auto& [parameter, owner] : parameter_owner_) {
    names[parameter] = "model." + std::to_string(owner.first) + "." + owner.second;
  }
  return names;
}

void AcceleratorCore::collect_learners(StateParts& parts) const {
  const ParameterNames names = parameter_names();
  auto& values = parts.shared_values;
  values["optimizers"] = nlohmann::json::array();
  for (size_t i = 0; i < optimizers_.size(); ++i) {
    const std::string prefix = "optimizer." + std::to_string(i) + ".";
    const auto& optimizer = *optimizers_[i]->optimizer;
    nlohmann::json saved = {{"stepped", optimizers_[i]->stepped}};
    if (const auto* own = dynamic_cast<const Stateful*>(&optimizer)) {
      saved["values"] = save_stateful(*own, prefix, parts.shared, prefix);
    } else {
      NamedTensors moments;
      save_optimizer_state(optimizer, names, moments, saved["values"]);
      put_below(parts.shared, prefix, moments);
    }
    values["optimizers"].push_back(std::move(saved));
  }
  values["schedulers"] = nlohmann::json::array();
  for (size_t i = 0; i < schedulers_.size(); ++i) {
    const std::string prefix = "scheduler." + std::to_string(i) + ".";
    if (!schedulers_[i]->stateful) {
      throw InputError(kSaveWhere,
                       "scheduler " + std::to_string(i) + " is of a type whose state is not known",
                       "LRScheduler, one of torch's LRSchedulers, or a hasten::Stateful",
                       "derive it from hasten::Stateful");
    }
    values["schedulers"].push_back(
        {{"stepped", schedulers_[i]->stepped},
         {"values", save_stateful(*schedulers_[i]->stateful, prefix, parts.shared, prefix)}});
  }
}

void AcceleratorCore::collect_windows(StateParts& parts) const {
  auto& own = parts.own_values;
  own["windows"] = nlohmann::json::object();
  for (const auto& [mask, saved] : windows_) {
    const std::string name = std::to_string(mask);
    own["windows"][name] = save_stateful(saved, "the window", parts.own, "window." + name + ".");
  }
  auto& shared = parts.shared_values;
  shared["open_window"] = false;
  shared["models"] = nlohmann::json::array();
  for (const ModelState& model : models_) {
    nlohmann::json names = nlohmann::json::array();
    for (const auto& [name, tensor] : named_model_tensors(*model.parallel->module())) {
      names.push_back(name);
    }
    uint64_t mask = 0;
    for (const auto& [other, candidate] : windows_) {
      if (&candidate == model.window) {
        mask = other;
      }
    }
    if (in_window(model)) {
      shared["open_window"] = true;
    }
    shared["models"].push_back({{"tensors", std::move(names)},
                                {"window", mask},
                                {"completed", model.completed},
                                {"outside", model.outside},
                                {"non_finite", model.non_finite}});
  }
  shared["step_history"] = shared_->steps;
  shared["accumulates"] = accumulates_;
  shared["loss_scale"] = saved_loss_scale();
  if (local_scope_ != nullptr && scales()) {
    own["loss_scale"] = saved_loss_scale();
  }
  // The gradients of a window that is complete are the same on every rank.
  // A communication hook's errors are each rank's own.
  shared["comm_hooks"] = std::any_of(models_.begin(), models_.end(), [](const ModelState& model) {
    return model.parallel->comm_hook() != nullptr;
  });
  shared["strategy"] = strategy_name(strategy_in_use());
  if (shard_group_) {
    shared["shard_size"] = shard_ranks();
  }
  const bool per_rank = shared.at("open_window").get<bool>() ||
                        shared.at("comm_hooks").get<bool>() || shared.at("local").get<bool>() ||
                        strategy_in_use() != Strategy::ddp;
  auto& gradients = per_rank ? own["gradients"] : shared["gradients"];
  gradients = nlohmann::json::array();
  for (size_t i = 0; i < models_.size(); ++i) {
    const std::string prefix = "gradients." + std::to_string(i) + ".";
    gradients.push_back(
        save_stateful(*models_[i].parallel, prefix, per_rank ? parts.own : parts.shared, prefix));
  }
}

StateParts AcceleratorCore::collect_state() const {
  StateParts parts;
  collect_local(parts);
  collect_windows(parts);
  collect_learners(parts);
  auto& own = parts.own_values;
  auto& shared = parts.shared_values;
  shared["format"] = 1;
  shared["hasten_version"] = HASTEN_VERSION;
  shared["world_size"] = world.world_size;
  shared["windows_completed"] = serial_;
  shared["seed"] = options.seed ? nlohmann::json(*options.seed) : nullptr;
  own["loaders"] = nlohmann::json::array();
  for (size_t i = 0; i < loaders_.size(); ++i) {
    const std::string prefix = "loader." + std::to_string(i) + ".";
    const auto position = loaders_[i]->position.lock();
    own["loaders"].push_back(
        position == nullptr
            ? nlohmann::json() // nobody can iterate it any more
            : nlohmann::json{{"training", loaders_[i]->training},
                             {"position", save_stateful(*position, prefix, parts.own, prefix)}});
  }
  shared["objects"] = nlohmann::json::object();
  own["objects"] = nlohmann::json::object();
  for (const RegisteredObject& object : objects_) {
    const bool per_rank = object.scope == StateScope::per_rank;
    const std::string prefix = "object." + object.name + ".";
    nlohmann::json values = save_stateful(*object.object, "\"" + object.name + "\"",
                                          per_rank ? parts.own : parts.shared, prefix);
    shared["objects"][object.name] = {{"scope", per_rank ? "per_rank" : "shared"}};
    (per_rank ? own["objects"][object.name] : shared["objects"][object.name]["values"]) =
        std::move(values);
  }
  std::vector<at::Tensor> random = random_states(device);
  for (const auto& loader : loaders_) {
    if (!loader->random.empty() && !loader->loop.expired()) {
      random = loader->random; // what a stand-in draws is taken back
    }
  }
  parts.own["random.cpu"] = random[0];
  if (device.is_cuda()) {
    parts.own["random.cuda"] = random[1];
  }
  split_shards(parts, shards(), held_rows(), shard_ranks(), world.rank < shard_ranks());
  return parts;
}

// Model files. What the user's own file holds already is not written again; what
// it lacks goes with the rest of the state.
void AcceleratorCore::write_models(const std::filesystem::path& folder,
                                   NamedTensors& shared) const {
  for (size_t i = 0; i < models_.size(); ++i) {
    const auto path = folder / model_file_name(i);
    NamedTensors tensors = named_model_tensors(*models_[i].parallel->module());
    if (holds_parts(i)) { // parameters are in the ranks' files
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
        kSaveWhere, folder.string() + " holds something else than a state: it has no " + kStateFile,
        "a new or empty folder, or one that holds a state", "name another folder");
  }
  return std::make_unique<FolderCommit>(folder, CommitMode::replace);
}

void AcceleratorCore::write_shared(FolderCommit& commit, StateParts& parts,
                                   const SaveStateOptions& options) {
  if (options.also_write && strategy_in_use() == Strategy::ddp) {
    options.also_write(commit.folder());
  }
  write_models(commit.folder(), parts.shared);
  write_safetensors(commit.folder() / kStateTensorsFile, parts.shared);
  commit.write(kStateFile, parts.shared_values.dump(2) + "\n");
}

// Collective. `request` is null on ranks that only take part.
void AcceleratorCore::write_state(const std::filesystem::path* folder,
                                  const SaveStateOptions* request) {
  StateParts parts;
  const auto answers = on_every_rank(*communicator, kSaveWhere, [&] {
    reshard(kSaveWhere);
    parts = collect_state();
    return nlohmann::json{
        {"folder", folder != nullptr ? nlohmann::json(folder->string()) : nullptr},
        {"also", request != nullptr && request->also_write != nullptr},
        {"open_window", parts.shared_values.at("open_window")}};
  });
  int leader = -1;
  nlohmann::json asked;
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    const auto& theirs = answers[rank].at("folder");
    if (!theirs.is_null() && leader < 0) {
      leader = static_cast<int>(rank);
      asked = theirs;
    }
    if (answers[rank].at("open_window") != answers[0].at("open_window") ||
        (!theirs.is_null() && theirs != asked)) {
      throw InputError(
          kSaveWhere,
          "rank " + std::to_string(rank) +
              " saves another folder, or stands elsewhere in its window, than the ranks before it",
          "the same call at the same place of the loop on every rank");
    }
  }
  const bool leads = leader == world.rank;
  std::unique_ptr<FolderCommit> commit;
  const auto folders = on_every_rank(*communicator, kSaveWhere, [&] {
    if (!leads) {
      return nlohmann::json();
    }
    commit = begin_state_folder(*folder, *request);
    return nlohmann::json(commit->folder().string());
  });
  const bool also = answers[static_cast<size_t>(leader)].at("also").get<bool>();
  if (also && strategy_in_use() != Strategy::ddp) {
    summon_full_params(
        models_in(~uint64_t{0}), [&] { request->also_write(commit->folder()); }, leader);
  }
  on_every_rank(*communicator, kSaveWhere, [&] {
    const std::filesystem::path place = folders[static_cast<size_t>(leader)].get<std::string>();
    write_safetensors(place / rank_file_name(world.rank), parts.own,
                      {{"format", "pt"}, {"values", parts.own_values.dump()}});
    if (leads) {
      write_shared(*commit, parts, *request);
    }
    return nlohmann::json();
  });
  on_every_rank(*communicator, kSaveWhere, [&] {
    if (leads) {
      commit->commit();
    }
    return nlohmann::json();
  });
}

// Note [Saving while peers have run out]
// A rank whose batches have ended waits in its loader's end for what the others
// still do. A control vector without models says that a state is to be saved. Stale
// ranks get what the others have; then all take part.
void AcceleratorCore::save_state(const std::filesystem::path& folder,
                                 const SaveStateOptions& request) {
  bool in_pass = false;
  for (const auto& loader : training_) {
    in_pass = in_pass || loader->open;
  }
  bool joined = false;
  if (in_pass && communicator->world_size() > 1) {
    control_.start({}, at::Tensor());
    const WindowTotals totals = control_.wait();
    joined = totals.finished > 0;
    if (totals.stale > 0) {
      share_learners();
    }
  }
  sync_announced(~uint64_t{0}, joined, true);
  write_state(&folder, &request);
}

void AcceleratorCore::save_with_peers() {
  sync_announced(~uint64_t{0}, true, false);
  try {
    write_state(nullptr, nullptr);
  } catch (const CommunicationError&) {
    throw;
  } catch (const Error&) {
    // Those who asked for the state have the error, and decide.
  }
}

void AcceleratorCore::register_object(std::string name, std::shared_ptr<Stateful> object,
                                      StateScope scope) {
  constexpr const char* kWhere = "accelerator::register_for_checkpointing";
  if (name.empty() || !object) {
    throw InputError(kWhere, "name=\"" + name + "\"" + (object ? "" : ", object=null"),
                     "a name and an object");
  }
  for (RegisteredObject& other : objects_) {
    if (other.name == name) {
      // Its owner is gone, or gives it again.
      if (other.object.use_count() == 1 || other.object == object) {
        other = {std::move(name), std::move(object), scope};
        return;
      }
      throw InputError(kWhere, "name=\"" + name + "\" is taken", "a name of its own");
    }
  }
  objects_.push_back({std::move(name), std::move(object), scope});
}

} // namespace detail

void Accelerator::save_state(const std::filesystem::path& folder, const SaveStateOptions& options) {
  core_->save_state(folder, options);
}

LoadedState Accelerator::load_state(const std::filesystem::path& folder,
                                    const LoadStateOptions& options) {
  return core_->load_state(folder, options);
}

void Accelerator::register_for_checkpointing(std::string name, std::shared_ptr<Stateful> object,
                                             StateScope scope) {
  core_->register_object(std::move(name), std::move(object), scope);
}

void Accelerator::register_for_checkpointing(std::string name, Stateful& object, StateScope scope) {
  core_->register_object(std::move(name),
                         std::shared_ptr<Stateful>(std::shared_ptr<void>(), &object), scope);
}

} // namespace hasten
