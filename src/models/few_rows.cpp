#include "few_rows.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "hasten/core/autocast.h"
#include "hasten/core/memory_rehearsal.h"
#include "hasten/core/vector_kernels.h"

namespace hasten::detail {

constexpr int64_t kMostFewRows = 16;
constexpr int64_t kRowsAtOnce = 4; // their partial sums fit into registers
constexpr int64_t kLanes = 16; // partial sums of a row
constexpr int64_t kColumnsAtOnce = 512; // of a weight [in, out]

/// y[r][o] = sum over i of x[r][i] w[o][i], for `rows` <= kRowsAtOnce rows and o in [begin, end).
template <int64_t kRows>
HASTEN_VECTOR_INLINE void dot_rows(const float* x, const float* w, int64_t in, int64_t out,
                                   int64_t begin, int64_t end, float* y) {
  const int64_t whole = in / kLanes * kLanes;
  for (int64_t o = begin; o < end; ++o) {
    const float* row = w + o * in;
    float sums[kRows][kLanes] = {};
    for (int64_t i = 0; i < whole; i += kLanes) {
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t j = 0; j < kLanes; ++j) {
          sums[r][j] += x[r * in + i + j] * row[i + j];
        }
      }
    }
    for (int64_t r = 0; r < kRows; ++r) {
      float sum = 0;
      for (int64_t j = 0; j < kLanes; ++j) {
        sum += sums[r][j];
      }
      for (int64_t i = whole; i < in; ++i) {
        sum += x[r * in + i] * row[i];
      }
      y[r * out + o] = sum;
    }
  }
}

HASTEN_VECTOR_CLONES
void dot_rows_of(int64_t rows, const float* x, const float* w, int64_t in, int64_t out,
                 int64_t begin, int64_t end, float* y) {
  switch (rows) {
    case 1:
      return dot_rows<1>(x, w, in, out, begin, end, y);
    case 2:
      return dot_rows<2>(x, w, in, out, begin, end, y);
    case 3:
      return dot_rows<3>(x, w, in, out, begin, end, y);
    default:
      return dot_rows<4>(x, w, in, out, begin, end, y);
  }
}

/// The same for w [in, out]: adds x[r][i] w[i][o] for one i after the other, four at a time.
HASTEN_VECTOR_CLONES
void add_columns_of(int64_t rows, const float* x, const float* w, int64_t in, int64_t out,
                    int64_t begin, int64_t end, float* y) {
  for (int64_t r = 0; r < rows; ++r) {
    std::fill(y + r * out + begin, y + r * out + end, 0.0f);
  }
  const auto add = [&](int64_t i, int64_t r, float* to) {
    const float* a = w + i * out;
    const float* b = a + out;
    const float* c = b + out;
    const float* d = c + out;
    const float* at = x + r * in + i;
    const float p = at[0], q = at[1], s = at[2], t = at[3];
    for (int64_t o = begin; o < end; ++o) {
      to[o] += (p * a[o] + q * b[o]) + (s * c[o] + t * d[o]);
    }
  };
  const int64_t whole = in / 4 * 4;
  for (int64_t i = 0; i < whole; i += 4) {
    for (int64_t r = 0; r < rows; ++r) {
      add(i, r, y + r * out);
    }
  }
  for (int64_t i = whole; i < in; ++i) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t o = begin; o < end; ++o) {
        y[r * out + o] += x[r * in + i] * w[i * out + o];
      }
    }
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
  const float *from = x.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  const int64_t columns = by_row ? 64 : kColumnsAtOnce;
  at::parallel_for(0, (out + columns - 1) / columns, 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t begin = block * columns, end = std::min(out, begin + columns);
      for (int64_t row = 0; row < rows; row += kRowsAtOnce) {
        const int64_t count = std::min(kRowsAtOnce, rows - row);
        if (by_row) {
          dot_rows_of(count, from + row * in, w, in, out, begin, end, to + row * out);
        } else {
          add_columns_of(count, from + row * in, w, in, out, begin, end, to + row * out);
        }
      }
    }
  });
  return bias.defined() ? y.add_(bias) : y;
}

} // namespace hasten::detail
