// The backward of a loss with weight 0.
//
// Note [Nothing in, nothing out] Other ranks may wait in this rank's backward (synchronised batch
// norm, sharded units), so it runs with a seed of 0. But 0 times an infinite or NaN derivative is
// NaN. Therefore each node's results for zeros are replaced by zeros. One kind of node returns
// other values: a custom function that receives gradients from other ranks, such as batch norm over
// all ranks. Its results are kept, and so is everything computed from them, because these samples
// are part of the others' statistics.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace hasten::detail {

/// While the result lives, each node of `root`'s graph returns zeros for zeros. One pass over the
/// graph; in backward, one over each gradient.
std::shared_ptr<void> zeros_of_zeros(const at::Tensor& root);

} // namespace hasten::detail
