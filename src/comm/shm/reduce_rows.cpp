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

template <typename A, typename B, typename Sum, typename F>
HASTEN_VECTOR_INLINE void combine_by(const F& f, const A* a, const B* b, Sum* sums, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    sums[i] = static_cast<Sum>(f(widened<A, Sum>(a[i]), widened<B, Sum>(b[i])));
  }
}

/// sums = op(a, b). `a` may be `sums`. Of two numbers that are compared, a NaN stays.
template <typename A, typename B, typename Sum>
HASTEN_VECTOR_CLONES void combine(ReduceOp op, const A* a, const B* b, Sum* sums, size_t count) {
  switch (op) {
    case ReduceOp::MAX:
      return combine_by([](Sum x, Sum y) { return y > x || y != y ? y : x; }, a, b, sums, count);
    case ReduceOp::MIN:
      return combine_by([](Sum x, Sum y) { return y < x || y != y ? y : x; }, a, b, sums, count);
    case ReduceOp::PRODUCT:
      return combine_by([](Sum x, Sum y) { return x * y; }, a, b, sums, count);
    default:
      return combine_by([](Sum x, Sum y) { return x + y; }, a, b, sums, count);
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

template <typename Sum, typename T>
HASTEN_VECTOR_CLONES void divide_as(const Sum* row, Sum divisor, T* output, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    output[i] = rounded<Sum, T>(static_cast<Sum>(row[i] / divisor));
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

template <typename T, typename Sum = T, typename To = Sum>
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
  using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;
  switch (to) {
    case c10::kDouble:
      return reduce_as<T, double>(op, rows, output, count);
    case c10::kFloat:
      return reduce_as<T, Sum, float>(op, rows, output, count);
    case c10::kHalf:
      return reduce_as<T, Sum, c10::Half>(op, rows, output, count);
    default:
      return reduce_as<T, Sum, Bf16>(op, rows, output, count);
  }
}

void divide_row(const char* row, int divisor, c10::ScalarType to, char* output, size_t count) {
  const auto divide = [&]<typename Sum, typename T>(Sum by, T* into) {
    divide_as(reinterpret_cast<const Sum*>(row), by, into, count);
  };
  const auto by = static_cast<float>(divisor);
  switch (to) {
    case c10::kDouble:
      return divide(double{by}, reinterpret_cast<double*>(output));
    case c10::kHalf:
      return divide(by, reinterpret_cast<c10::Half*>(output));
    case c10::kBFloat16:
      return divide(by, reinterpret_cast<Bf16*>(output));
    default:
      return divide(by, reinterpret_cast<float*>(output));
  }
}

bool is_reducible(c10::ScalarType type) {
  constexpr std::array kTypes{c10::kDouble, c10::kFloat, c10::kHalf, c10::kBFloat16, c10::kLong,
                              c10::kInt,    c10::kShort, c10::kChar, c10::kByte,     c10::kBool};
  return std::ranges::find(kTypes, type) != kTypes.end();
}

void reduce_rows(ReduceOp op, c10::ScalarType from, const std::vector<const char*>& rows,
                 c10::ScalarType to, char* output, size_t count) {
  const bool wraps = op == ReduceOp::SUM || op == ReduceOp::PRODUCT;
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
      return wraps ? reduce_as<uint64_t>(op, rows, output, count)
                   : reduce_as<int64_t>(op, rows, output, count);
    case c10::kInt:
      return wraps ? reduce_as<uint32_t>(op, rows, output, count)
                   : reduce_as<int32_t>(op, rows, output, count);
    case c10::kShort:
      return reduce_as<int16_t>(op, rows, output, count);
    case c10::kChar:
      return reduce_as<int8_t>(op, rows, output, count);
    case c10::kBool:
      op = op == ReduceOp::SUM || op == ReduceOp::MAX ? ReduceOp::MAX : ReduceOp::MIN;
      [[fallthrough]];
    default:
      return reduce_as<uint8_t>(op, rows, output, count);
  }
}

} // namespace hasten::detail
