// Optimizers that update every element independently.
#include <cmath>

#include "step_block.h"

namespace hasten::detail {

// --- Adam, AdamW --------------------------------------------------------------------

template <typename T, bool kAmsgrad>
HASTEN_VECTOR_INLINE void adam_of(T* __restrict p, const T* __restrict g, T* __restrict m,
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

#define HASTEN_ADAM_LOOP(T)                                                             \
  HASTEN_VECTOR_CLONES void adam_loop(T* p, const T* g, T* m, T* v, int64_t n,          \
                                      const NumbersAs<T>& k) {                          \
    adam_of<T, false>(p, g, m, v, nullptr, n, k);                                       \
  }                                                                                     \
  HASTEN_VECTOR_CLONES void amsgrad_loop(T* p, const T* g, T* m, T* v, T* x, int64_t n, \
                                         const NumbersAs<T>& k) {                       \
    adam_of<T, true>(p, g, m, v, x, n, k);                                              \
  }
HASTEN_ADAM_LOOP(float)
HASTEN_ADAM_LOOP(double)

void adam_step(const StepArrays& a, const StepNumbers& numbers, const StepPass& pass, int64_t begin,
               int64_t end) {
  in_step_type(a, [&]<typename T>(T) {
    const NumbersAs<T> k(numbers);
    over_blocks<T>(a, pass, begin, end, [&](T* p, const T* g, T* m, T* v, T* x, int64_t n) {
      numbers.amsgrad ? amsgrad_loop(p, g, m, v, x, n, k) : adam_loop(p, g, m, v, n, k);
    });
  });
}

// --- SGD ----------------------------------------------------------------------------

template <typename T>
HASTEN_VECTOR_INLINE void sgd_of(T* __restrict p, const T* __restrict g, int64_t n,
                                 const NumbersAs<T> k) {
  for (int64_t i = 0; i < n; ++i) {
    p[i] -= k.lr * (g[i] + k.l2 * p[i]);
  }
}
template <typename T, bool kNesterov>
HASTEN_VECTOR_INLINE void sgd_momentum_of(T* __restrict p, const T* __restrict g, T* __restrict b,
                                          int64_t n, const NumbersAs<T> k) {
  for (int64_t i = 0; i < n; ++i) {
    const T gradient = g[i] + k.l2 * p[i];
    const T buffer = b[i] * k.momentum + gradient * k.share;
    b[i] = buffer;
    // Nesterov adds the momentum, beta1, also in the step that starts the buffer.
    p[i] -= k.lr * (kNesterov ? gradient + buffer * k.beta1 : buffer);
  }
}

#define HASTEN_SGD_LOOP(T)                                                                 \
  HASTEN_VECTOR_CLONES void sgd_loop(T* p, const T* g, int64_t n, const NumbersAs<T>& k) { \
    sgd_of<T>(p, g, n, k);                                                                 \
  }                                                                                        \
  HASTEN_VECTOR_CLONES void sgd_momentum_loop(T* p, const T* g, T* b, int64_t n,           \
                                              const NumbersAs<T>& k) {                     \
    sgd_momentum_of<T, false>(p, g, b, n, k);                                              \
  }                                                                                        \
  HASTEN_VECTOR_CLONES void sgd_nesterov_loop(T* p, const T* g, T* b, int64_t n,           \
                                              const NumbersAs<T>& k) {                     \
    sgd_momentum_of<T, true>(p, g, b, n, k);                                               \
  }
HASTEN_SGD_LOOP(float)
HASTEN_SGD_LOOP(double)

void sgd_step(const StepArrays& a, const StepNumbers& numbers, const StepPass& pass, int64_t begin,
              int64_t end) {
  in_step_type(a, [&]<typename T>(T) {
    const NumbersAs<T> k(numbers);
    over_blocks<T>(a, pass, begin, end, [&](T* p, const T* g, T* b, T*, T*, int64_t n) {
      if (b == nullptr) {
        sgd_loop(p, g, n, k);
      } else if (numbers.nesterov) {
        sgd_nesterov_loop(p, g, b, n, k);
      } else {
        sgd_momentum_loop(p, g, b, n, k);
      }
    });
  });
}

// --- Lion ---------------------------------------------------------------------------

template <typename T>
HASTEN_VECTOR_INLINE void lion_of(T* __restrict p, const T* __restrict g, T* __restrict m,
                                  int64_t n, const NumbersAs<T> k) {
  for (int64_t i = 0; i < n; ++i) {
    const T mixed = m[i] + (g[i] - m[i]) * k.share1;
    // NaN has no sign; it must not count as 0.
    const T sign = mixed > 0 ? T(1) : mixed < 0 ? T(-1) : mixed;
    p[i] = p[i] * k.keep - k.lr * sign;
    m[i] += (g[i] - m[i]) * k.share2;
  }
}

#define HASTEN_LION_LOOP(T)                                                                       \
  HASTEN_VECTOR_CLONES void lion_loop(T* p, const T* g, T* m, int64_t n, const NumbersAs<T>& k) { \
    lion_of<T>(p, g, m, n, k);                                                                    \
  }
HASTEN_LION_LOOP(float)
HASTEN_LION_LOOP(double)

void lion_step(const StepArrays& a, const StepNumbers& numbers, const StepPass& pass, int64_t begin,
               int64_t end) {
  in_step_type(a, [&]<typename T>(T) {
    const NumbersAs<T> k(numbers);
    over_blocks<T>(a, pass, begin, end,
                   [&](T* p, const T* g, T* m, T*, T*, int64_t n) { lion_loop(p, g, m, n, k); });
  });
}

} // namespace hasten::detail
