// What the solver and the walk over a plan count alike.
#pragma once

#include <algorithm>

#include "hasten/activation_checkpoint/planner.h"

namespace hasten::detail {

/// Of a block at the end of a recomputation, and of its backward.
inline int64_t alone_bytes(const BlockProfile& block) {
  return block.unit_bytes +
         (block.recompute_peak > 0
              ? block.recompute_peak
              : block.output_bytes + block.saved_bytes +
                    std::max(block.forward_extra, block.backward_extra));
}

} // namespace hasten::detail
