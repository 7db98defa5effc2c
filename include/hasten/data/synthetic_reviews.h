// Customer reviews made from a seed, so that training has something to learn from
// without any file: several products, mixed sentiment, negation, varied length.
// What a review says at last depends on negations ("nobody could call the strap
// flimsy") and on which half of a sentence counts ("although ..., ..."), so that
// counting words does not find it, and reading does.
// Threading: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hasten {

struct SyntheticReviewsOptions {
  /// Reviews, >= 1. About 160 bytes each.
  int64_t rows = 4000;
  /// Of all that is drawn. Row i depends on seed and i alone, so more rows begin
  /// with the same ones; numbers are the same on all machines.
  uint64_t seed = 42;
};

struct SyntheticReview {
  std::string text{};
  std::string label{}; // "positive" or "negative", each half of the rows
  std::string product{};
};

/// Throws InputError: rows < 1.
std::vector<SyntheticReview> synthetic_reviews(const SyntheticReviewsOptions& options = {});

/// The same as a table with the columns text, label and product: delimited text
/// for ',' and '\t', JSON lines for '\0'.
std::string synthetic_reviews_table(const SyntheticReviewsOptions& options = {},
                                    char delimiter = ',');

} // namespace hasten
