#include "averager_kernels.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

namespace hasten::detail {

// Elements that a thread processes at a time. Also the elements of one partial sum, so that sums
// do not depend on the number of threads.
constexpr int64_t kPassBlock = 1 << 16;

template <typename Function>
void by_pass_blocks(int64_t count, const Function& function) {
  if (count <= kPassBlock) {
    function(int64_t{0}, int64_t{0}, count);
    return;
  }
  const int64_t blocks = (count + kPassBlock - 1) / kPassBlock;
  at::parallel_for(0, blocks, 4, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t begin = block * kPassBlock;
      function(block, begin, std::min(count, begin + kPassBlock));
    }
  });
}

// Calls `function` with a null pointer of the dtype's type.
template <typename Function>
auto with_pass_type(c10::ScalarType dtype, const Function& function) {
  switch (dtype) {
    case c10::kDouble:
      return function(static_cast<double*>(nullptr));
    case c10::kHalf:
      return function(static_cast<c10::Half*>(nullptr));
    case c10::kBFloat16:
      return function(static_cast<c10::BFloat16*>(nullptr));
    default:
      return function(static_cast<float*>(nullptr));
  }
}

template <typename T>
using PassBuffer = std::conditional_t<std::is_same_v<T, double>, double, float>;

bool is_power_of_two(double value) {
  int exponent = 0;
  return std::frexp(value, &exponent) == 0.5;
}

void load_elements(const void* source, c10::ScalarType dtype, void* buffer, int64_t count,
                   double scale) {
  with_pass_type(dtype, [&]<typename T>(T*) {
    using B = PassBuffer<T>;
    const T* from = static_cast<const T*>(source);
    B* to = static_cast<B*>(buffer);
    const B factor = static_cast<B>(scale);
    by_pass_blocks(count, [=](int64_t, int64_t begin, int64_t end) {
      if (std::is_same_v<T, B> && scale == 1) {
        std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin) * sizeof(B));
        return;
      }
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        to[i] = static_cast<B>(from[i]) * factor;
      }
    });
  });
}

void divide_elements(void* buffer, c10::ScalarType dtype, int64_t count, double divisor) {
  with_pass_type(dtype, [&]<typename T>(T*) {
    using B = PassBuffer<T>;
    B* values = static_cast<B*>(buffer);
    const B by = static_cast<B>(divisor);
    by_pass_blocks(count, [=](int64_t, int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        values[i] = values[i] / by;
      }
    });
  });
}

// Squares of a few hundred elements are summed in the buffer's type, then these sums in fp64.
template <typename T, bool kStore, bool kExact, bool kMeasure>
PassSums store_block(T* target, const PassBuffer<T>* sum, int64_t begin, int64_t end,
                     PassBuffer<T> by) {
  using B = PassBuffer<T>;
  constexpr int64_t kRun = 512;
  PassSums sums;
  for (int64_t run = begin; run < end; run += kRun) {
    const int64_t stop = std::min(end, run + kRun);
    B difference = 0;
    B norm = 0;
#pragma omp simd reduction(+ : difference, norm)
    for (int64_t i = run; i < stop; ++i) {
      const B mean = kExact ? sum[i] * by : sum[i] / by;
      if constexpr (kMeasure) {
        const B apart = static_cast<B>(target[i]) - mean;
        difference += apart * apart;
        norm += mean * mean;
      }
      if constexpr (kStore) {
        target[i] = static_cast<T>(mean);
      }
    }
    sums.difference += static_cast<double>(difference);
    sums.norm += static_cast<double>(norm);
  }
  return sums;
}

template <typename T, bool kStore, bool kMeasure>
PassSums store_all(T* target, const PassBuffer<T>* sum, int64_t count, double divisor) {
  using B = PassBuffer<T>;
  const bool exact = is_power_of_two(divisor); // then 1 / divisor is exact
  const B by = static_cast<B>(exact ? 1 / divisor : divisor);
  std::vector<PassSums> parts(static_cast<size_t>((count + kPassBlock - 1) / kPassBlock));
  by_pass_blocks(count, [&, target, sum](int64_t block, int64_t b, int64_t e) {
    parts[static_cast<size_t>(block)] =
        exact ? store_block<T, kStore, true, kMeasure>(target, sum, b, e, by)
              : store_block<T, kStore, false, kMeasure>(target, sum, b, e, by);
  });
  PassSums total;
  for (const PassSums& part : parts) {
    total += part;
  }
  return total;
}

PassSums store_elements(void* target, c10::ScalarType dtype, const void* buffer, int64_t count,
                        double divisor, bool measure) {
  return with_pass_type(dtype, [&]<typename T>(T*) {
    const auto* sum = static_cast<const PassBuffer<T>*>(buffer);
    T* to = static_cast<T*>(target);
    return measure ? store_all<T, true, true>(to, sum, count, divisor)
                   : store_all<T, true, false>(to, sum, count, divisor);
  });
}

PassSums measure_elements(const void* target, c10::ScalarType dtype, const void* mean,
                          int64_t count) {
  return with_pass_type(dtype, [&]<typename T>(T*) {
    return store_all<T, false, true>(static_cast<T*>(const_cast<void*>(target)),
                                     static_cast<const PassBuffer<T>*>(mean), count, 1.0);
  });
}

void correct_elements(void* target, c10::ScalarType dtype, const void* mean, const void* snapshot,
                      int64_t count) {
  with_pass_type(dtype, [&]<typename T>(T*) {
    using B = PassBuffer<T>;
    T* to = static_cast<T*>(target);
    const B* now = static_cast<const B*>(mean);
    const B* then = static_cast<const B*>(snapshot);
    by_pass_blocks(count, [=](int64_t, int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        to[i] = static_cast<T>(static_cast<B>(to[i]) + (now[i] - then[i]));
      }
    });
  });
}

void mix_elements(void* target, c10::ScalarType dtype, const void* mean, double alpha,
                  int64_t count) {
  with_pass_type(dtype, [&]<typename T>(T*) {
    using B = PassBuffer<T>;
    T* to = static_cast<T*>(target);
    const B* now = static_cast<const B*>(mean);
    const B own = static_cast<B>(alpha);
    const B theirs = static_cast<B>(1 - alpha);
    by_pass_blocks(count, [=](int64_t, int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        to[i] = static_cast<T>(own * static_cast<B>(to[i]) + theirs * now[i]);
      }
    });
  });
}

} // namespace hasten::detail
