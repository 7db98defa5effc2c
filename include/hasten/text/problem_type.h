// Kinds of labels. Does not use LibTorch. Threading: none needed.
#pragma once

#include <array>

#include "hasten/config/spelling.h"

namespace hasten {

/// Kind of the samples' labels. The first three are spelled as config.json's problem_type.
enum class ProblemType {
  single_label, // one class of several
  regression, // a number
  multi_label, // any of several classes
  word_labels, // one class for each word of a list
  unlabelled // none
};
template <>
inline constexpr auto kSpellings<ProblemType> =
    std::array{"single_label_classification", "regression", "multi_label_classification",
               "word_labels", "unlabelled"};

} // namespace hasten
