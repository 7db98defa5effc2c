// The backward of a loss that weighs nothing.
//
// Note [Nothing in, nothing out]
// Other ranks may wait in this rank's backward: for synchronised batch norm's sums,
// for a sharded unit's gathers and reductions. So it runs, from a seed of 0. A seed of
// 0 is not enough: the loss may be NaN, and 0 times an infinite derivative is NaN. What
// each node makes of zeros is therefore replaced by zeros. One kind of node makes
// something of nothing: a custom function that brings gradients from other ranks, as
// batch norm over all ranks does. What such a node returns is kept, and so is all that
// follows from it: these rows are part of the others' statistics.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace hasten::detail {

/// While it lives, each node of `root`'s graph makes zeros of zeros. One pass over the
/// graph; in backward, one over each gradient.
class ZeroBackward {
 public:
  explicit ZeroBackward(const at::Tensor& root);
  ZeroBackward(const ZeroBackward&) = delete;
  ZeroBackward& operator=(const ZeroBackward&) = delete;
  ~ZeroBackward();

 private:
  // Nodes, and what their hooks are known by.
  std::vector<
      std::pair<decltype(torch::autograd::Edge::function), std::uintptr_t>>
      hooked_{};
};

} // namespace hasten::detail
