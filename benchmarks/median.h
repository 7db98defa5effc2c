#pragma once

#include <algorithm>
#include <vector>

namespace hasten {

/// The middle of a benchmark's rounds.
inline double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.at(values.size() / 2);
}

} // namespace hasten
