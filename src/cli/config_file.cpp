// Values of flags from a JSON file and from the environment.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <iterator>
#include <map>
#include <set>

#include "flags.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/process.h"

namespace hasten::detail {

/// Flags that a file cannot set.
constexpr std::array kNotInFiles{"--config", "--print-config"};

bool is_in_files(const ConfigEntry& entry) {
  return std::ranges::find(kNotInFiles, entry.names.front()) == kNotInFiles.end();
}

/// The key of "--num-train-epochs" in a configuration file.
std::string config_key(const std::string& flag) {
  std::string key = flag.substr(2);
  std::replace(key.begin(), key.end(), '-', '_');
  return key;
}

nlohmann::json read_config_json(const std::string& where, const std::string& path) {
  std::string text;
  try {
    text = read_file(path);
  } catch (const Error& error) {
    throw InputError(where, "--config=" + path + " cannot be read", "a JSON file");
  }
  const nlohmann::json json = parse_json(where, "--config=" + path, text, {.comments = true});
  if (!json.is_object()) {
    throw InputError(where, "--config=" + path + " holds a JSON " + json.type_name(),
                     "a JSON object of names and values");
  }
  return json;
}

std::string config_path_of(const std::vector<std::string>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--config") {
      return i + 1 < arguments.size() ? arguments[i + 1] : std::string();
    }
    if (arguments[i].starts_with("--config=")) {
      return arguments[i].substr(9);
    }
  }
  return environment_value("HASTEN_CONFIG").value_or("");
}

/// --help is printed whatever the file and the environment hold.
bool asks_for_help(const std::vector<std::string>& arguments) {
  return std::ranges::any_of(arguments, [](const auto& a) { return a == "--help" || a == "-h"; });
}

void FlagTable::read_config(const std::vector<std::string>& arguments) {
  const std::string path = config_path_of(arguments);
  if (path.empty() || asks_for_help(arguments)) {
    return;
  }
  const nlohmann::json json = read_config_json(where(), path);
  const auto refuse = [&](const std::string& key, const std::string& what,
                          const std::string& expected, const std::string& fix = {}) {
    throw InputError(where(), path + ": /" + key + what, expected, fix);
  };
  std::set<std::string> seen; // first names
  std::vector<std::string> keys;
  std::map<std::string, const ConfigEntry*> entries; // by key
  for (const ConfigEntry& entry : config_entries_) {
    for (const std::string& name : is_in_files(entry) ? entry.names : std::vector<std::string>{}) {
      entries[keys.emplace_back(config_key(name))] = &entry;
    }
  }
  for (const auto& [key, value] : json.items()) {
    const auto found = entries.find(key);
    if (found == entries.end()) {
      refuse(key, ": unknown name", {}, write_nearest(key, keys, "leave it out"));
    }
    const ConfigEntry& entry = *found->second;
    const std::string& first = entry.names.front();
    if (!seen.insert(first).second) {
      refuse(key, ": " + first + " is given twice", "one of them");
    }
    if (value.is_null() && entry.nullable) {
      continue;
    }
    const bool as_text = value.is_object() && key == "lr_scheduler_kwargs";
    if (!entry.read(as_text ? nlohmann::json(value.dump()) : value)) {
      refuse(key, "=" + value.dump(), entry.expected());
    }
    configured_.insert(first);
  }
}

// Each variable of hasten's own has its own reader. Those of timeouts are the flags' defaults, too.
constexpr std::array kOwnVariables{
    "HASTEN_CACHE",       "HASTEN_COMM_BACKEND", "HASTEN_COMM_CHECK",        "HASTEN_COMPARE_STATE",
    "HASTEN_DDP_TIMEOUT", "HASTEN_DEBUG",        "HASTEN_HEARTBEAT_TIMEOUT", "HASTEN_LAUNCHER",
    "HASTEN_SECRET",      "HASTEN_SECRET_FILE",  "HASTEN_STORE_FILE",        "HASTEN_STORE_SOCKET"};
