// Checks of options by name.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/base/text.h"

namespace hasten::detail {

/// Throws InputError "name=value" unless `good`.
inline void require_option(bool good, const char* where, const char* name, double value,
                           const char* expected) {
  if (!good) {
    throw InputError(where, std::string(name) + "=" + format_digits(value), expected);
  }
}
inline void require_not_negative(const char* where, const char* name, double value) {
  require_option(value >= 0 && std::isfinite(value), where, name, value, "0 or more");
}
inline void require_beta(const char* where, const char* name, double value) {
  require_option(value >= 0 && value < 1, where, name, value, "0 or more, below 1");
}

/// Throws InputError unless a loaded state has all names.
inline void require_state(const char* where, const nlohmann::json& values,
                          std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (!values.contains(name)) {
      throw InputError(where, std::string("the state lacks ") + name,
                       "a state that save_state() wrote");
    }
  }
}

/// Values that a user gave by name, as text. Each is read once; the remaining names are unknown.
class NamedOptions {
 public:
  /// `argument` holds the values, for example "optim_args". `owner` is what they configure.
  NamedOptions(const char* where, const char* argument, std::string owner,
               std::map<std::string, std::string> values)
      : where_(where), argument_(argument), owner_(std::move(owner)), values_(std::move(values)) {}

  /// These return whether the value was given. They throw InputError for one of another type.
  bool take(const char* name, double& field) { return take_number(name, field, "a number"); }
  bool take(const char* name, uint64_t& field) {
    return take_number(name, field, "a whole number, 0 or more");
  }
  bool take(const char* name, int64_t& field) { return take_number(name, field, "a whole number"); }
  bool take(const char* name, bool& field) {
    const auto text = find(name);
    if (text) {
      field = *text == "true" || *text == "True";
      require(field || *text == "false" || *text == "False", name, *text, "true or false");
    }
    return text.has_value();
  }
  /// Index of the spelling that a JSON string has, or `otherwise` if there is none.
  int64_t take_one_of(const char* name, const std::vector<std::string>& spellings,
                      int64_t otherwise) {
    const auto text = find(name);
    if (!text) {
      return otherwise;
    }
    const auto found = std::ranges::find_if(
        spellings, [&](const auto& spelling) { return *text == "\"" + spelling + "\""; });
    require(found != spellings.end(), name, *text, "one of " + joined(spellings));
    return found - spellings.begin();
  }

  /// Throws InputError for a value that nothing has read.
  void refuse_others() const {
    if (!values_.empty()) {
      const std::string& name = values_.begin()->first;
      throw InputError(
          where_, "unknown name in " + argument_ + ": " + name,
          (known_.empty() ? "no names" : "one of " + joined(known_)) + " for " + owner_,
          write_nearest(name, known_, "remove it"));
    }
  }

 private:
  template <typename Number>
  bool take_number(const char* name, Number& field, const char* expected) {
    const auto text = find(name);
    if (text) {
      const char* end = text->data() + text->size();
      const auto read = std::from_chars(text->data(), end, field);
      const bool sums_fit = !std::is_same_v<Number, int64_t> || // in 63 bits
                            std::abs(static_cast<double>(field)) < 9.0e15;
      require(read.ec == std::errc() && read.ptr == end && sums_fit, name, *text, expected);
    }
    return text.has_value();
  }
  std::optional<std::string> find(const char* name) {
    known_.emplace_back(name);
    const auto found = values_.extract(name);
    return found ? std::optional(found.mapped()) : std::nullopt;
  }
  void require(bool good, const char* name, const std::string& text,
               const std::string& expected) const {
    if (!good) {
      throw InputError(where_, argument_ + ": " + name + "=" + text, expected);
    }
  }

  const char* where_;
  std::string argument_;
  std::string owner_;
  std::map<std::string, std::string> values_;
  std::vector<std::string> known_{};
};

} // namespace hasten::detail
