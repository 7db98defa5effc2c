// Optimizers that update every element independently.
#include <cmath>

#include "step_block.h"

namespace hasten::detail {

// --- Adam, AdamW --------------------------------------------------------------------

template <typename T, bool kAmsgrad>
HASTEN_VECTOR_CLONES void adam_loop(T* __restrict p, const T* __restrict g, T* __restrict m,
                                    T* __restrict v, T* __restrict x, int64_t n,
                                    const NumbersAs<T> k) {
  for (int64_t i = 0; i < n; ++i) {
    const T gradient = g[i] + k.l2 * p[i];
    const T mean = m[i] + (gradient - m[i]) * k.share1;
    const T square = v[i] * k.beta2 + gradient * gradient * k.share2;
    m[i] = mean;
    v[i] = square;
    T under = square;
    if constexpr (kAmsgrad) {
      under = x[i] > square ? x[i] : square;
      x[i] = under;
    }
    p[i] = p[i] * k.keep - k.step_size * mean / (std::sqrt(under) * k.root + k.eps);
  }
}

void adam_step(const StepArrays& a, const StepNumbers& numbers, const StepPass& pass, int64_t begin,
               int64_t end) {
  in_step_type(a, [&]<typename T>(T) {
    const NumbersAs<T> k(numbers);
    over_blocks<T>(a, pass, begin, end, [&](T* p, const T* g, T* m, T* v, T* x, int64_t n) {
      numbers.amsgrad ? adam_loop<T, true>(p, g, m, v, x, n, k)
                      : adam_loop<T, false>(p, g, m, v, x, n, k);
    });
  });
}

// --- SGD ----------------------------------------------------------------------------

template <typename T>
HASTEN_VECTOR_CLONES void sgd_loop(T* __restrict p, const T* __restrict g, int64_t n,
                                   const NumbersAs<T> k) {
  for (int64_t i = 0; i < n; ++i) {
    p[i] -= k.lr * (g[i] + k.l2 * p[i]);
  }
}
template <typename T, bool kNesterov>
HASTEN_VECTOR_CLONES void sgd_momentum_loop(T* __restrict p, const T* __restrict g, T* __restrict b,
                                            int64_t n, const NumbersAs<T> k) {
  for (int64_t i = 0; i < n; ++i) {
    const T gradient = g[i] + k.l2 * p[i];
    const T buffer = b[i] * k.momentum + gradient * k.share;
    b[i] = buffer;
    // Nesterov adds the momentum, beta1, also in the step that starts the buffer.
    p[i] -= k.lr * (kNesterov ? gradient + buffer * k.beta1 : buffer);
  }
}

void sgd_step(const StepArrays& a, const StepNumbers& numbers, const StepPass& pass, int64_t begin,
              int64_t end) {
  in_step_type(a, [&]<typename T>(T) {
    const NumbersAs<T> k(numbers);
    over_blocks<T>(a, pass, begin, end, [&](T* p, const T* g, T* b, T*, T*, int64_t n) {
      if (b == nullptr) {
        sgd_loop(p, g, n, k);
      } else if (numbers.nesterov) {
        sgd_momentum_loop<T, true>(p, g, b, n, k);
      } else {
        sgd_momentum_loop<T, false>(p, g, b, n, k);
      }
    });
  });
}

// --- Lion ---------------------------------------------------------------------------

template <typename T>
HASTEN_VECTOR_CLONES void lion_loop(T* __restrict p, const T* __restrict g, T* __restrict m,
                                    int64_t n, const NumbersAs<T> k) {
  for (int64_t i = 0; i < n; ++i) {
    const T mixed = m[i] + (g[i] - m[i]) * k.share1;
    // NaN has no sign; it must not count as 0.
    const T sign = mixed > 0 ? T(1) : mixed < 0 ? T(-1) : mixed;
    p[i] = p[i] * k.keep - k.lr * sign;
    m[i] += (g[i] - m[i]) * k.share2;
  }
}

void lion_step(const StepArrays& a, const StepNumbers& numbers, const StepPass& pass, int64_t begin,
               int64_t end) {
  in_step_type(a, [&]<typename T>(T) {
    const NumbersAs<T> k(numbers);
    over_blocks<T>(a, pass, begin, end,
                   [&](T* p, const T* g, T* m, T*, T*, int64_t n) { lion_loop(p, g, m, n, k); });
  });
}

} // namespace hasten::detail
