// Conversions of 16-bit elements, and sums.
#include <c10/util/Half.h>

#include <bit>
#include <cmath>
#include <limits>

#include "step_block.h"

namespace hasten::detail {

// Rounds up with the probability that makes the mean exact. Values that are not finite stay.
HASTEN_VECTOR_INLINE uint16_t to_bf16_at_random(float x, uint32_t random) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  const uint32_t rounded = (bits + (finite ? random & 0xffffu : 0u)) >> 16;
  return static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}

HASTEN_VECTOR_CLONES void load_bf16(const uint16_t* in, float* out, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = from_bf16(in[i]) * factor;
  }
}
HASTEN_VECTOR_CLONES void store_bf16(const float* in, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = to_bf16(in[i]);
  }
}
HASTEN_VECTOR_CLONES
void store_bf16_at_random(float* values, uint16_t* out, int32_t n, uint32_t key0, uint32_t key1) {
  for (int32_t i = 0; i < n; ++i) {
    out[i] = to_bf16_at_random(values[i], random_bits(static_cast<uint32_t>(i), key0, key1));
    values[i] = from_bf16(out[i]);
  }
}
HASTEN_VECTOR_CLONES void load_f16(const uint16_t* in, float* out, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = c10::detail::fp16_ieee_to_fp32_value(in[i]) * factor;
  }
}
HASTEN_VECTOR_CLONES void store_f16(const float* in, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = c10::detail::fp16_ieee_from_fp32_value(in[i]);
  }
}
HASTEN_VECTOR_CLONES void scale_floats(const float* in, float* out, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = in[i] * factor;
  }
}

void load_codes(const uint8_t* codes, const float* absmax, float* out, int64_t n, bool is_signed) {
  const float* const map = dynamic_map(is_signed).data();
  for (int64_t at = 0; at < n; at += kBlock8Bit) {
    const float share = absmax[at / kBlock8Bit];
#pragma GCC unroll 8
    for (int64_t i = at; i < std::min(at + kBlock8Bit, n); ++i) {
      out[i] = map[codes[i]] * share;
    }
  }
}

/// Decade i of the dynamic map has values in the middles of 2^i equal parts, unsigned 2^(i+1). With
/// `parts` of them, share * scale + offset is parts + the index of the part. A decade begins halfway
/// to the largest value below it, the lowest one halfway to 0.
template <bool kSigned>
struct Decades {
  float scale[7] = {}, offset[7] = {}, first[7] = {};
  constexpr Decades() {
    double unit = 1e-6;
    for (int i = 0; i < 7; ++i, unit *= 10) {
      const double parts = 1 << (kSigned ? i : i + 1);
      scale[i] = static_cast<float>(parts / 0.9 / unit);
      offset[i] = static_cast<float>(parts * 8 / 9);
      first[i] = static_cast<float>(unit * (0.1 + 0.18 / parts));
    }
    scale[0] = kSigned ? 1.0F / 9 / 2.75e-7F : 1 / 3.875e-7F;
    offset[0] = kSigned ? 8.0F / 9 : 2 - 1.625F / 3.875F;
  }
};

/// The code of the nearest value, of a share of a block's largest absolute value.
template <bool kSigned>
HASTEN_VECTOR_INLINE int nearest_code(float share) {
  constexpr Decades<kSigned> decades;
  const float size = std::abs(share);
  float scale = decades.scale[0], offset = decades.offset[0];
  for (int i = 1; i < 7; ++i) {
    scale = size > decades.first[i] ? decades.scale[i] : scale;
    offset = size > decades.first[i] ? decades.offset[i] : offset;
  }
  const float part = size * scale + offset, last = offset * 2.25F - 0.5F; // below 2 * parts
  int code = static_cast<int>(part < last ? part : last);
  code += share > (kSigned ? 1 - 0.225F / 64 : 1 - 0.225F / 128) ? 1 : 0; // -1 has no code
  const int sign = std::bit_cast<int32_t>(share) >> 31;
  return kSigned ? 127 + ((code ^ sign) - sign) : code - 1;
}

template <bool kSigned>
HASTEN_VECTOR_CLONES void store_block(const float* in, uint8_t* codes, float* absmax, int64_t n) {
  int32_t most = 0; // NaN is larger than all numbers
  for (int64_t i = 0; i < n; ++i) {
    most = std::max(most, std::bit_cast<int32_t>(in[i]) & 0x7fffffff);
  }
  *absmax = std::bit_cast<float>(most);
  const float inverse = *absmax >= std::numeric_limits<float>::min() ? 1 / *absmax : 0;
  int wide[kBlock8Bit]; // a loop over bytes has narrow vectors
  for (int64_t i = 0; i < n; ++i) {
    wide[i] = nearest_code<kSigned>(in[i] * inverse);
  }
  std::copy(wide, wide + n, codes);
}
void store_codes(const float* in, uint8_t* codes, float* absmax, int64_t n, bool is_signed) {
  for (int64_t i = 0; i < n; i += kBlock8Bit) {
    (is_signed ? store_block<true> : store_block<false>)(in + i, codes + i, absmax++,
                                                         std::min(kBlock8Bit, n - i));
  }
}

