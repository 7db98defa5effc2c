// Values of flags from a JSON file.
#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <sstream>

#include "flags.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"

namespace hasten::detail {

/// Flags that a file cannot set.
constexpr std::array kNotInFiles{"--config", "--print-config"};

bool is_in_files(const ConfigEntry& entry) {
  return std::find(kNotInFiles.begin(), kNotInFiles.end(), entry.names.front()) ==
         kNotInFiles.end();
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
    if (arguments[i].rfind("--config=", 0) == 0) {
      return arguments[i].substr(9);
    }
  }
  return {};
}

void FlagTable::read_config(const std::vector<std::string>& arguments) {
  const std::string path = config_path_of(arguments);
  if (path.empty()) {
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
      text += (group.empty() ? "" : "\n");
      group = entry.option->get_group();
      text += "  // ---- " + group + " ----\n";
    }
    std::istringstream lines(wrap_text(described(*entry.option), 0, 75));
    for (std::string line; std::getline(lines, line);) {
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
