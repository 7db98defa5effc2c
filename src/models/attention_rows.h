// The rows of attention's scores, in fp32 or bf16; everything between is fp32. They are contiguous, and
// `narrow` says that they are bf16.
#pragma once

#include <cstdint>

#include "core/dropout.h"

namespace hasten::detail {

// Sums and maxima of a row use this many partial results, so that the loops vectorise.
constexpr int64_t kRowStrands = 16;

/// A row of scores: of its `columns`, the first `count` are a query's.
struct ScoreRow {
  const float* mask = nullptr; // null: none
  float scale = 1;
  int64_t count = 0;
  int64_t columns = 0;
  float* work = nullptr; // columns, rounded up to kRowStrands
};

/// softmax(scale scores + mask) of the query's columns, 0 in the others.
void softmax_row(bool narrow, const void* scores, const ScoreRow& row, void* out);

/// Drops from `columns` probabilities.
void drop_row(bool narrow, const void* in, const BlockDropout& dropout, int64_t columns, void* out);

/// Gradient of the scores from that of the dropped probabilities: p (g - sum(g p)) scale, g =
/// gradient * kept. In place of `gradient`.
void softmax_backward_row(bool narrow, const void* probabilities, const BlockDropout& dropout,
                          const ScoreRow& row, void* gradient);

// Note [Few shapes]
// oneDNN and torch cache about half a megabyte for each shape of a 16-bit product, up to a thousand
// shapes. The number of tokens differs between batches. So tokens are padded with zeros to one of
// few sizes. Zeros do not change sums.
inline int64_t padded_tokens(int64_t tokens) {
  const int64_t step = tokens <= 128 ? 16 : tokens <= 256 ? 32 : 64;
  return tokens == 1 ? 1 : (tokens + step - 1) / step * step;
}

} // namespace hasten::detail
