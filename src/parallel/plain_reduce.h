// What the hooks share. Private to the part.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "hasten/parallel/comm_hook.h"

namespace hasten::detail {

// The name of a bucket's collectives.
std::string bucket_name(const GradientBucket& bucket);

// The bucket's sum over ranks by an all-reduce, as without a hook.
CommHook::Step plain_reduce(Communicator& communicator, const GradientBucket& bucket);

// Note [Compressed sum]
// An all-reduce of compressed data would add in the compressed form. Here each rank gets its part
// of every rank's bucket (all-to-all), adds these in fp32 and sends the compressed sum to all. That
// sends 2 (W - 1) / W compressed elements per gradient element, and rounds each term once and the
// sum once.
// `sent` [world, part]: the compressed bucket. `add` gets the ranks' parts, in the form of `sent`,
// and leaves their sum in the first. `finish` finds all sums in `sent`.
CommHook::Step compressed_reduce(Communicator& communicator, const GradientBucket& bucket,
                                 const at::Tensor& sent,
                                 std::function<void(const at::Tensor& parts)> add,
                                 std::function<void()> finish);

} // namespace hasten::detail
