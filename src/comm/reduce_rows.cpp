#include "reduce_rows.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <type_traits>

#include "hasten/core/vector_kernels.h"

namespace hasten::detail {

constexpr size_t kReduceBlock = 1024; // elements: sums stay in the first-level cache

// A bf16 as its bits, because c10's conversion does not vectorise.
struct Bf16 {
  uint16_t bits;
};

template <typename T, typename Sum>
HASTEN_VECTOR_INLINE Sum widened(T x) {
  if constexpr (std::is_same_v<T, Bf16>) {
    return static_cast<Sum>(from_bf16(x.bits));
  } else {
    return static_cast<Sum>(x);
  }
}

template <typename Sum, typename T>
HASTEN_VECTOR_INLINE T rounded(Sum x) {
  if constexpr (std::is_same_v<T, Bf16>) {
    return {to_bf16(static_cast<float>(x))};
  } else {
    return static_cast<T>(x);
  }
}

template <typename Sum>
HASTEN_VECTOR_INLINE Sum larger(Sum a, Sum b) { // a NaN stays
  return b > a || b != b ? b : a;
}

template <typename Sum>
HASTEN_VECTOR_INLINE Sum smaller(Sum a, Sum b) {
  return b < a || b != b ? b : a;
}

/// sums = op(a, b). `a` may be `sums`.
template <typename A, typename B, typename Sum>
HASTEN_VECTOR_CLONES void combine(ReduceOp op, const A* a, const B* b, Sum* sums, size_t count) {
  switch (op) {
    case ReduceOp::MAX:
#pragma GCC ivdep
      for (size_t i = 0; i < count; ++i) {
        sums[i] = larger(widened<A, Sum>(a[i]), widened<B, Sum>(b[i]));
      }
      break;
    case ReduceOp::MIN:
#pragma GCC ivdep
      for (size_t i = 0; i < count; ++i) {
        sums[i] = smaller(widened<A, Sum>(a[i]), widened<B, Sum>(b[i]));
      }
      break;
    case ReduceOp::PRODUCT:
#pragma GCC ivdep
      for (size_t i = 0; i < count; ++i) {
        sums[i] = static_cast<Sum>(widened<A, Sum>(a[i]) * widened<B, Sum>(b[i]));
      }
      break;
    default:
#pragma GCC ivdep
      for (size_t i = 0; i < count; ++i) {
        sums[i] = static_cast<Sum>(widened<A, Sum>(a[i]) + widened<B, Sum>(b[i]));
      }
  }
}

template <typename Sum, typename T>
HASTEN_VECTOR_CLONES void round_into(T* __restrict output, const Sum* __restrict sums, Sum divisor,
                                     size_t count) {
  if (divisor == 1) {
    for (size_t i = 0; i < count; ++i) {
      output[i] = rounded<Sum, T>(sums[i]);
    }
  } else {
    for (size_t i = 0; i < count; ++i) {
      output[i] = rounded<Sum, T>(static_cast<Sum>(sums[i] / divisor));
    }
  }
}

/// Half the sum, without a block in between. `output` may be one of the rows.
template <typename T>
HASTEN_VECTOR_CLONES void mean_of_two(const T* a, const T* b, T* output, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    output[i] = static_cast<T>((a[i] + b[i]) / 2);
  }
}

template <typename T, typename Sum, typename To>
void reduce_as(ReduceOp op, const std::vector<const char*>& rows, char* output, size_t count) {
  const auto row = [&](size_t rank) { return reinterpret_cast<const T*>(rows[rank]); };
  auto* const to = reinterpret_cast<To*>(output);
  if constexpr (std::is_same_v<T, Sum> && std::is_same_v<Sum, To>) {
    if (rows.size() == 2) {
      if (op == ReduceOp::AVG) {
        mean_of_two(row(0), row(1), to, count);
      } else {
        combine(op, row(0), row(1), to, count);
      }
      return;
    }
  }
  if (rows.size() == 1) {
    for (size_t i = 0; i < count; ++i) {
      to[i] = rounded<Sum, To>(widened<T, Sum>(row(0)[i]));
    }
    return;
  }
  const auto divisor = static_cast<Sum>(op == ReduceOp::AVG ? rows.size() : 1);
  alignas(64) std::array<Sum, kReduceBlock> sums;
  for (size_t first = 0; first < count; first += kReduceBlock) {
    const size_t size = std::min(kReduceBlock, count - first);
    combine(op, row(0) + first, row(1) + first, sums.data(), size);
    for (size_t rank = 2; rank < rows.size(); ++rank) {
      combine(op, sums.data(), row(rank) + first, sums.data(), size);
    }
    round_into(to + first, sums.data(), divisor, size);
  }
}

template <typename T>
void reduce_floats(ReduceOp op, const std::vector<const char*>& rows, c10::ScalarType to,
                   char* output, size_t count) {
  switch (to) {
    case c10::kDouble:
      return reduce_as<T, double, double>(op, rows, output, count);
    case c10::kFloat:
      return reduce_as<T, std::conditional_t<std::is_same_v<T, double>, double, float>, float>(
          op, rows, output, count);
    case c10::kHalf:
      return reduce_as<T, std::conditional_t<std::is_same_v<T, double>, double, float>, c10::Half>(
          op, rows, output, count);
    default:
      return reduce_as<T, std::conditional_t<std::is_same_v<T, double>, double, float>, Bf16>(
          op, rows, output, count);
  }
}

bool is_reducible(c10::ScalarType type) {
  switch (type) {
    case c10::kDouble:
    case c10::kFloat:
    case c10::kHalf:
    case c10::kBFloat16:
    case c10::kLong:
    case c10::kInt:
    case c10::kShort:
    case c10::kChar:
    case c10::kByte:
    case c10::kBool:
      return true;
    default:
      return false;
  }
}

void reduce_rows(ReduceOp op, c10::ScalarType from, const std::vector<const char*>& rows,
                 c10::ScalarType to, char* output, size_t count) {
  switch (from) {
    case c10::kDouble:
      return reduce_floats<double>(op, rows, to, output, count);
    case c10::kFloat:
      return reduce_floats<float>(op, rows, to, output, count);
    case c10::kHalf:
      return reduce_floats<c10::Half>(op, rows, to, output, count);
    case c10::kBFloat16:
      return reduce_floats<Bf16>(op, rows, to, output, count);
    case c10::kLong: // unsigned, because sums may wrap around
      if (op == ReduceOp::SUM || op == ReduceOp::PRODUCT) {
        return reduce_as<uint64_t, uint64_t, uint64_t>(op, rows, output, count);
      }
      return reduce_as<int64_t, int64_t, int64_t>(op, rows, output, count);
    case c10::kInt:
      if (op == ReduceOp::SUM || op == ReduceOp::PRODUCT) {
        return reduce_as<uint32_t, uint32_t, uint32_t>(op, rows, output, count);
      }
      return reduce_as<int32_t, int32_t, int32_t>(op, rows, output, count);
    case c10::kShort:
      return reduce_as<int16_t, int16_t, int16_t>(op, rows, output, count);
    case c10::kChar:
      return reduce_as<int8_t, int8_t, int8_t>(op, rows, output, count);
    case c10::kBool:
      return reduce_as<uint8_t, uint8_t, uint8_t>(
          op == ReduceOp::SUM || op == ReduceOp::MAX ? ReduceOp::MAX : ReduceOp::MIN, rows, output,
          count);
    default:
      return reduce_as<uint8_t, uint8_t, uint8_t>(op, rows, output, count);
  }
}

} // namespace hasten::detail
