// Operators that the scope of hasten::Autocast adds to torch's lists.
#pragma once

#include "hasten/core/autocast.h"

namespace hasten::detail {

/// Of this thread.
Fp32Ops fp32_ops();
void set_fp32_ops(Fp32Ops ops);

/// Kernels under the CPU's autocast for operators that torch has none for there. Once
/// a process, by the first scope. Outside scopes of hasten they pass through.
void register_fp32_ops();

} // namespace hasten::detail
