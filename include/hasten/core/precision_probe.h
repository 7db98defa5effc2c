// Measures how fast this machine computes in 16 bits.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>

#include "hasten/config/precision.h"

namespace hasten {

/// Time of a linear layer's products, forward and backward, in fp32 divided by the time in `dtype`.
/// Above 1, `dtype` is faster. Uses this thread's at::get_num_threads() threads on the CPU. Runs
/// the layer a few times, which takes longest for fp16 on machines where fp16 is slow. Measures
/// once per process, dtype and number of threads.
double precision_speedup(c10::ScalarType dtype);

/// The speedup from which Precision::automatic chooses bf16 on the CPU. Below it, conversions cost as much
/// as the products gain.
inline constexpr double kWorthwhileSpeedup = 1.3;

/// Empty if this device can compute in this precision, else the reason. On the CPU it runs a small
/// layer forward and backward. A GPU needs bf16 in hardware.
std::string why_no_precision(Precision precision, const c10::Device& device = c10::DeviceType::CPU);

} // namespace hasten
