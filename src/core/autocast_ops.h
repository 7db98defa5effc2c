// Operators that the scope of hasten::Autocast adds to torch's lists.
#pragma once

#include "hasten/core/autocast.h"

namespace hasten::detail {

/// Setting of this thread.
Fp32Ops fp32_ops();
void set_fp32_ops(Fp32Ops ops);

/// Registers kernels under the CPU's autocast for operators for which torch has none there. The
/// first scope does so, once per process. Outside hasten's scopes the kernels only redispatch.
void register_fp32_ops();

} // namespace hasten::detail
