// Processes a tensor of any dtype block by block. Private to the kernels.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/blockwise_8bit.h"
#include "hasten/core/random.h"
#include "hasten/core/vector_kernels.h"
#include "step_kernels.h"

namespace hasten::detail {

// Convert between any dtype and the kernel's; n <= kStepBlock.
void load_numbers(const void* in, StepType type, float* out, int64_t n, double factor);
void load_numbers(const void* in, StepType type, double* out, int64_t n, double factor);
void store_numbers(const float* in, void* out, StepType type, int64_t n);
void store_numbers(const double* in, void* out, StepType type, int64_t n);
/// Rounds to bf16 stochastically, so that the mean is exact. `values` becomes what is stored. n <=
/// kStepBlock.
void store_bf16_at_random(float* values, uint16_t* out, int32_t n, uint32_t key0, uint32_t key1);
/// Codes of blockwise_8bit.h and their values, from the first of a block on. n <= kStepBlock.
void load_codes(const uint8_t* codes, const float* absmax, float* out, int64_t n, bool is_signed);
void store_codes(const float* values, uint8_t* codes, float* absmax, int64_t n, bool is_signed);
/// If other code has written a 16-bit parameter, so that it differs from its rounded fp32 copy, the
/// copy takes the parameter's elements. n <= kStepBlock.
void follow_parameter(const void* parameter, StepType type, float* master, int64_t n);
/// Sum of squares of n <= kStepBlock elements.
double block_square_sum(const float* x, int64_t n);
double block_square_sum(const double* x, int64_t n);

inline int64_t bytes_of(StepType type) {
  return type == StepType::f64 ? 8 : type == StepType::f32 ? 4 : 2;
}
inline void* element(void* data, StepType type, int64_t at) {
  return static_cast<char*>(data) + at * bytes_of(type);
}
inline const void* element(const void* data, StepType type, int64_t at) {
  return static_cast<const char*>(data) + at * bytes_of(type);
}

template <typename T>
constexpr StepType kTypeOf = std::is_same_v<T, double> ? StepType::f64 : StepType::f32;

/// Reads kStepBlock elements at a time as T (in place if they are T) and writes them back.
template <typename T>
class StepBlock {
 public:
  StepBlock(const StepArrays& a, const StepPass& pass) : a_(a), pass_(pass) {
    moments_direct_ = a.moment_type == kTypeOf<T>;
    parameter_direct_ = a.master != nullptr || a.parameter_type == kTypeOf<T>;
    gradient_direct_ = a.gradient_type == kTypeOf<T>;
  }
  /// Whether all arrays are T and the gradient stays unchanged: one call processes everything.
  bool plain() const {
    return moments_direct_ && a_.absmax[0] == nullptr && parameter_direct_ && gradient_direct_ &&
           a_.master == nullptr && pass_.factor == 1 && pass_.after == GradientAfter::keep;
  }

  T* parameter(int64_t at, int64_t n) {
    void* data = element(a_.parameter, a_.parameter_type, at);
    if (a_.master != nullptr) { // then T is float
      follow_parameter(data, a_.parameter_type, a_.master + at, n);
      return reinterpret_cast<T*>(a_.master + at);
    }
    if (parameter_direct_) {
      return static_cast<T*>(data);
    }
    load_numbers(data, a_.parameter_type, parameter_, n, 1);
    return parameter_;
  }
  void store_parameter(const T* p, int64_t at, int64_t n) const {
    if (a_.master != nullptr || !parameter_direct_) {
      store_numbers(p, element(a_.parameter, a_.parameter_type, at), a_.parameter_type, n);
    }
  }

  /// The gradient times the factor. The last pass over it also writes its final value.
  const T* gradient(int64_t at, int64_t n, bool last = true) {
    void* data = element(a_.gradient, a_.gradient_type, at);
    const T* values = static_cast<const T*>(data);
    if (!gradient_direct_ || pass_.factor != 1 || (last && pass_.after == GradientAfter::zero)) {
      load_numbers(data, a_.gradient_type, gradient_, n, pass_.factor);
      values = gradient_;
    }
    if (last && pass_.after == GradientAfter::zero) {
      std::memset(data, 0, static_cast<size_t>(n * bytes_of(a_.gradient_type)));
    } else if (last && pass_.factor != 1 && pass_.after == GradientAfter::scaled) {
      store_numbers(values, data, a_.gradient_type, n);
    }
    return values;
  }

