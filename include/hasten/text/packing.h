// How the documents of a language model are read and put into rows. Does not use LibTorch.
// Threading: none needed.
#pragma once

#include <array>

#include "hasten/config/spelling.h"

namespace hasten {

/// What a document of a .txt file is: datasets' sample_by.
enum class SampleBy {
  line,
  paragraph, // lines between empty lines
  document // the whole file
};
template <>
inline constexpr auto kSpellings<SampleBy> = std::array{"line", "paragraph", "document"};

/// How documents share rows of at most block_size tokens. The names are TRL's packing_strategy.
enum class PackingStrategy {
  /// Several documents share a row, and no token sees another document. A longer document is cut into
  /// pieces of block_size tokens. Rows are filled by best fit, the longest piece first.
  bfd_split,
  /// All documents are one text, cut into rows of block_size tokens: a token also sees the documents
  /// before its own. As transformers' run_clm.py, which drops the last, shorter row.
  wrapped,
  /// A row has one piece of one document.
  none
};
template <>
inline constexpr auto kSpellings<PackingStrategy> = std::array{"bfd_split", "wrapped", "none"};

} // namespace hasten
