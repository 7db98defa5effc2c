// What the labels of rows are. Without LibTorch. Threading: none needed.
#pragma once

#include <array>

#include "hasten/base/spelling.h"

namespace hasten {

/// What a row's label is, as config.json's problem_type says it.
enum class ProblemType {
  single_label, // one class of several
  regression, // a number
  multi_label // any of several classes
};
template <>
inline constexpr auto kSpellings<ProblemType> =
    std::array{"single_label_classification", "regression", "multi_label_classification"};

} // namespace hasten
