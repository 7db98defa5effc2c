// The plain all-reduce of buckets that a hook does not compress. Private to the part.
#pragma once

#include <ATen/core/Tensor.h>

#include "hasten/parallel/comm_hook.h"

namespace hasten::detail {

/// The bucket's sum over ranks, as without a hook.
CommHook::Step plain_reduce(Communicator& communicator, const GradientBucket& bucket);
bool has_16_bits(const at::Tensor& buffer);

} // namespace hasten::detail
