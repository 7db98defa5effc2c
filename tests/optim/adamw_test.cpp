#include "hasten/optim/adamw.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

#include "hasten/base/error.h"
#include "hasten/optim/param_groups.h"
#include "support/on_device.h"

namespace hasten {

namespace detail {

std::vector<at::Tensor> optim_parameters(at::ScalarType dtype) {
  torch::manual_seed(3);
  std::vector<at::Tensor> parameters;
  for (const auto& shape :
       std::vector<std::vector<int64_t>>{{17, 5}, {33}, {}, {0}, {4, 3, 2, 2}}) {
    parameters.push_back(on_device::randn(shape, at::TensorOptions(dtype)).requires_grad_());
  }
  parameters.back() =
      parameters.back().detach().contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  return parameters;
}

/// Two groups that differ in every option; group 1 inherits the learning rate.
std::vector<torch::optim::OptimizerParamGroup> optim_groups(
    const std::vector<at::Tensor>& parameters, bool amsgrad) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>(parameters.begin(), parameters.begin() + 2),
                      std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(3e-2)
                                                                       .betas({0.8, 0.95})
                                                                       .eps(1e-6)
                                                                       .weight_decay(0.2)
                                                                       .amsgrad(amsgrad)));
  groups.emplace_back(
      std::vector<at::Tensor>(parameters.begin() + 2, parameters.end()),
      std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions().weight_decay(0.0)));
  return groups;
}

/// Gradients for step `step`. The second parameter has none in every third step.
void set_gradients(std::vector<at::Tensor>& parameters, int step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    torch::manual_seed(100 * step + static_cast<int>(i));
    parameters[i].mutable_grad() =
        i == 1 && step % 3 == 0 ? at::Tensor()
                                : on_device::randn(parameters[i].sizes(), parameters[i].dtype());
  }
}

double largest_difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].numel() > 0) {
      largest = std::max(largest, (a[i] - b[i]).abs().max().to(at::kDouble).item<double>());
    }
  }
  return largest;
}

} // namespace detail

TEST(AdamW, TwentyStepsEqualTorchsOwn) {
  for (const bool amsgrad : {false, true}) {
    const double in_float =
        testing_support::run_device().is_cuda() ? 2e-6 : 1e-6; // it rounds otherwise
    for (const auto& [dtype, tolerance] :
         {std::pair(at::kFloat, in_float), std::pair(at::kDouble, 1e-13)}) {
      auto ours = detail::optim_parameters(dtype);
      auto theirs = detail::optim_parameters(dtype);
      const auto start = detail::optim_parameters(dtype);
      AdamW optimizer(detail::optim_groups(ours, amsgrad), {1e-2});
      torch::optim::AdamW reference(detail::optim_groups(theirs, amsgrad), {1e-2});
      for (int step = 1; step <= 20; ++step) {
        detail::set_gradients(ours, step);
        detail::set_gradients(theirs, step);
        optimizer.step();
        reference.step();
      }
      EXPECT_LE(detail::largest_difference(ours, theirs), tolerance);
      EXPECT_GT(detail::largest_difference(ours, start), 0.1);
    }
  }
}

TEST(AdamW, StepsATiedParameterOnce) {
  auto once = on_device::ones({3}).requires_grad_();
  auto tied = on_device::ones({3}).requires_grad_();
  AdamW single({once}, {0.1});
  AdamW twice({tied, tied}, {0.1});
  twice.add_param_group(torch::optim::OptimizerParamGroup({tied}));
  for (auto* p : {&once, &tied}) {
    p->mutable_grad() = on_device::ones({3});
  }
  single.step();
  twice.step();
  EXPECT_TRUE(torch::equal(once, tied)) << once << tied;
  EXPECT_LT(once[0].item<float>(), 0.95F);
}

TEST(AdamW, AStepBetweenForwardAndBackwardIsAnError) {
  auto weight = on_device::ones({2, 2}).requires_grad_();
  auto input = on_device::ones({2, 2}).requires_grad_();
  AdamW optimizer({weight}, {0.1});
  weight.mutable_grad() = on_device::ones({2, 2});
  auto loss = input.mm(weight).sum();
  optimizer.step();
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(AdamW, AGradientThatLiesOtherwiseThanItsParameterIsReadRight) {
  auto lies_otherwise = on_device::zeros({2, 3}).requires_grad_();
  auto gradient = on_device::arange(6.0).view({3, 2}).t(); // strides 1, 2
  lies_otherwise.mutable_grad() = gradient;
  auto plain = on_device::zeros({2, 3}).requires_grad_();
  plain.mutable_grad() = gradient.contiguous();
  // eps is as large as the gradient, so that an update shows more than its sign.
  AdamW first({lies_otherwise}, torch::optim::AdamWOptions(0.1).eps(1.0));
  AdamW second({plain}, torch::optim::AdamWOptions(0.1).eps(1.0));
  first.step();
  second.step();
  EXPECT_TRUE(torch::equal(lies_otherwise, plain));

  auto sparse = on_device::zeros({2}).requires_grad_();
  sparse.mutable_grad() = on_device::ones({2}).to_sparse();
  AdamW refuses({sparse}, {0.1});
  EXPECT_THROW(refuses.step(), InputError);
}

TEST(AdamW, StateGoesThroughAFileToAndFromTorchsOwn) {
  auto ours = detail::optim_parameters(at::kFloat);
  auto theirs = detail::optim_parameters(at::kFloat);
  AdamW optimizer(detail::optim_groups(ours, false), {1e-2});
  torch::optim::AdamW reference(detail::optim_groups(theirs, false), {1e-2});
  for (int step = 1; step <= 4; ++step) {
    detail::set_gradients(ours, step);
    optimizer.step();
  }
  for (size_t i = 0; i < ours.size(); ++i) {
    theirs[i].set_data(ours[i].detach().clone());
  }
  std::stringstream file;
  torch::save(optimizer, file);
  torch::load(reference, file);
  for (int step = 5; step <= 8; ++step) {
    detail::set_gradients(ours, step);
    detail::set_gradients(theirs, step);
    optimizer.step();
    reference.step();
  }
  EXPECT_LE(detail::largest_difference(ours, theirs), 1e-6);
}

} // namespace hasten
