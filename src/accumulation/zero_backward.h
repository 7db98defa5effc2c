// The backward of a loss that weighs nothing.
//
// Note [Nothing in, nothing out]
// Other ranks may wait in this rank's backward (synchronised batch norm, sharded units),
// so it runs, from a seed of 0. But 0 times an infinite or NaN derivative is NaN. What
// each node makes of zeros is therefore replaced by zeros. One kind of node makes
// something of nothing: a custom function that brings gradients from other ranks, as
// batch norm over all ranks does. What such a node returns is kept, and so is all that
// follows from it: these rows are part of the others' statistics.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace hasten::detail {

/// While the result lives, each node of `root`'s graph makes zeros of zeros. One pass
/// over the graph; in backward, one over each gradient.
std::shared_ptr<void> zeros_of_zeros(const at::Tensor& root);

} // namespace hasten::detail
