// Optimizers that read a whole tensor before they change it.
#include <cmath>
#include <vector>

#include "step_block.h"

namespace hasten::detail {

// --- Adafactor ----------------------------------------------------------------------

template <typename T>
HASTEN_VECTOR_CLONES void add_squares_loop(const T* __restrict g, double* __restrict sums,
                                           int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    sums[i] += static_cast<double>(g[i]) * static_cast<double>(g[i]);
  }
}
template <typename T>
HASTEN_VECTOR_CLONES void multiply_loop(const T* __restrict g, const T* __restrict by,
                                        T* __restrict out, int64_t n, T factor) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = g[i] * (by[i] * factor);
  }
}
// v is the mean square; out = g / sqrt(v).
template <typename T>
HASTEN_VECTOR_CLONES void over_root_loop(const T* __restrict g, T* __restrict v, T* __restrict out,
                                         int64_t n, T beta, T share, T eps) {
  for (int64_t i = 0; i < n; ++i) {
    v[i] = v[i] * beta + (g[i] * g[i] + eps) * share;
    out[i] = g[i] / std::sqrt(v[i]);
  }
}
// p <- keep p - m, m <- beta m + share u; without m, p <- keep p - share u.
template <typename T>
HASTEN_VECTOR_CLONES void adafactor_apply_loop(T* __restrict p, const T* __restrict u,
                                               T* __restrict m, int64_t n, T keep, T beta,
                                               T share) {
  if (m == nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      p[i] = p[i] * keep - u[i] * share;
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    m[i] = m[i] * beta + u[i] * share;
    p[i] = p[i] * keep - m[i];
  }
}

template <typename T>
class AdafactorStep {
 public:
  AdafactorStep(const StepArrays& a, const StepNumbers& k, const StepPass& pass)
      : a_(a),
        k_(k),
        block_(a, pass),
        beta2_(static_cast<T>(k.beta2)),
        share2_(static_cast<T>(1 - k.beta2)),
        eps_(static_cast<T>(k.eps)),
        rows_(a.columns > 0 ? a.rows : 1),
        columns_(a.columns > 0 ? a.columns : a.count),
        matrices_(a.count / (rows_ * columns_)) {}

  void run() {
    double rms = 0;
    if (k_.scale_parameter) {
      for (int64_t at = 0; at < a_.count; at += kStepBlock) {
        const int64_t n = std::min(kStepBlock, a_.count - at);
        rms += block_square_sum(block_.parameter(at, n), n);
      }
      rms = std::sqrt(rms / static_cast<double>(a_.count));
    }
    const double lr = k_.lr * (k_.scale_parameter ? std::max(k_.eps_scale, rms) : 1.0);
    if (a_.columns > 0) {
      row_factors_.resize(static_cast<size_t>(matrices_ * rows_));
      column_factors_.resize(static_cast<size_t>(matrices_ * columns_));
      for (int64_t matrix = 0; matrix < matrices_; ++matrix) {
        take_squares(matrix);
      }
    }
    double squares = 0;
    walk([&](int64_t, const T* u, int64_t n) { squares += block_square_sum(u, n); }, false);
    const double length = std::sqrt(squares / static_cast<double>(a_.count));
    const double size = lr / std::max(1.0, length / k_.clip_threshold);
    const bool mean = a_.moments[2] != nullptr;
    const auto keep = static_cast<T>(1 - (1 - k_.keep) * lr);
    walk(
        [&](int64_t at, const T* u, int64_t n) {
          T* p = block_.parameter(at, n);
          T* m = mean ? block_.moment(2, at, n) : nullptr;
          adafactor_apply_loop(p, u, m, n, keep, static_cast<T>(k_.beta1),
                               static_cast<T>(mean ? (1 - k_.beta1) * size : size));
          block_.store_parameter(p, at, n);
        },
        true);
  }

 private:
  // Writes sums of squares by row and column into the moments, and their inverse roots.
  void take_squares(int64_t matrix) {
    T* row_moments = static_cast<T*>(a_.moments[0]) + matrix * rows_;
    T* column_moments = static_cast<T*>(a_.moments[1]) + matrix * columns_;
    T* row_factors = row_factors_.data() + matrix * rows_;
    T* column_factors = column_factors_.data() + matrix * columns_;
    column_sums_.assign(static_cast<size_t>(columns_), 0.0);
    double mean_of_rows = 0;
    for (int64_t row = 0; row < rows_; ++row) {
      double sum = 0;
      for (int64_t column = 0; column < columns_; column += kStepBlock) {
        const int64_t n = std::min(kStepBlock, columns_ - column);
        const T* g = block_.gradient((matrix * rows_ + row) * columns_ + column, n, false);
        sum += block_square_sum(g, n);
        add_squares_loop(g, column_sums_.data() + column, n);
      }
      const double square = sum / static_cast<double>(columns_) + k_.eps;
      row_moments[row] = row_moments[row] * beta2_ + static_cast<T>(square) * share2_;
      mean_of_rows += static_cast<double>(row_moments[row]);
    }
    mean_of_rows /= static_cast<double>(rows_);
    for (int64_t row = 0; row < rows_; ++row) {
      row_factors[row] =
          static_cast<T>(std::sqrt(mean_of_rows / static_cast<double>(row_moments[row])));
    }
    for (int64_t column = 0; column < columns_; ++column) {
      const double square =
          column_sums_[static_cast<size_t>(column)] / static_cast<double>(rows_) + k_.eps;
      column_moments[column] = column_moments[column] * beta2_ + static_cast<T>(square) * share2_;
      column_factors[column] =
          static_cast<T>(1 / std::sqrt(static_cast<double>(column_moments[column])));
    }
  }

  /// Calls use(at, update, n) over the whole tensor. If not factored, the first walk (`last` false)
  /// updates the mean square.
  template <typename Use>
  void walk(const Use& use, bool last) {
    alignas(64) T update[kStepBlock];
    for (int64_t row = 0; row < matrices_ * rows_; ++row) {
      for (int64_t column = 0; column < columns_; column += kStepBlock) {
        const int64_t n = std::min(kStepBlock, columns_ - column);
        const int64_t at = row * columns_ + column;
        const T* g = block_.gradient(at, n, last);
        if (a_.columns > 0) {
          const int64_t matrix = row / rows_;
          multiply_loop(g, column_factors_.data() + matrix * columns_ + column, update, n,
                        row_factors_[static_cast<size_t>(row)]);
        } else {
          over_root_loop(g, static_cast<T*>(a_.moments[0]) + at, update, n, last ? T(1) : beta2_,
                         last ? T(0) : share2_, last ? T(0) : eps_);
        }
        use(at, update, n);
      }
    }
  }

  const StepArrays& a_;
  const StepNumbers& k_;
  StepBlock<T> block_;
  const T beta2_, share2_, eps_;
  const int64_t rows_, columns_, matrices_;
  std::vector<double> column_sums_{};
  std::vector<T> row_factors_{}, column_factors_{};
};

void adafactor_step(const StepArrays& a, const StepNumbers& k, const StepPass& pass, int64_t,
                    int64_t) {
  in_step_type(a, [&]<typename T>(T) { AdafactorStep<T>(a, k, pass).run(); });
}

} // namespace hasten::detail
