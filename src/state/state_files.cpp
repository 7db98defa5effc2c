// Reads the files of a saved state, and loads objects with undo.
#include <cmath>
#include <filesystem>

#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/io/commit.h"
#include "hasten/io/safetensors.h"
#include "state_contents.h"

namespace hasten::detail {

void refuse_state(const std::filesystem::path& file, const std::string& what,
                  const std::string& expected, const std::string& fix) {
  throw InputError(kLoadWhere, file.string() + ": " + what, expected, fix);
}

// Tensors of files that are not read whole are mapped: no copy.
NamedTensors map_tensors(const SafetensorsReader& reader) {
  NamedTensors tensors;
  for (const std::string& name : reader.names()) {
    tensors.emplace(name, reader.tensor(name));
  }
  for (const auto& [name, stored] : reader.metadata()) {
    if (reader.contains(name) && tensors.count(stored) > 0) {
      tensors.emplace(name, tensors.at(stored)); // tied
    }
  }
  return tensors;
}

void read_state_files(StateToLoad& load, int rank, int world_size, bool verify) {
  std::error_code error;
  if (!std::filesystem::is_directory(load.folder, error)) {
    throw InputError(kLoadWhere, load.folder.string() + " is not a folder", "a saved state");
  }
  if (verify && rank == 0) {
    verify_manifest(load.folder);
  } else {
    read_manifest(load.folder);
  }
  if (!std::filesystem::exists(load.state_file(), error)) {
    refuse_state(load.state_file(),
                 "the file is missing: the folder holds a model without its training state",
                 "a folder that save_state() wrote");
  }
  load.shared = read_json_file(kLoadWhere, load.state_file());
  if (load.shared.at("format") != 1) {
    refuse_state(load.state_file(), "format=" + load.shared.at("format").dump(), "1",
                 "load it with the version that saved it");
  }
  load.same_world = load.shared.at("world_size") == world_size;
  load.shared_tensors = map_tensors(SafetensorsReader(load.folder / kStateTensorsFile));
  load.rank_file = load.folder / rank_file_name(load.same_world ? rank : 0);
  for (int other = 1; !load.same_world && !std::filesystem::exists(load.rank_file, error) &&
                      other < load.shared.at("world_size").get<int>();
       ++other) { // any will do; a host may have only its own
    load.rank_file = load.folder / rank_file_name(other);
  }
  const SafetensorsReader reader(load.rank_file);
  load.own_tensors = map_tensors(reader);
  const auto values = reader.metadata().find("values");
  if (values == reader.metadata().end()) {
    refuse_state(load.rank_file, "it lacks its values", "a file of a state");
  }
  load.own = parse_json(kLoadWhere, load.rank_file.string() + ": its values", values->second);
}

// Throws for state that has no meaning with another number of ranks.
void check_other_world(const StateToLoad& load, int world_size) {
  if (load.same_world) {
    return;
  }
  const std::string then = load.shared.at("world_size").dump();
  const std::string fix = "resume with " + then + " processes";
  const std::string worlds = then + " processes, here there are " + std::to_string(world_size);
  const auto refuse_if = [&](bool bad, const char* what, const char* owner, const char* or_else) {
    if (bad) {
      refuse_state(load.state_file(), std::string("it was saved ") + what + " by " + worlds,
                   std::string("the same number of processes: ") + owner, fix + or_else);
    }
  };
  refuse_if(load.shared.at("open_window").get<bool>(), "in the middle of an accumulation window",
            "partial gradients belong to ranks", ", or save where sync_gradients() is true");
  refuse_if(load.shared.at("comm_hooks").get<bool>(), "with a communication hook",
            "a hook's state belongs to ranks", "");
  refuse_if(load.shared.value("local", false), "inside a LocalSGD scope",
            "each has its own parameters", ", or save after finish()");
  for (const auto& [name, object] : load.shared.at("objects").items()) {
    if (object.at("scope") == "per_rank") {
      refuse_state(load.state_file(), "\"" + name + "\" has a state per rank, of " + worlds,
                   "the same number of processes", fix);
    }
  }
  for (const auto& loader : load.own.at("loaders")) {
    if (!loader.is_null() && loader.at("position").at("cursor") != 0 &&
        loader.at("position").at("unit") == "rank batches") {
      refuse_state(load.rank_file,
                   "the position of a range with its own shard() is known for " + then +
                       " processes only, here there are " + std::to_string(world_size),
                   "the same number of processes, or a range with set_cursor()", fix);
    }
  }
}

void check_count(const StateToLoad& load, const char* what, size_t saved, size_t mine) {
  if (saved != mine) {
    refuse_state(load.state_file(), std::string(what) + "=" + std::to_string(saved),
                 "the " + std::to_string(mine) + " that are prepared here");
  }
}

std::string model_file_name(size_t model) {
  return model == 0 ? "model.safetensors" : "model_" + std::to_string(model) + ".safetensors";
}

std::string rank_file_name(int rank) {
  return "state_rank_" + std::to_string(rank) + ".safetensors";
}

// JSON writes null for NaN and infinity, so the state would not be exact.
void require_finite_values(const nlohmann::json& values, const std::string& whose) {
  if (values.is_number_float() && !std::isfinite(values.get<double>())) {
    throw InputError(kSaveWhere, "the JSON values of " + whose + " have a value that is not finite",
                     "finite values", "keep it in a tensor");
  }
  if (values.is_structured()) {
    for (const auto& value : values) {
      require_finite_values(value, whose);
    }
  }
}

nlohmann::json save_stateful(const Stateful& object, const std::string& name, NamedTensors& tensors,
                             const std::string& prefix) {
  nlohmann::json values = save_below(object, tensors, prefix);
  require_finite_values(values, name);
  return values;
}

void undo_objects(const StateToLoad& load, size_t count) {
  while (count-- > 0) {
    const ObjectToLoad& object = load.objects[count];
    object.object->load_state(object.old_tensors, object.old_values);
  }
}

void load_objects(StateToLoad& load) {
  for (ObjectToLoad& object : load.objects) {
    object.object->save_state(object.old_tensors, object.old_values);
    clone_tensors(object.old_tensors);
  }
  size_t done = 0;
  try {
    for (; done < load.objects.size(); ++done) {
      ObjectToLoad& object = load.objects[done];
      try {
        object.object->load_state(object.tensors, object.values);
      } catch (const nlohmann::json::exception& error) {
        refuse_state(object.file, error.what());
      } catch (const InputError& error) {
        refuse_state(object.file, error.what());
      }
    }
  } catch (...) {
    undo_objects(load, done);
    throw;
  }
}

} // namespace hasten::detail
