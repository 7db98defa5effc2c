// How quickly this machine computes in 16 bits, found out by trying.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

#include "hasten/core/precision.h"

namespace hasten {

/// Time of a linear layer's products, forward and backward, in fp32 over that in
/// `dtype`, by this thread's at::get_num_threads() threads on the CPU: above 1 it is
/// quicker. Takes a few runs of that layer, which is longest with fp16 where that is
/// slow. Measured once a process, dtype and number of threads.
double precision_speedup(c10::ScalarType dtype);

/// From how much on Precision::automatic takes bf16: below it, what is gained in
/// products is lost in conversions.
inline constexpr double kWorthwhileSpeedup = 1.3;

/// Empty where this machine computes in this precision, else why it does not. Runs a
/// small layer forward and backward.
std::string why_no_precision(Precision precision);

} // namespace hasten
