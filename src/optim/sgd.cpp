#include "hasten/optim/sgd.h"

#include <ATen/ATen.h>
#include <torch/optim/serialize.h>

#include <memory>
#include <utility>

#include "step_options.h"

namespace hasten {

namespace detail {

constexpr const char* kSgdName = "optim::SGD";

void check_options(const torch::optim::SGDOptions& options) {
  require_not_negative(kSgdName, "lr", options.lr());
  require_not_negative(kSgdName, "momentum", options.momentum());
  require_not_negative(kSgdName, "weight_decay", options.weight_decay());
  require_option(std::isfinite(options.dampening()), kSgdName, "dampening", options.dampening(),
                 "a finite number");
  if (options.nesterov()) {
    require_option(options.momentum() > 0, kSgdName, "momentum", options.momentum(),
                   "above 0 with nesterov=true");
    require_option(options.dampening() == 0, kSgdName, "dampening", options.dampening(),
                   "0 with nesterov=true");
  }
}

class SgdRules final : public StepRules {
 public:
  const char* where() const override { return kSgdName; }
  void check(const Options& options) const override { check_options(own(options)); }
  int64_t state_kind(const Options& options) const override {
    return own(options).momentum() > 0 ? 1 : 0;
  }
  StateParts parts(const at::Tensor&, std::unique_ptr<State>& slot) const override {
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
    // A buffer begins as the gradient, undamped.
    const bool begins = fresh || o.momentum() == 0;
    numbers.momentum = begins ? 0 : o.momentum();
    numbers.share = begins ? 1 : 1 - o.dampening();
    numbers.nesterov = o.nesterov();
    return numbers;
  }
  void run(const StepArrays& arrays, const StepNumbers& numbers, const StepPass& pass,
           int64_t begin, int64_t end) const override {
    sgd_step(arrays, numbers, pass, begin, end);
  }
  void run(StepTensors& t, const StepNumbers& k) const override {
    at::Tensor direction = t.gradient;
    if (k.l2 != 0) {
      direction = direction.add(t.parameter, k.l2);
    }
    if (at::Tensor& buffer = t.moments[0]; buffer.defined()) {
      buffer.mul_(k.momentum).add_(direction, k.share);
      direction = k.nesterov ? direction.add(buffer, k.beta1) : buffer;
    }
    t.parameter.sub_(direction, k.lr);
  }

 private:
  static const torch::optim::SGDOptions& own(const Options& options) {
    return options_as<torch::optim::SGDOptions>(options, kSgdName);
  }
};

} // namespace detail

std::unique_ptr<torch::optim::OptimizerParamState> SGDParamState::clone() const {
  return std::make_unique<SGDParamState>(*this);
}
void SGDParamState::serialize(torch::serialize::InputArchive& archive) {
  detail::read_state_tensor(archive, "momentum_buffer", momentum_buffer());
  detail::read_state_tensor(archive, "master", master());
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

SGD::SGD(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
         torch::optim::SGDOptions defaults, FusedOptions fused)
    : SteppedByEngine(param_groups, detail::checked_options<torch::optim::SGDOptions>(
                                        defaults, detail::check_options)) {
  engine_ = std::make_shared<detail::StepEngine>(std::make_unique<detail::SgdRules>(), fused);
  engine_->check(*this);
}

SGD::SGD(std::vector<at::Tensor> parameters, torch::optim::SGDOptions defaults, FusedOptions fused)
    : SGD({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults), fused) {}

void SGD::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<SGDParamState, torch::optim::SGDOptions>(archive, *this);
}
void SGD::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<SGDParamState, torch::optim::SGDOptions>(archive, *this);
}

} // namespace hasten
