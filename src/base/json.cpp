#include "hasten/base/json.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/base/files.h"

namespace hasten {

namespace detail {

// Builds the value like nlohmann's own parser, and stops at what the rules reject. That parser with
// a callback would take quadratic time: it searches an object again after each object inside it.
class JsonBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  JsonBuilder(ParsedJson& result, const JsonRules& rules) : result_(result), rules_(rules) {}

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return false; } // does not occur in text
  bool start_object(size_t) override { return open(nlohmann::json::object()); }
  bool start_array(size_t) override { return open(nlohmann::json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    auto& members = open_.back()->get_ref<nlohmann::json::object_t&>();
    const auto [member, is_new] = members.try_emplace(std::move(name));
    if (!is_new && rules_.unique_keys) {
      return refuse("\"" + member->first + "\" occurs twice");
    }
    member_ = &member->second;
    return true;
  }

  bool parse_error(size_t byte, const std::string&,
                   const nlohmann::json::exception& error) override {
    // The text after "[json.exception…] parse error at line 1, column 7: ".
    const std::string text = error.what();
    const size_t place = text.find("] ");
    const size_t colon = text.find(": ", place == text.npos ? 0 : place);
    result_.byte = byte;
    return refuse(colon != text.npos   ? text.substr(colon + 2)
                  : place != text.npos ? text.substr(place + 2)
                                       : text);
  }

 private:
  template <typename Value>
  bool put(Value&& value) {
    if (open_.empty()) {
      result_.value = std::forward<Value>(value);
    } else if (open_.back()->is_array()) {
      open_.back()->push_back(std::forward<Value>(value));
    } else {
      *member_ = std::forward<Value>(value);
    }
    return true;
  }
  bool open(nlohmann::json value) {
    if (static_cast<int>(open_.size()) == rules_.max_depth) {
      return refuse("it is nested more than " + std::to_string(rules_.max_depth) + " deep");
    }
    put(std::move(value));
    auto* const made = open_.empty()              ? &result_.value
                       : open_.back()->is_array() ? &open_.back()->back()
                                                  : member_;
    open_.push_back(made);
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }
  bool refuse(std::string problem) {
    result_.problem = std::move(problem);
    return false;
  }

  ParsedJson& result_;
  const JsonRules& rules_;
  std::vector<nlohmann::json*> open_{}; // [depth]
  nlohmann::json* member_ = nullptr; // of the last key
};

} // namespace detail

ParsedJson try_parse_json(std::string_view text, JsonRules rules) {
  ParsedJson result;
  detail::JsonBuilder builder(result, rules);
  nlohmann::json::sax_parse(text, &builder, nlohmann::json::input_format_t::json,
                            /*strict=*/true, rules.comments);
  if (!result.problem.empty()) {
    result.value = nullptr;
  }
  return result;
}

nlohmann::json parse_json(std::string_view where, const std::string& source, std::string_view text,
                          JsonRules rules) {
  ParsedJson parsed = try_parse_json(text, rules);
  if (!parsed.problem.empty()) {
    std::string place;
    if (parsed.byte > 0) {
      const auto before = text.substr(0, parsed.byte - 1);
      place = "not JSON near byte=" + std::to_string(parsed.byte) + " (line " +
              std::to_string(1 + std::ranges::count(before, '\n')) + ", column " +
              std::to_string(parsed.byte - 1 - before.rfind('\n')) + "): ";
    }
    throw InputError(where, source + ": " + place + parsed.problem, "JSON");
  }
  return std::move(parsed.value);
}

nlohmann::json read_json_file(std::string_view where, const std::filesystem::path& path,
                              JsonRules rules) {
  return parse_json(where, path.string(), read_file(path), rules);
}

std::string json_text(const nlohmann::json& value) {
  return value.is_string() ? value.get<std::string>() : value.is_null() ? "" : value.dump();
}

void require_utf8(std::string_view where, const nlohmann::json& values) {
  for (const auto& [name, value] : values.items()) {
    try {
      static_cast<void>(value.dump());
    } catch (const nlohmann::json::type_error&) {
      throw InputError(where, name + " has bytes that are not UTF-8",
                       "UTF-8, because the run's records are JSON", "use another name");
    }
  }
}

} // namespace hasten
