#include "config_file.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "flags.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"

namespace hasten::detail {

/// The key of "--num-train-epochs" in a configuration file.
std::string config_key(const std::string& flag) {
  std::string key = flag.substr(2);
  std::replace(key.begin(), key.end(), '-', '_');
  return key;
}

std::string config_expectation(const ConfigEntry& entry) {
  const std::string values = entry.expected ? entry.expected() : std::string();
  const bool any_text = values == "a value";
  switch (entry.kind) {
    case ConfigKind::boolean:
      return "true or false";
    case ConfigKind::number:
      return values; // "a number", "a whole number"
    case ConfigKind::texts:
      return "an array of strings";
    case ConfigKind::text:
      return any_text ? "a string" : "a string: " + values;
    case ConfigKind::boolean_or_text:
      break;
  }
  return "true, false, or a string: " + values;
}

/// The value as on the command line; empty if it has another type.
std::optional<std::vector<std::string>> config_texts(const ConfigEntry& entry,
                                                     const std::string& key,
                                                     const nlohmann::json& value) {
  const auto one = [](std::string text) { return std::vector<std::string>{std::move(text)}; };
  const bool boolean = value.is_boolean();
  switch (entry.kind) {
    case ConfigKind::boolean:
      return boolean ? std::optional(one(value.dump())) : std::nullopt;
    case ConfigKind::number:
      return value.is_number() ? std::optional(one(value.dump())) : std::nullopt;
    case ConfigKind::boolean_or_text:
      if (boolean) {
        return one(value.get<bool>() ? "full" : "none");
      }
      [[fallthrough]];
    case ConfigKind::text:
      if (value.is_object() && key == "lr_scheduler_kwargs") {
        return one(value.dump());
      }
      return value.is_string() ? std::optional(one(value.get<std::string>())) : std::nullopt;
    case ConfigKind::texts:
      break;
  }
  std::vector<std::string> texts;
  if (!value.is_array()) {
    return std::nullopt;
  }
  for (const auto& element : value) {
    if (!element.is_string()) {
      return std::nullopt;
    }
    texts.push_back(element.get<std::string>());
  }
  return texts;
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
  std::vector<std::string> keys;
  for (const ConfigEntry& entry : config_entries_) {
    for (const std::string& name : entry.names) {
      keys.push_back(config_key(name));
    }
  }
  std::set<std::string> seen;
  for (const auto& [key, value] : json.items()) {
    const auto entry =
        std::find_if(config_entries_.begin(), config_entries_.end(), [&, &k = key](const auto& e) {
          return std::any_of(e.names.begin(), e.names.end(),
                             [&](const std::string& name) { return config_key(name) == k; });
        });
    if (entry == config_entries_.end() || key == "config") {
      const std::string fix = write_nearest(key, keys, "leave it out");
      refuse(key, ": unknown name", {}, fix == "write config" ? "leave it out" : fix);
    }
    if (!seen.insert(entry->names.front()).second) {
      refuse(key, ": " + entry->names.front() + " is given twice", "one of them");
    }
    if (value.is_null() && entry->nullable) {
      continue;
    }
    const auto texts = config_texts(*entry, key, value);
    const bool good = texts && std::all_of(texts->begin(), texts->end(), entry->read);
    if (!good) {
      refuse(key, "=" + value.dump(), config_expectation(*entry));
    }
    configured_.push_back(entry->names.front());
  }
}

bool FlagTable::configured(const std::string& name) const {
  return std::find(configured_.begin(), configured_.end(), name) != configured_.end();
}

std::string FlagTable::config() const {
  nlohmann::json all = nlohmann::json::object();
  for (const ConfigEntry& entry : config_entries_) {
    const std::vector<std::string> texts = entry.now();
    nlohmann::json& value = all[config_key(entry.names.front())];
    if (entry.kind == ConfigKind::texts) {
      value = texts;
    } else if (!texts.empty()) {
      const bool plain = entry.kind == ConfigKind::number || entry.kind == ConfigKind::boolean;
      value = plain ? nlohmann::json::parse(texts[0]) : nlohmann::json(texts[0]);
    } else {
      all.erase(config_key(entry.names.front()));
    }
  }
  for (const char* of_one_start : {"config", "dry_run", "resume_from_checkpoint"}) {
    all.erase(of_one_start);
  }
  return all.dump(2) + "\n";
}

} // namespace hasten::detail
