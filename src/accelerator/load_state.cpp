// Accelerator::load_state. It reads and compares everything first. Then objects that may throw
// load, while their old state is kept. The rest cannot fail.
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <mutex>
#include <set>

#include "accelerator_core.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/log.h"
#include "hasten/core/device.h"
#include "hasten/core/random.h"
#include "hasten/io/commit.h"
#include "hasten/io/safetensors.h"
#include "state/host_folders.h"
#include "state/state_contents.h"

namespace hasten::detail {

void add_model(StateToLoad& load, size_t index, const NamedTensors& targets,
               const HeldRowsByName& held) {
  const auto file = load.folder / model_file_name(index);
  const SafetensorsReader reader(file);
  const auto listed = load.shared.at("models").at(index).at("tensors").get<std::set<std::string>>();
  for (const std::string& name : listed) {
    if (targets.count(name) == 0) {
      refuse_state(file, "tensor \"" + name + "\" belongs to another model",
                   "tensors of the prepared model, which has none with this name");
    }
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const auto& [name, target] : targets) {
    const auto apart = load.shared_tensors.find("model." + std::to_string(index) + "." + name);
    const bool is_apart = apart != load.shared_tensors.end();
    if (!is_apart && !reader.contains(name)) {
      refuse_state(file, "the model's tensor \"" + name + "\" is missing",
                   "a state of the prepared model");
    }
    at::Tensor saved = is_apart ? apart->second : reader.tensor(name);
    const auto rows = held.find("model." + std::to_string(index) + "." + name);
    if (!is_apart && rows != held.end() && saved.sizes() == rows->second.sizes) {
      saved = rows_of_whole(saved, rows->second);
    }
    if (saved.sizes() != target.sizes() || saved.scalar_type() != target.scalar_type()) {
      refuse_state(
          is_apart ? load.folder / kStateTensorsFile : file,
          "tensor \"" + name + "\" has shape " + c10::str(saved.sizes()) + " " +
              c10::toString(saved.scalar_type()),
          "the model's " + c10::str(target.sizes()) + " " + c10::toString(target.scalar_type()));
    }
    copies.emplace_back(target, saved);
  }
  load.copy(std::move(copies));
}

void Checkpointer::add_models(StateToLoad& load) {
  const auto& models = load.shared.at("models");
  check_count(load, "models", models.size(), models_.size());
  const HeldRowsByName held = models_.held_rows();
  std::vector<bool> non_finite;
  for (size_t i = 0; i < models_.size(); ++i) {
    add_model(load, i, models_.saved_tensors(i), held);
    non_finite.push_back(models[i].at("non_finite").get<bool>());
  }
  windows_.add_to(load);
  add_gradients(load);
  const bool open_window = load.shared.at("open_window").get<bool>();
  load.apply.push_back([this, non_finite, open_window] {
    for (size_t i = 0; i < models_.size(); ++i) {
      checks_.set_non_finite(i, non_finite[i]);
    }
    batch_.reset(!open_window);
    optimizers_.forget_done();
    models_.generators_loaded();
  });
}

// False if there are none to load: other ranks hold these shards now. An open window would have
// some.
bool Checkpointer::has_gradients(const StateToLoad& load) const {
  const std::string then = load.shared.value("strategy", "ddp");
  if (then == strategy_name(run_.strategy()) &&
      (then == "ddp" ||
       (load.same_world && load.shared.value("shard_size", models_.ranks_per_replica()) ==
                               models_.ranks_per_replica()))) {
    return true;
  }
  const std::string kind = "gradients.";
  for (const NamedTensors* tensors : {&load.shared_tensors, &load.own_tensors}) {
    const auto first = tensors->lower_bound(kind);
    if (load.shared.at("open_window").get<bool>() ||
        (first != tensors->end() && first->first.starts_with(kind))) {
      refuse_state(load.state_file(),
                   "it was saved with gradients of strategy=" + then + " on " +
                       load.shared.at("world_size").dump() + " ranks",
                   "the same strategy and number of ranks, or no gradients",
                   "save after zero_grad(), when no window is open");
    }
  }
  return false;
}

// Gradients that are not complete yet.
void Checkpointer::add_gradients(StateToLoad& load) {
  if (!has_gradients(load)) {
    return;
  }
  const bool per_rank =
      load.shared.at("open_window").get<bool>() || load.shared.at("comm_hooks").get<bool>() ||
      load.shared.value("local", false) || load.shared.value("strategy", "ddp") != "ddp";
  const auto& gradients = (per_rank ? load.own : load.shared).at("gradients");
  for (size_t i = 0; i < models_.size(); ++i) {
    load.add(per_rank ? load.rank_file : load.folder / kStateTensorsFile, models_[i].parallel.get(),
             tensors_below(per_rank ? load.own_tensors : load.shared_tensors,
                           "gradients." + std::to_string(i) + "."),
             gradients.at(i));
  }
}

void Checkpointer::add_objects(StateToLoad& load) {
  const auto& saved = load.shared.at("objects");
  for (const auto& [name, object] : saved.items()) {
    if (std::ranges::none_of(objects_, [&](const auto& mine) { return mine.name == name; })) {
      refuse_state(load.state_file(),
                   "it has the state of \"" + name + "\", which is not registered here",
                   "the same objects", "register_for_checkpointing(\"" + name + "\", object)");
    }
  }
  for (const RegisteredObject& mine : objects_) {
    const auto found = saved.find(mine.name);
    const bool per_rank = mine.scope == StateScope::per_rank;
    if (found == saved.end() || (found->at("scope") == "per_rank") != per_rank) {
      refuse_state(load.state_file(),
                   "it lacks the state of \"" + mine.name + "\", " +
                       (per_rank ? "per rank" : "shared by all ranks"),
                   "the same objects");
    }
    load.add(per_rank ? load.rank_file : load.state_file(), mine.object.get(),
             tensors_below(per_rank ? load.own_tensors : load.shared_tensors,
                           "object." + mine.name + "."),
             per_rank ? load.own.at("objects").at(mine.name) : found->at("values"));
  }
}

void Checkpointer::add_random(StateToLoad& load) {
  const nlohmann::json& seed = load.shared.at("seed");
  const uint64_t fresh =
      stream_seed("dropout at another world size", seed.is_null() ? 0 : seed.get<uint64_t>(),
                  static_cast<uint64_t>(run_.world().rank),
                  load.shared.at("windows_completed").get<uint64_t>());
  if (!load.same_world) {
    load.apply.push_back([fresh] { at::manual_seed(fresh); });
    return;
  }
  for (const GeneratorState& now : generator_states({run_.device()})) {
    const std::string name = "random." + now.device_name();
    const auto found = load.own_tensors.find(name);
    const bool missing = found == load.own_tensors.end();
    if (missing && !now.generator().device().is_cpu()) { // the state of another device
      load.apply.push_back([generator = now.generator(), fresh]() mutable {
        const std::lock_guard<std::mutex> lock(generator.mutex());
        generator.set_current_seed(fresh);
      });
      continue;
    }
    if (missing) {
      refuse_state(load.rank_file, name + " is missing");
    }
    try {
      load.apply.push_back([state = GeneratorState(now.generator().device(),
                                                   found->second.clone())] { state.restore(); });
    } catch (const c10::Error& error) {
      refuse_state(load.rank_file, name + ": " + error.what_without_backtrace());
    }
  }
}

void Checkpointer::add_to(StateToLoad& load) {
  local_.add_scope_to(load);
  add_models(load);
  optimizers_.add_to(load);
  precision_.add_to(load, [this] { checks_.set_scaled(windows_.serial()); });
  loaders_.add_to(load);
  add_objects(load);
  add_random(load);
  local_.add_to(load);
}

LoadedState Checkpointer::load(const std::filesystem::path& folder,
                               const LoadStateOptions& options) {
  StateToLoad load;
  load.folder = folder;
  bool verify = options.verify_checksums;
  if (on_several_hosts(*run_.communicator())) {
    SavedFolders folders = look_at_folders(*run_.communicator(), kLoadWhere, folder, [&] {
      if (verify) {
        verify_manifest(folder);
      }
    });
    verify = verify && folders.files.size() == 1;
    const HeldRowsByName held = models_.held_rows();
    complete_folders(*run_.communicator(), kLoadWhere, folders, &held);
  }
  on_every_rank(*run_.communicator(), kLoadWhere, [&] {
    models_.reshard(kLoadWhere);
    if (batch_.is_open()) {
      throw InputError(kLoadWhere, "a batch is open", "a call outside accumulate()");
    }
    try {
      read_state_files(load, run_.world().rank, run_.world().world_size, verify);
      check_other_world(load, run_.world().world_size);
      if (join_shards(load, models_.held_rows()) && run_.world().rank == 0) {
        log_info("the shards are not those of the state: moments of 8 bits are rounded again");
      }
      add_to(load);
    } catch (const nlohmann::json::exception& error) {
      refuse_state(load.state_file(), error.what(), "a file of a state");
    }
    return nlohmann::json();
  });
  bool loaded = false;
  try {
    on_every_rank(*run_.communicator(), kLoadWhere, [&] {
      load_objects(load);
      loaded = true;
      return nlohmann::json();
    });
  } catch (...) {
    if (loaded) { // here, but not on another rank
      undo_objects(load, load.objects.size());
    }
    throw;
  }
  for (const auto& apply : load.apply) {
    apply();
  }
  return {load.shared.at("world_size").get<int>(),
          load.shared.at("windows_completed").get<uint64_t>()};
}

} // namespace hasten::detail
