#include "hasten/optim/adamw.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "hasten/base/error.h"

namespace hasten {

namespace detail {

/// What one call of the fused kernel takes: tensors of one device and dtype
/// that have done equally many steps.
struct FusedAdamWList {
  c10::Device device;
  c10::ScalarType dtype;
  int64_t step;
  std::vector<at::Tensor> parameters{};
  std::vector<at::Tensor> gradients{};
  std::vector<at::Tensor> exp_avgs{};
  std::vector<at::Tensor> exp_avg_sqs{};
  std::vector<at::Tensor> max_exp_avg_sqs{};
};

/// A group has one list almost always, so a linear search is the quick one.
FusedAdamWList& list_for(
    std::vector<FusedAdamWList>& lists,
    const at::Tensor& parameter,
    int64_t step,
    size_t capacity) {
  for (FusedAdamWList& list : lists) {
    if (list.step == step && list.dtype == parameter.scalar_type() &&
        list.device == parameter.device()) {
      return list;
    }
  }
  FusedAdamWList& list = lists.emplace_back(
      FusedAdamWList{parameter.device(), parameter.scalar_type(), step});
  list.parameters.reserve(capacity);
  list.gradients.reserve(capacity);
  list.exp_avgs.reserve(capacity);
  list.exp_avg_sqs.reserve(capacity);
  return list;
}

/// The kernel walks memory, not indices: all its tensors must lie alike.
at::Tensor gradient_laid_out_as(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  if (gradient.is_sparse()) {
    throw InputError(
        "optim::AdamW",
        "a gradient is sparse: shape=" + c10::str(gradient.sizes()),
        "dense gradients",
        "build the embedding with sparse=false");
  }
  if (parameter.is_contiguous() && gradient.is_contiguous()) {
    return gradient;
  }
  if (!parameter.is_non_overlapping_and_dense()) {
    throw InputError(
        "optim::AdamW",
        "a parameter's memory has holes or overlaps: strides=" +
            c10::str(parameter.strides()),
        "a dense tensor",
        "make it contiguous() before it is registered");
  }
  if (parameter.strides() == gradient.strides()) {
    return gradient;
  }
  return at::empty_like(parameter).copy_(gradient);
}

torch::optim::AdamWParamState& moments_of(
    const at::Tensor& parameter,
    bool amsgrad,
    std::unique_ptr<torch::optim::OptimizerParamState>& slot) {
  if (!slot) {
    auto state = std::make_unique<torch::optim::AdamWParamState>();
    state->exp_avg(at::zeros_like(parameter));
    state->exp_avg_sq(at::zeros_like(parameter));
    slot = std::move(state);
  }
  auto& state = static_cast<torch::optim::AdamWParamState&>(*slot);
  if (amsgrad && !state.max_exp_avg_sq().defined()) {
    state.max_exp_avg_sq(at::zeros_like(parameter));
  }
  return state;
}

} // namespace detail

AdamW::AdamW(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
    torch::optim::AdamWOptions defaults)
    : torch::optim::AdamW(param_groups, std::move(defaults)) {
  drop_repeated_parameters();
}

AdamW::AdamW(
    std::vector<at::Tensor> parameters, torch::optim::AdamWOptions defaults)
    : torch::optim::AdamW(std::move(parameters), std::move(defaults)) {
  drop_repeated_parameters();
}

void AdamW::drop_repeated_parameters() {
  size_t count = 0;
  for (const auto& group : param_groups()) {
    count += group.params().size();
  }
  if (count == known_parameters_) {
    return;
  }
  std::unordered_set<const void*> seen;
  for (auto& group : param_groups()) {
    std::erase_if(group.params(), [&](const at::Tensor& parameter) {
      return !seen.insert(parameter.unsafeGetTensorImpl()).second;
    });
  }
  known_parameters_ = seen.size();
}

at::Tensor AdamW::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  update(1);
  return loss;
}

void AdamW::step_scaled(double factor) { update(factor); }

void AdamW::update(double factor) {
  at::NoGradGuard no_grad;
  drop_repeated_parameters();
  std::vector<detail::FusedAdamWList> lists;
  for (auto& group : param_groups()) {
    const auto& options =
        static_cast<const torch::optim::AdamWOptions&>(group.options());
    lists.clear();
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) {
        continue;
      }
      at::Tensor gradient = detail::gradient_laid_out_as(parameter);
      auto& state = detail::moments_of(
          parameter,
          options.amsgrad(),
          state_[parameter.unsafeGetTensorImpl()]);
      state.step(state.step() + 1);
      auto& list = detail::list_for(
          lists, parameter, state.step(), group.params().size());
      list.parameters.push_back(parameter);
      list.gradients.push_back(std::move(gradient));
      list.exp_avgs.push_back(state.exp_avg());
      list.exp_avg_sqs.push_back(state.exp_avg_sq());
      if (options.amsgrad()) {
        list.max_exp_avg_sqs.push_back(state.max_exp_avg_sq());
      }
    }
    for (const detail::FusedAdamWList& list : lists) {
      // The kernel reads one step tensor a parameter; they may be the same.
      const std::vector<at::Tensor> steps(
          list.parameters.size(),
          at::full(
              {},
              static_cast<double>(list.step),
              at::TensorOptions(list.device).dtype(at::kFloat)));
      // The kernel divides by a number of 32 bits.
      std::optional<at::Tensor> divisor;
      if (factor != 1 && list.dtype == at::kDouble) {
        at::_foreach_mul_(list.gradients, factor);
      } else if (factor != 1) {
        divisor = at::full(
            {}, 1 / factor, at::TensorOptions(list.device).dtype(at::kFloat));
      }
      at::_fused_adamw_(
          list.parameters,
          list.gradients,
          list.exp_avgs,
          list.exp_avg_sqs,
          list.max_exp_avg_sqs,
          steps,
          options.lr(),
          std::get<0>(options.betas()),
          std::get<1>(options.betas()),
          options.weight_decay(),
          options.eps(),
          options.amsgrad(),
          /*maximize=*/false,
          divisor);
      // The fused kernel leaves version counters alone (LibTorch 2.13).
      for (const at::Tensor& parameter : list.parameters) {
        torch::autograd::impl::bump_version(parameter);
      }
    }
  }
}

} // namespace hasten
