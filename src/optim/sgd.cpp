#include "hasten/optim/sgd.h"

#include <ATen/ATen.h>
#include <torch/optim/serialize.h>

#include <memory>

#include "step_block.h"
#include "step_options.h"

namespace hasten {

namespace detail {

template <typename T>
HASTEN_VECTOR_CLONES void sgd_loop(T* __restrict p, const T* __restrict g, int64_t n,
                                   const NumbersAs<T> k) {
  for (int64_t i = 0; i < n; ++i) {
    p[i] -= k.lr * (g[i] + k.l2 * p[i]);
  }
}
template <typename T, bool kNesterov>
HASTEN_VECTOR_CLONES void sgd_momentum_loop(T* __restrict p, const T* __restrict g, T* __restrict b,
                                            int64_t n, const NumbersAs<T> k) {
  for (int64_t i = 0; i < n; ++i) {
    const T gradient = g[i] + k.l2 * p[i];
    const T buffer = b[i] * k.momentum + gradient * k.share;
    b[i] = buffer;
    // Nesterov adds the momentum, beta1, also in the step that starts the buffer.
    p[i] -= k.lr * (kNesterov ? gradient + buffer * k.beta1 : buffer);
  }
}

/// Moment: momentum, or null. momentum 0 in `numbers` (with share 1) starts it.
static void sgd_step(const StepArrays& a, const StepNumbers& numbers, const StepPass& pass,
                     int64_t begin, int64_t end) {
  in_step_type(a, [&]<typename T>(T) {
    const NumbersAs<T> k(numbers);
    over_blocks<T>(a, pass, begin, end, [&](T* p, const T* g, T* b, T*, T*, int64_t n) {
      if (b == nullptr) {
        sgd_loop(p, g, n, k);
      } else if (numbers.nesterov) {
        sgd_momentum_loop<T, true>(p, g, b, n, k);
      } else {
        sgd_momentum_loop<T, false>(p, g, b, n, k);
      }
    });
  });
}

template <>
class Rules<torch::optim::SGDOptions> final : public RulesOf<torch::optim::SGDOptions> {
 public:
  Rules() : RulesOf({"optim::SGD", sgd_step}) {}
  void check_own(const torch::optim::SGDOptions& options) const override {
    require_not_negative(where(), "momentum", options.momentum());
    require_option(std::isfinite(options.dampening()), where(), "dampening", options.dampening(),
                   "a finite number");
    if (options.nesterov()) {
      require_option(options.momentum() > 0, where(), "momentum", options.momentum(),
                     "above 0 with nesterov=true");
      require_option(options.dampening() == 0, where(), "dampening", options.dampening(),
                     "0 with nesterov=true");
    }
  }
  StateMembers parts(const at::Tensor&, std::unique_ptr<State>& slot) const override {
    auto& state = state_in<SGDParamState, torch::optim::SGDParamState>(slot);
    return {&state.step(), &state.master(), {&state.momentum_buffer()}};
  }
  at::Tensor make_moment(int, const at::Tensor& parameter, const Options& options,
                         at::ScalarType dtype) const override {
    return own(options).momentum() > 0 ? at::zeros_like(parameter, dtype) : at::Tensor();
  }
  StepNumbers numbers(const Options& options, int64_t, bool fresh) const override {
    const auto& o = own(options);
    StepNumbers numbers;
    numbers.lr = o.lr();
    numbers.l2 = o.weight_decay();
    numbers.beta1 = o.momentum();
    // The momentum buffer starts as the gradient, without dampening.
    const bool begins = fresh || o.momentum() == 0;
    numbers.momentum = begins ? 0 : o.momentum();
    numbers.share = begins ? 1 : 1 - o.dampening();
    numbers.nesterov = o.nesterov();
    return numbers;
  }
  static void take(torch::optim::SGDOptions& options, NamedOptions& args,
                   const OptimizerSettings&) {
    args.take("momentum", options.momentum());
    args.take("dampening", options.dampening());
    args.take("nesterov", options.nesterov());
  }
  void run(StepTensors& t, const StepNumbers& k) const override {
    std::vector<at::Tensor> direction = t.gradients;
    if (k.l2 != 0) {
      direction = at::_foreach_add(direction, t.parameters, k.l2);
    }
    if (const auto& buffers = t.moments[0]; !buffers.empty()) {
      at::_foreach_mul_(buffers, k.momentum);
      at::_foreach_add_(buffers, direction, k.share);
      direction = k.nesterov ? at::_foreach_add(direction, buffers, k.beta1) : buffers;
    }
    t.descend(direction, k.lr);
  }
};

template class SteppedByEngine<torch::optim::SGD, torch::optim::SGDOptions, SGDParamState>;

} // namespace detail

std::unique_ptr<torch::optim::OptimizerParamState> SGDParamState::clone() const {
  return std::make_unique<SGDParamState>(*this);
}
void SGDParamState::serialize(torch::serialize::InputArchive& archive) {
  archive.try_read("momentum_buffer", momentum_buffer(), /*is_buffer=*/true);
  archive.try_read("master", master(), /*is_buffer=*/true);
  c10::IValue count;
  if (archive.try_read("step", count)) {
    step(count.toInt());
  }
}
void SGDParamState::serialize(torch::serialize::OutputArchive& archive) const {
  torch::optim::SGDParamState::serialize(archive);
  detail::write_state_tensor(archive, "master", master());
  archive.write("step", c10::IValue(step()));
}

} // namespace hasten