  T* moment(int which, int64_t at, int64_t n) {
    if constexpr (std::is_same_v<T, float>) {
      if (a_.absmax[which] != nullptr) {
        load_codes(static_cast<uint8_t*>(a_.moments[which]) + at,
                   a_.absmax[which] + at / kBlock8Bit, moments_[which], n, which == 0);
        return moments_[which];
      }
    }
    void* data = element(a_.moments[which], a_.moment_type, at);
    if (moments_direct_) {
      return static_cast<T*>(data);
    }
    load_numbers(data, a_.moment_type, moments_[which], n, 1);
    return moments_[which];
  }
  void store_moment(int which, T* values, int64_t at, int64_t n) const {
    if constexpr (std::is_same_v<T, float>) {
      if (a_.absmax[which] != nullptr) {
        store_codes(values, static_cast<uint8_t*>(a_.moments[which]) + at,
                    a_.absmax[which] + at / kBlock8Bit, n, which == 0);
      } else if (!moments_direct_) {
        const uint64_t key = splitmix64(a_.rounding_key + static_cast<uint64_t>(which),
                                        static_cast<uint64_t>(at / kStepBlock));
        store_bf16_at_random(values, static_cast<uint16_t*>(a_.moments[which]) + at,
                             static_cast<int32_t>(n), static_cast<uint32_t>(key),
                             static_cast<uint32_t>(key >> 32));
      }
    }
  }

 private:
  const StepArrays& a_;
  const StepPass& pass_;
  bool moments_direct_, parameter_direct_, gradient_direct_;
  alignas(64) T parameter_[kStepBlock];
  alignas(64) T gradient_[kStepBlock];
  alignas(64) T moments_[3][kStepBlock];
};

/// Calls kernel(p, g, m0, m1, m2, n) over [begin, end).
template <typename T, typename Kernel>
void over_blocks(const StepArrays& a, const StepPass& pass, int64_t begin, int64_t end,
                 const Kernel& kernel) {
  StepBlock<T> block(a, pass);
  const int64_t step = block.plain() ? std::max<int64_t>(end - begin, 1) : kStepBlock;
  for (int64_t at = begin; at < end; at += step) {
    const int64_t n = std::min(step, end - at);
    T* p = block.parameter(at, n);
    const T* g = block.gradient(at, n);
    T* m[3] = {};
    for (int i = 0; i < 3; ++i) {
      m[i] = a.moments[i] != nullptr ? block.moment(i, at, n) : nullptr;
    }
    kernel(p, g, m[0], m[1], m[2], n);
    for (int i = 0; i < 3; ++i) {
      if (m[i] != nullptr) {
        block.store_moment(i, m[i], at, n);
      }
    }
    block.store_parameter(p, at, n);
  }
}

/// Calls use(T{}) with the type in which the tensor is computed.
template <typename Use>
auto in_step_type(const StepArrays& a, const Use& use) {
  return a.parameter_type == StepType::f64 ? use(double{}) : use(float{});
}

/// A group's coefficients in the type in which its tensors are computed.
template <typename T>
struct NumbersAs {
  explicit NumbersAs(const StepNumbers& k)
      : lr(static_cast<T>(k.lr)),
        keep(static_cast<T>(k.keep)),
        l2(static_cast<T>(k.l2)),
        beta1(static_cast<T>(k.beta1)),
        share1(static_cast<T>(1 - k.beta1)),
        beta2(static_cast<T>(k.beta2)),
        share2(static_cast<T>(1 - k.beta2)),
        step_size(static_cast<T>(k.step_size)),
        root(static_cast<T>(k.root)),
        eps(static_cast<T>(k.eps)),
        momentum(static_cast<T>(k.momentum)),
        share(static_cast<T>(k.share)) {}
  T lr, keep, l2, beta1, share1, beta2, share2, step_size, root, eps, momentum, share;
};

} // namespace hasten::detail
