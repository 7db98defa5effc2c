#include "few_rows.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "hasten/core/autocast.h"
#include "hasten/core/memory_rehearsal.h"
#include "hasten/core/vector_kernels.h"

namespace hasten::detail {

constexpr int64_t kMostFewRows = 16;
constexpr int64_t kLanes = 16; // of a sum; a CPU with narrower registers uses several
constexpr int64_t kChains = 2; // sums of one dot product, so that additions overlap
constexpr int64_t kInputsAtOnce = 8; // of a weight [in, out]
constexpr int64_t kMostColumns = 512; // of a weight [in, out], of a thread at once
constexpr int64_t kAhead = 512; // elements of a weight [out, in] from now, to be fetched

/// The product y [rows, out] = x [rows, in] * w. The bits of a row do not depend on the other rows.
struct FewRows {
  typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
  typedef float Unaligned
      __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

  const float* x = nullptr;
  const float* w = nullptr; // [out, in] or [in, out]
  int64_t rows = 0;
  int64_t in = 0;
  int64_t out = 0;
  float* y = nullptr;
};

template <int64_t kRows>
HASTEN_VECTOR_INLINE void dot_rows(const FewRows& of, int64_t row, int64_t o) {
  constexpr int64_t kStep = kLanes * kChains;
  const int64_t whole = of.in / kStep * kStep;
  const float* x = of.x + row * of.in;
  const float* w = of.w + o * of.in;
  FewRows::Vector sums[kRows][kChains] = {};
  for (int64_t i = 0; i < whole; i += kStep) {
    for (int64_t k = 0; k < kStep; k += kLanes) {
      __builtin_prefetch(w + i + k + kAhead);
      const FewRows::Vector weights = *reinterpret_cast<const FewRows::Unaligned*>(w + i + k);
      for (int64_t r = 0; r < kRows; ++r) {
        sums[r][k / kLanes] +=
            weights * *reinterpret_cast<const FewRows::Unaligned*>(x + r * of.in + i + k);
      }
    }
  }
  for (int64_t r = 0; r < kRows; ++r) {
    const FewRows::Vector sum = sums[r][0] + sums[r][1];
    float lanes[kLanes];
    __builtin_memcpy(lanes, &sum, sizeof lanes);
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
      for (int64_t j = 0; j < half; ++j) {
        lanes[j] += lanes[j + half];
      }
    }
    for (int64_t i = whole; i < of.in; ++i) {
      lanes[0] += x[r * of.in + i] * w[i];
    }
    of.y[(row + r) * of.out + o] = lanes[0];
  }
}

/// For w [out, in] and o in [begin, end).
HASTEN_VECTOR_CLONES
void multiply_by_rows(const FewRows& of, int64_t begin, int64_t end) {
  for (int64_t o = begin; o < end; ++o) {
    int64_t row = 0;
    for (; row + 2 <= of.rows; row += 2) {
      dot_rows<2>(of, row, o);
    }
    if (row < of.rows) {
      dot_rows<1>(of, row, o);
    }
  }
}

/// Adds x[r][i] w[i][o] for kInputs values of i.
template <int64_t kRows, int64_t kInputs>
HASTEN_VECTOR_INLINE void add_products(const FewRows& of, int64_t row, int64_t i, int64_t begin,
                                       int64_t end) {
  const float* x = of.x + row * of.in + i;
  const float* w = of.w + i * of.out;
  float* y = of.y + row * of.out;
  int64_t o = begin;
  for (; o + kLanes <= end; o += kLanes) {
    FewRows::Vector sums[kRows];
    for (int64_t r = 0; r < kRows; ++r) {
      sums[r] = *reinterpret_cast<const FewRows::Unaligned*>(y + r * of.out + o);
    }
    for (int64_t k = 0; k < kInputs; ++k) {
      __builtin_prefetch(w + (k + kInputs) * of.out + o);
      const FewRows::Vector weights =
          *reinterpret_cast<const FewRows::Unaligned*>(w + k * of.out + o);
      for (int64_t r = 0; r < kRows; ++r) {
        sums[r] += weights * x[r * of.in + k];
      }
    }
    for (int64_t r = 0; r < kRows; ++r) {
      *reinterpret_cast<FewRows::Unaligned*>(y + r * of.out + o) = sums[r];
    }
  }
  for (; o < end; ++o) {
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t k = 0; k < kInputs; ++k) {
        y[r * of.out + o] += w[k * of.out + o] * x[r * of.in + k];
      }
    }
  }
}

template <int64_t kInputs>
HASTEN_VECTOR_INLINE void add_products_of_rows(const FewRows& of, int64_t i, int64_t begin,
                                               int64_t end) {
  int64_t row = 0;
  for (; row + 4 <= of.rows; row += 4) {
    add_products<4, kInputs>(of, row, i, begin, end);
  }
  for (; row < of.rows; ++row) {
    add_products<1, kInputs>(of, row, i, begin, end);
  }
}

/// For w [in, out] and o in [begin, end).
HASTEN_VECTOR_CLONES
void multiply_by_columns(const FewRows& of, int64_t begin, int64_t end) {
  for (int64_t r = 0; r < of.rows; ++r) {
    std::fill(of.y + r * of.out + begin, of.y + r * of.out + end, 0.0f);
  }
  int64_t i = 0;
  for (; i + kInputsAtOnce <= of.in; i += kInputsAtOnce) {
    add_products_of_rows<kInputsAtOnce>(of, i, begin, end);
  }
  for (; i < of.in; ++i) {
    add_products_of_rows<1>(of, i, begin, end);
  }
}

bool takes_few_rows(const at::Tensor& x, const at::Tensor& weight) {
  const auto plain = [](const at::Tensor& tensor) {
    return tensor.is_cpu() && tensor.scalar_type() == at::kFloat && tensor.numel() > 0;
  };
  return x.is_inference() && plain(x) && plain(weight) && weight.dim() == 2 &&
         x.numel() / x.size(-1) <= kMostFewRows &&
         (weight.is_contiguous() || weight.t().is_contiguous()) && !autocast_dtype(at::kCPU) &&
         !in_memory_rehearsal();
}

at::Tensor few_rows_linear(const at::Tensor& x_in, const at::Tensor& weight,
                           const at::Tensor& bias) {
  const at::Tensor x = x_in.contiguous();
  const int64_t out = weight.size(0), in = weight.size(1), rows = x.numel() / in;
  auto sizes = x.sizes().vec();
  sizes.back() = out;
  at::Tensor y = at::empty(sizes, x.options());
  const bool by_row = weight.is_contiguous();
  const FewRows of{x.const_data_ptr<float>(),  weight.const_data_ptr<float>(), rows, in, out,
                   y.mutable_data_ptr<float>()};
  // Equal parts for the threads, of whole vectors.
  const auto ceil = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t threads = at::get_num_threads();
  const int64_t parts = threads * (by_row ? 1 : ceil(out, threads * kMostColumns));
  const int64_t columns = ceil(ceil(out, parts), kLanes) * kLanes;
  at::parallel_for(0, ceil(out, columns), 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t begin = block * columns, end = std::min(out, begin + columns);
      by_row ? multiply_by_rows(of, begin, end) : multiply_by_columns(of, begin, end);
    }
  });
  return bias.defined() ? y.add_(bias) : y;
}

} // namespace hasten::detail
