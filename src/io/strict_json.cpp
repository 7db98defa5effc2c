#include "strict_json.h"

#include <set>
#include <vector>

#include "hasten/base/error.h"

namespace hasten::detail {

nlohmann::json parse_strict_json(
    const char* where,
    const std::filesystem::path& path,
    std::string_view text,
    const char* part) {
  const auto fail = [&](const std::string& what) {
    throw InputError(
        where,
        path.string() + ": " + what,
        {},
        "fetch or write the file again; it is damaged or no safetensors file");
  };
  std::vector<std::set<std::string>> keys; // [depth]
  const auto watch = [&](int depth,
                         nlohmann::json::parse_event_t event,
                         nlohmann::json& value) {
    using Event = nlohmann::json::parse_event_t;
    if (depth > 3) {
      fail(std::string(part) + " is nested deeper than any of its kind");
    }
    if (event == Event::object_start) {
      keys.emplace_back();
    } else if (event == Event::object_end) {
      keys.pop_back();
    } else if (event == Event::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) {
        fail("\"" + key + "\" occurs twice in " + part);
      }
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text, watch);
  } catch (const nlohmann::json::exception& error) {
    fail(std::string(part) + " is no JSON: " + error.what());
  }
  return {};
}

} // namespace hasten::detail
