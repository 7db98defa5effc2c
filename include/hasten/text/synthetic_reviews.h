// Generates customer reviews from a seed, so that training can run without a file. They have
// several products, mixed sentiment, negation and varied length. Counting words does not find the
// label: it depends on negations ("nobody could call the strap flimsy") and on which half of a
// sentence counts ("although ..., ..."). Reading does.
// Threading: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hasten {

struct SyntheticReviewsOptions {
  /// Number of reviews, >= 1. About 160 bytes each.
  int64_t rows = 4000;
  /// Seed of all random values. Review i depends only on seed and i, so a larger `rows` keeps the
  /// first reviews. The reviews are the same on all machines.
  uint64_t seed = 42;
};

struct SyntheticReview {
  std::string text{};
  std::string label{}; // "positive" or "negative", each for half of the reviews
  std::string product{};
};

/// Throws InputError if rows < 1.
std::vector<SyntheticReview> synthetic_reviews(const SyntheticReviewsOptions& options = {});

/// The reviews as a table with the columns text, label and product. A comma or a tab as
/// `delimiter` gives delimited text, 0 gives JSON Lines.
std::string synthetic_reviews_table(const SyntheticReviewsOptions& options = {},
                                    char delimiter = ',');

} // namespace hasten
