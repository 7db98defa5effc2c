#include "region_state.h"

namespace hasten::detail {

ForwardState ForwardState::now(const std::vector<at::Tensor>& inputs, bool preserve_rng_state) {
  ForwardState state;
  if (preserve_rng_state) {
    std::vector<at::Device> devices;
    for (const at::Tensor& input : inputs) {
      if (input.defined() && !input.is_meta()) {
        devices.push_back(input.device());
      }
    }
    state.random = generator_states(devices);
  }
  state.autocast = AutocastState::now(inputs);
  return state;
}

void ForwardState::restore() const {
  set_generator_states(random);
  autocast.restore();
}

RecomputeScope::RecomputeScope(const ForwardState& forward, const OncePlace& once)
    : random_(forward.random),
      autocast_before_(forward.autocast.again()),
      casts_(forward.autocast.enabled()),
      once_(OncePlace{once.store, once.next, true}) {
  forward.autocast.restore();
  drop_casts();
}

RecomputeScope::~RecomputeScope() {
  drop_casts();
  autocast_before_.restore();
}

// A cast weight from outside belongs to another graph.
void RecomputeScope::drop_casts() const {
  if (casts_) {
    drop_autocast_casts();
  }
}

} // namespace hasten::detail
