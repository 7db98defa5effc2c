// Conversions of 16-bit elements, and sums.
#include <c10/util/Half.h>

#include <bit>
#include <cmath>

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