// A file of a secret has a variable of its own, and a print is for one command line.
constexpr std::array kNotInEnvironment{"--secret-file", "--print-config"};
constexpr std::string_view kVariableStart = "HASTEN_";

/// The variable of "--learning-rate", without its start: "LEARNING_RATE".
std::string variable_of(const std::string& flag) {
  std::string name = config_key(flag);
  std::ranges::transform(name, name.begin(), ::toupper);
  return name;
}

/// True if `name` is a variable of a flag of another command.
bool is_of_another_command(const std::string& name) {
  std::vector<FlagRow> rows = flags_of("train");
  std::ranges::move(flags_of("eval"), std::back_inserter(rows));
  return std::ranges::any_of(rows, [&](const FlagRow& row) {
    return std::ranges::find(row.names, name, variable_of) != row.names.end();
  });
}

void FlagTable::read_environment(const std::vector<std::string>& arguments) {
  if (asks_for_help(arguments)) {
    return;
  }
  std::vector<std::string> known;
  for (const ConfigEntry& entry : config_entries_) {
    const std::string& first = entry.names.front();
    if (std::ranges::find(kNotInEnvironment, first) != kNotInEnvironment.end()) {
      continue;
    }
    for (const std::string& flag : entry.names) {
      const std::string name = std::string(kVariableStart) + known.emplace_back(variable_of(flag));
      const auto text = environment_value(name);
      if (!text) {
        continue;
      }
      if (!from_environment_.emplace(first, name).second) {
        throw InputError(where(), name + ": " + first + " is given twice", "one of them");
      }
      entry.set(name, *text);
      configured_.insert(first);
    }
  }
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string name(*variable, std::strcspn(*variable, "="));
    if (!name.starts_with(kVariableStart) ||
        std::ranges::find(kOwnVariables, name) != kOwnVariables.end()) {
      continue;
    }
    const std::string rest = name.substr(kVariableStart.size());
    const std::string near = nearest_name(rest, known);
    if (!near.empty() && near != rest && !is_of_another_command(rest)) {
      throw InputError(where(), "unknown variable of the environment: " + name, {},
                       "write " + std::string(kVariableStart) + near);
    }
  }
}

std::string FlagTable::config() const {
  nlohmann::json all = nlohmann::json::object();
  for (const ConfigEntry& entry : config_entries_) {
    if (const nlohmann::json value = entry.now(); !value.is_null()) {
      all[config_key(entry.names.front())] = value;
    }
  }
  for (const char* of_one_start : {"config", "print_config", "dry_run", "resume_from_checkpoint"}) {
    all.erase(of_one_start);
  }
  return all.dump(2) + "\n";
}

std::string FlagTable::commented_config() const {
  std::string text = "// Flags of hasten " + name_ +
                     ", for --config. Flags on the command line override them.\n{\n";
  std::string group;
  size_t last_value = 0; // where its comma will be
  for (const ConfigEntry& entry : config_entries_) {
    if (!is_in_files(entry)) {
      continue;
    }
    if (entry.option->get_group() != group) {
      text += group.empty() ? "" : "\n";
      group = entry.option->get_group();
      text += "  // ---- " + group + " ----\n";
    }
    for (const std::string& line : split(wrapped(described(*entry.option), 75, 0), "\n")) {
      text += "  // " + line + "\n";
    }
    const nlohmann::json value = entry.now();
    const bool has_value = !value.is_null() || entry.nullable;
    if (has_value && last_value > 0) {
      text.insert(last_value, ",");
    }
    text += (has_value ? "  \"" : "  // \"") + config_key(entry.names.front()) +
            "\": " + (has_value ? value.dump() : "\"\"");
    last_value = has_value ? text.size() : last_value;
    text += "\n";
  }
  return text + "}\n";
}

} // namespace hasten::detail
