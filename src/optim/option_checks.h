// Checks of options. Private to this part.
#pragma once

#include <c10/util/StringUtil.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "hasten/base/error.h"

namespace hasten::detail {

/// Throws InputError "name=value" unless `good`.
inline void require_option(bool good, const char* where, const char* name, double value,
                           const char* expected) {
  if (!good) {
    throw InputError(where, std::string(name) + "=" + c10::str(value), expected);
  }
}
inline void require_not_negative(const char* where, const char* name, double value) {
  require_option(value >= 0 && std::isfinite(value), where, name, value, "0 or more");
}
inline void require_beta(const char* where, const char* name, double value) {
  require_option(value >= 0 && value < 1, where, name, value, "0 or more, below 1");
}
inline void require_betas(const char* where, const std::tuple<double, double>& betas) {
  require_beta(where, "beta1", std::get<0>(betas));
  require_beta(where, "beta2", std::get<1>(betas));
}

/// "a, b, c".
inline std::string joined_names(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) {
    all += (all.empty() ? "" : ", ") + name;
  }
  return all;
}

/// Throws InputError for a `name` in `argument` that is not in `known`.
[[noreturn]] inline void refuse_name(const char* where, const char* argument,
                                     const std::string& name, const std::vector<std::string>& known,
                                     const std::string& expected) {
  const std::string near = nearest_name(name, known.data(), known.data() + known.size());
  throw InputError(where, std::string("unknown name in ") + argument + ": " + name, expected,
                   near.empty() ? "remove it" : "write " + near);
}

} // namespace hasten::detail
