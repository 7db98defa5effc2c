// Adam and AdamW with the options, state and files of torch::optim, but with a step of one pass
// over memory: see fused_optimizer.h.
#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include "hasten/optim/fused_optimizer.h"

namespace hasten {

using AdamWParamState = detail::WithMaster<torch::optim::AdamWParamState>;
using AdamParamState = detail::WithMaster<torch::optim::AdamParamState>;

/// AdamW (Loshchilov and Hutter, arXiv 1711.05101) as PyTorch defines it. Equal to
/// torch::optim::AdamW within rounding (1e-6 after 20 steps).
///
/// Options: torch::optim::AdamWOptions(lr).betas({…}).eps(…).weight_decay(…).amsgrad(…). Trap, the
/// same as in torch: if an option of a parameter group equals the option class's default
/// (weight_decay 0.01, lr 1e-3), it counts as unset and the group inherits the value from
/// `defaults`. Set both to the same value.
/// Memory: two tensors like each parameter (three with amsgrad), allocated in the first step() in
/// which the parameter has a gradient.
class AdamW : public detail::SteppedByEngine<torch::optim::AdamW, torch::optim::AdamWOptions,
                                             AdamWParamState> {
 public:
  using SteppedByEngine::SteppedByEngine;
};

/// bitsandbytes' AdamW8bit (Dettmers et al., arXiv 2110.02861): after each step the moments are
/// rounded to 8 bits, in blocks of 256 elements of a parameter, or of a rank's shard of it.
/// Memory: 2.03 bytes per element. On a CPU a step takes two to three times AdamW's
/// (scripts/bench.sh optimizer_step). Parameters that are small, fp64 or not contiguous have AdamW's
/// moments, and so has amsgrad's. States of AdamW and AdamW8bit fit each other.
class AdamW8bit : public AdamW {
 public:
  template <typename Parameters>
  explicit AdamW8bit(Parameters parameters, torch::optim::AdamWOptions defaults = {},
                     FusedOptions fused = {})
      : AdamW(std::move(parameters), std::move(defaults), in_8_bits(fused)) {}
  static FusedOptions in_8_bits(FusedOptions fused) {
    fused.min_8bit_size = fused.min_8bit_size == UINT64_MAX ? 4096 : fused.min_8bit_size;
    return fused;
  }
};

/// Adam (Kingma and Ba, arXiv 1412.6980) as PyTorch defines it: weight_decay is added to the
/// gradient. Options, memory and trap are those of AdamW; the default weight_decay is 0.
class Adam : public detail::SteppedByEngine<torch::optim::Adam, torch::optim::AdamOptions,
                                            AdamParamState> {
 public:
  using SteppedByEngine::SteppedByEngine;
};

} // namespace hasten
