// The passes of an Averager over memory: from tensors into buffers and back.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace hasten::detail {

// Sums over a pass, in fp64.
struct PassSums {
  double difference = 0; // of (x - mean)^2
  double norm = 0; // of mean^2

  void operator+=(const PassSums& other) {
    difference += other.difference;
    norm += other.norm;
  }
};

// buffer = source * scale. `dtype` is the source's; the buffer is fp64 for fp64, otherwise fp32.
// On the CPU.
void load_elements(const void* source, c10::ScalarType dtype, void* buffer, int64_t count,
                   double scale);

// mean = sum / divisor, in the buffer; does not write to the tensor.
void divide_elements(void* buffer, c10::ScalarType dtype, int64_t count, double divisor);

// target = sum / divisor.
PassSums store_elements(void* target, c10::ScalarType dtype, const void* buffer, int64_t count,
                        double divisor, bool measure);

// Only the sums.
PassSums measure_elements(const void* target, c10::ScalarType dtype, const void* mean,
                          int64_t count);

// target += mean - snapshot.
void correct_elements(void* target, c10::ScalarType dtype, const void* mean, const void* snapshot,
                      int64_t count);

// target = alpha target + (1 - alpha) mean.
void mix_elements(void* target, c10::ScalarType dtype, const void* mean, double alpha,
                  int64_t count);

} // namespace hasten::detail
