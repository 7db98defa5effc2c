// Values of flags from a JSON file. Private to src/cli.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "hasten/config/checkpoint_spec.h"

namespace hasten::detail {

/// The JSON type of a flag's value.
enum class ConfigKind { boolean, number, text, boolean_or_text, texts };

template <typename T>
constexpr ConfigKind config_kind(const T&) {
  return std::is_same_v<T, bool>                               ? ConfigKind::boolean
         : std::is_same_v<T, GradientCheckpointing>            ? ConfigKind::boolean_or_text
         : std::is_arithmetic_v<T> && !std::is_same_v<T, char> ? ConfigKind::number
                                                               : ConfigKind::text;
}
template <typename T>
constexpr ConfigKind config_kind(const std::optional<T>&) {
  return config_kind(T{});
}

template <typename T>
constexpr bool is_optional(const T&) {
  return false;
}
template <typename T>
constexpr bool is_optional(const std::optional<T>&) {
  return true;
}

/// A flag that a configuration file may set.
struct ConfigEntry {
  /// "--num-train-epochs", then its aliases.
  std::vector<std::string> names{};
  ConfigKind kind = ConfigKind::text;
  /// null leaves the default.
  bool nullable = false;
  /// Returns false if the text is not a value of the flag.
  std::function<bool(const std::string&)> read{};
  /// "Expected …".
  std::function<std::string()> expected{};
  /// The value as the command line says it. None: it cannot say it.
  std::function<std::vector<std::string>()> now{};
};

} // namespace hasten::detail
