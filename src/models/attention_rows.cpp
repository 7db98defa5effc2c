#include "attention_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "hasten/core/vector_kernels.h"

namespace hasten::detail {

HASTEN_VECTOR_INLINE float load_wide(float x) { return x; }
HASTEN_VECTOR_INLINE float load_wide(uint16_t x) { return from_bf16(x); }
HASTEN_VECTOR_INLINE void store_wide(float& to, float x) { to = x; }
HASTEN_VECTOR_INLINE void store_wide(uint16_t& to, float x) { to = to_bf16(x); }

// e^x for x <= 0, relative error 2e-7: 2^n times a polynomial in [-1/2, 1/2] (Taylor's of 2^r). NaN
// stays NaN.
HASTEN_VECTOR_INLINE float exp_of(float x) {
  const float t = std::max(x, -87.0f) * 1.44269504f;
  const float n = (t + 12582912.0f) - 12582912.0f; // to the nearest integer
  const float r = t - n;
  float y = 1.5403530e-4f;
  y = y * r + 1.3333558e-3f;
  y = y * r + 9.6181291e-3f;
  y = y * r + 5.5504109e-2f;
  y = y * r + 2.4022651e-1f;
  y = y * r + 6.9314718e-1f;
  y = y * r + 1.0f;
  const auto power = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  const float result = y * std::bit_cast<float>(power);
  return x == x ? result : x;
}

HASTEN_VECTOR_INLINE float kept(const BlockDropout& dropout, int64_t column) {
  const uint32_t h = random_bits(static_cast<uint32_t>(column), dropout.key0, dropout.key1);
  return h >= dropout.threshold ? dropout.scale : 0.0f;
}

template <typename T>
HASTEN_VECTOR_INLINE void softmax_of(const T* scores, const ScoreRow& row, T* out) {
  const int64_t padded = (row.count + kRowStrands - 1) / kRowStrands * kRowStrands;
  float* work = row.work;
  for (int64_t i = 0; i < row.count; ++i) {
    work[i] = load_wide(scores[i]) * row.scale;
  }
  if (row.mask != nullptr) {
    for (int64_t i = 0; i < row.count; ++i) {
      work[i] += row.mask[i];
    }
  }
  for (int64_t i = row.count; i < padded; ++i) {
    work[i] = -INFINITY;
  }
  float strand[kRowStrands];
  std::fill(strand, strand + kRowStrands, -INFINITY);
  for (int64_t i = 0; i < padded; i += kRowStrands) {
    for (int64_t j = 0; j < kRowStrands; ++j) {
      strand[j] = work[i + j] > strand[j] ? work[i + j] : strand[j];
    }
  }
  const float largest = *std::max_element(strand, strand + kRowStrands);
  std::fill(strand, strand + kRowStrands, 0.0f);
  for (int64_t i = 0; i < padded; i += kRowStrands) {
    for (int64_t j = 0; j < kRowStrands; ++j) {
      const float e = exp_of(work[i + j] - largest);
      work[i + j] = e;
      strand[j] += i + j < row.count ? e : 0.0f;
    }
  }
  float sum = 0;
  for (const float part : strand) {
    sum += part;
  }
  const float inverse = 1.0f / sum;
  for (int64_t i = 0; i < row.count; ++i) {
    store_wide(out[i], work[i] * inverse);
  }
  std::fill(out + row.count, out + row.columns, T{0});
}

template <typename T>
HASTEN_VECTOR_INLINE void drop_of(const T* in, const BlockDropout& dropout, int64_t columns,
                                  T* out) {
  for (int64_t i = 0; i < columns; ++i) {
    store_wide(out[i], load_wide(in[i]) * kept(dropout, i));
  }
}

template <typename T>
HASTEN_VECTOR_INLINE void scores_gradient_of(const T* probabilities, const BlockDropout& dropout,
                                             const ScoreRow& row, T* gradient) {
  float* work = row.work;
  if (dropout.threshold == 0) {
    for (int64_t i = 0; i < row.count; ++i) {
      work[i] = load_wide(gradient[i]);
    }
  } else {
    for (int64_t i = 0; i < row.count; ++i) {
      work[i] = load_wide(gradient[i]) * kept(dropout, i);
    }
  }
  float strand[kRowStrands] = {};
  const int64_t whole = row.count / kRowStrands * kRowStrands;
  for (int64_t i = 0; i < whole; i += kRowStrands) {
    for (int64_t j = 0; j < kRowStrands; ++j) {
      strand[j] += work[i + j] * load_wide(probabilities[i + j]);
    }
  }
  float sum = 0;
  for (int64_t i = whole; i < row.count; ++i) {
    sum += work[i] * load_wide(probabilities[i]);
  }
  for (const float part : strand) {
    sum += part;
  }
  for (int64_t i = 0; i < row.count; ++i) {
    store_wide(gradient[i], load_wide(probabilities[i]) * (work[i] - sum) * row.scale);
  }
  std::fill(gradient + row.count, gradient + row.columns, T{0});
}

HASTEN_VECTOR_CLONES
void softmax_row(bool narrow, const void* scores, const ScoreRow& row, void* out) {
  narrow ? softmax_of(static_cast<const uint16_t*>(scores), row, static_cast<uint16_t*>(out))
         : softmax_of(static_cast<const float*>(scores), row, static_cast<float*>(out));
}

HASTEN_VECTOR_CLONES
void drop_row(bool narrow, const void* in, const BlockDropout& dropout, int64_t columns,
              void* out) {
  narrow ? drop_of(static_cast<const uint16_t*>(in), dropout, columns, static_cast<uint16_t*>(out))
         : drop_of(static_cast<const float*>(in), dropout, columns, static_cast<float*>(out));
}

HASTEN_VECTOR_CLONES
void softmax_backward_row(bool narrow, const void* probabilities, const BlockDropout& dropout,
                          const ScoreRow& row, void* gradient) {
  narrow ? scores_gradient_of(static_cast<const uint16_t*>(probabilities), dropout, row,
                              static_cast<uint16_t*>(gradient))
         : scores_gradient_of(static_cast<const float*>(probabilities), dropout, row,
                              static_cast<float*>(gradient));
}

} // namespace hasten::detail