void load_numbers(const void* in, StepType type, float* out, int64_t n, double factor) {
  const auto f = static_cast<float>(factor);
  switch (type) {
    case StepType::f32:
      return scale_floats(static_cast<const float*>(in), out, n, f);
    case StepType::bf16:
      return load_bf16(static_cast<const uint16_t*>(in), out, n, f);
    case StepType::f16:
      return load_f16(static_cast<const uint16_t*>(in), out, n, f);
    case StepType::f64:
      break;
  }
  for (int64_t i = 0; i < n; ++i) {
    out[i] = static_cast<float>(static_cast<const double*>(in)[i] * factor);
  }
}
void load_numbers(const void* in, StepType type, double* out, int64_t n, double factor) {
  if (type == StepType::f64) {
    for (int64_t i = 0; i < n; ++i) {
      out[i] = static_cast<const double*>(in)[i] * factor;
    }
    return;
  }
  float narrow[kStepBlock];
  load_numbers(in, type, narrow, n, 1);
  for (int64_t i = 0; i < n; ++i) {
    out[i] = static_cast<double>(narrow[i]) * factor;
  }
}
void store_numbers(const float* in, void* out, StepType type, int64_t n) {
  switch (type) {
    case StepType::f32:
      std::memcpy(out, in, static_cast<size_t>(n) * sizeof(float));
      return;
    case StepType::bf16:
      return store_bf16(in, static_cast<uint16_t*>(out), n);
    case StepType::f16:
      return store_f16(in, static_cast<uint16_t*>(out), n);
    case StepType::f64:
      break;
  }
  std::copy(in, in + n, static_cast<double*>(out));
}
void store_numbers(const double* in, void* out, StepType type, int64_t n) {
  if (type == StepType::f64) {
    std::memcpy(out, in, static_cast<size_t>(n) * sizeof(double));
    return;
  }
  float narrow[kStepBlock];
  std::transform(in, in + n, narrow, [](double x) { return static_cast<float>(x); });
  store_numbers(narrow, out, type, n);
}

HASTEN_VECTOR_CLONES void follow_bf16(const uint16_t* p, float* master, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    master[i] = to_bf16(master[i]) == p[i] ? master[i] : from_bf16(p[i]);
  }
}
void follow_parameter(const void* parameter, StepType type, float* master, int64_t n) {
  const auto* p = static_cast<const uint16_t*>(parameter);
  if (type == StepType::bf16) {
    return follow_bf16(p, master, n);
  }
  uint16_t rounded[kStepBlock];
  store_f16(master, rounded, n);
  for (int64_t i = 0; i < n; ++i) {
    if (rounded[i] != p[i]) {
      master[i] = c10::detail::fp16_ieee_to_fp32_value(p[i]);
    }
  }
}

// Elements that one or several vector registers add in parallel.
constexpr int64_t kStepLanes = 32;

template <NormKind kKind, typename T>
HASTEN_VECTOR_CLONES double block_sum(const T* x, int64_t n) {
  T lanes[kStepLanes] = {};
  const auto add = [](T& sum, T value) {
    if constexpr (kKind == NormKind::l2) {
      sum += value * value;
    } else if constexpr (kKind == NormKind::l1) {
      sum += std::fabs(value);
    } else { // NaN stays, because comparisons with NaN are false
      const T size = std::fabs(value);
      sum = sum >= size || sum != sum ? sum : size;
    }
  };
  int64_t i = 0;
  for (; i + kStepLanes <= n; i += kStepLanes) {
    for (int64_t lane = 0; lane < kStepLanes; ++lane) {
      add(lanes[lane], x[i + lane]);
    }
  }
  for (; i < n; ++i) {
    add(lanes[i % kStepLanes], x[i]);
  }
  double sum = 0;
  for (const T lane : lanes) {
    const auto wide = static_cast<double>(lane);
    if constexpr (kKind == NormKind::max) {
      sum = sum >= wide || sum != sum ? sum : wide;
    } else {
      sum += wide;
    }
  }
  return sum;
}

double block_square_sum(const float* x, int64_t n) { return block_sum<NormKind::l2>(x, n); }
double block_square_sum(const double* x, int64_t n) { return block_sum<NormKind::l2>(x, n); }

template <typename T>
double norm_sum_as(const void* data, StepType type, int64_t count, NormKind kind) {
  alignas(64) T buffer[kStepBlock];
  double sum = 0;
  for (int64_t at = 0; at < count; at += kStepBlock) {
    const int64_t n = std::min(kStepBlock, count - at);
    const void* from = element(data, type, at);
    const T* x = static_cast<const T*>(from);
    if (type != kTypeOf<T>) {
      load_numbers(from, type, buffer, n, 1);
      x = buffer;
    }
    if (kind == NormKind::l2) {
      sum += block_sum<NormKind::l2>(x, n);
    } else if (kind == NormKind::l1) {
      sum += block_sum<NormKind::l1>(x, n);
    } else {
      const double largest = block_sum<NormKind::max>(x, n);
      sum = sum >= largest || sum != sum ? sum : largest;
    }
  }
  return sum;
}

double norm_sum(const void* data, StepType type, int64_t count, NormKind kind) {
  return type == StepType::f64 ? norm_sum_as<double>(data, type, count, kind)
                               : norm_sum_as<float>(data, type, count, kind);
}

} // namespace hasten::detail
