#include "base/known_keys.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"

namespace hasten::detail {

enum class KeyUse {
  used, // hasten gives the reference's result for each value, or throws
  neutral, // it changes nothing that hasten computes
  refused, // hasten has no such feature
};

struct KnownKey {
  std::string_view file, part, key;
  KeyUse use;
  std::string_view accepted; // of a refused key: a JSON array of values that change nothing
};

constexpr KnownKey kKnownKeys[] = {
#include "tables/known_keys.inc"
};

constexpr size_t kUnknownKeysNamed = 5;

using KeyTable =
    std::map<std::tuple<std::string_view, std::string_view, std::string_view>, const KnownKey*>;

static const KeyTable& key_table() {
  static const KeyTable table = [] {
    KeyTable made;
    for (const KnownKey& row : kKnownKeys) {
      made[{row.file, row.part, row.key}] = &row;
    }
    return made;
  }();
  return table;
}

// The row of "bert:MaskedLM", else of "bert", else of every part, else of keys with that ending.
static const KnownKey* find_key(std::string_view file, std::string_view part,
                                std::string_view key) {
  const std::string ending = "*" + std::string(key.substr(std::min(key.rfind('_'), key.size())));
  for (const auto& [where, name] : {std::pair{part, key},
                                    {part.substr(0, part.find(':')), key},
                                    {std::string_view("*"), key},
                                    {std::string_view("*"), std::string_view(ending)}}) {
    if (const auto found = key_table().find({file, where, name}); found != key_table().end()) {
      return found->second;
    }
  }
  return nullptr;
}

static bool has_part(std::string_view file, std::string_view part) {
  const auto first = key_table().lower_bound({file, part, ""});
  return first != key_table().end() && std::get<0>(first->first) == file &&
         std::get<1>(first->first) == part;
}

static void log_unknown(const std::string& start, const std::vector<std::string>& unknown) {
  static std::mutex mutex;
  static std::set<std::string> logged;
  std::vector<std::string> lines;
  for (const std::string& each : unknown) {
    lines.push_back(start + "unknown key " + each + " is ignored");
  }
  if (lines.size() > kUnknownKeysNamed) {
    lines.resize(kUnknownKeysNamed);
    lines.push_back(start + std::to_string(unknown.size() - kUnknownKeysNamed) +
                    " more unknown keys are ignored");
  }
  for (const std::string& line : lines) {
    const std::lock_guard lock(mutex);
    if (logged.insert(line).second) {
      log_info(line);
    }
  }
}

nlohmann::json known_members(std::string_view file, const nlohmann::json& object) {
  nlohmann::json members = nlohmann::json::object();
  for (const auto& [key, value] : object.items()) {
    if (find_key(file, "*", key) != nullptr) {
      members[key] = value;
    }
  }
  return members;
}

void check_known_keys(std::string_view where, const std::string& source, std::string_view file,
                      std::string_view part, const nlohmann::json& object, std::string_view fix) {
  if (!object.is_object() || !has_part(file, part)) {
    return;
  }
  std::vector<std::string> unknown;
  for (const auto& [key, value] : object.items()) {
    const KnownKey* row = find_key(file, part, key);
    const auto shown = [&] { return key + "=" + shortened(value.dump(-1, ' ', true), 80); };
    if (row == nullptr) {
      unknown.push_back(shown());
    } else if (row->use == KeyUse::refused && !value.is_null()) {
      const auto accepted = parse_json(where, "known_keys", row->accepted);
      if (std::ranges::find(accepted, value) == accepted.end()) {
        throw InputError(
            where, source + ": " + shown(),
            (accepted.empty() ? "no such key" : accepted.front().dump() + ", or no such key") +
                ", because hasten does not have this option",
            fix);
      }
    }
  }
  log_unknown("[" + std::string(where) + "] " + std::string(file) + ": ", unknown);
}

} // namespace hasten::detail
