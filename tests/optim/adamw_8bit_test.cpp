#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "core/blockwise_8bit.h"
#include "hasten/optim/adamw.h"
#include "hasten/optim/make_optimizer.h"
#include "optimizer_golden.h"
#include "support/on_device.h"

namespace hasten::adamw_8bit_test {

AdamWParamState& state_of(AdamW8bit& optimizer, const at::Tensor& parameter) {
  return static_cast<AdamWParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
}

/// The gradients of steps_of_8_bits() in tools/golden/optimizers.py.
at::Tensor golden_waves(double a, double b) {
  return torch::sin(a * on_device::arange(4500, torch::kDouble) + b);
}

TEST(AdamW8bit, TwentyStepsEqualBitsandbytes) {
  const at::Tensor decades =
      torch::pow(10.0, -torch::remainder(on_device::arange(4500, torch::kDouble), 7));
  for (const bool by_tensors : {false, true}) {
    SCOPED_TRACE(by_tensors ? "by tensors" : "kernel");
    at::Tensor p = golden_waves(0.37, 0.1).to(at::kFloat).view({3, 1500}).requires_grad_();
    AdamW8bit optimizer(
        std::vector{p},
        torch::optim::AdamWOptions(0.02).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1));
    if (by_tensors) {
      detail::engine_force_tensor_operations(optimizer.engine());
    }
    for (int step = 0; step < 20; ++step) {
      p.mutable_grad() = (golden_waves(1.7, step) * decades).to(at::kFloat).view_as(p);
      optimizer.step();
    }
    const auto& state = state_of(optimizer, p);
    ASSERT_EQ(state.exp_avg().scalar_type(), at::kByte);
    ASSERT_EQ(state.exp_avg_sq_absmax().numel(), 18);
    const std::map<std::string, at::Tensor> found = {
        {"parameters", p.detach()},
        {"exp_avg",
         detail::dequantize_blockwise({state.exp_avg()}, {state.exp_avg_absmax()}, true)[0]},
        {"exp_avg_sq", detail::dequantize_blockwise({state.exp_avg_sq()},
                                                    {state.exp_avg_sq_absmax()}, false)[0]}};
    for (const auto& [name, tensor] : found) {
      const at::Tensor ours = tensor.reshape({-1}).slice(0, 0, {}, 45).cpu().to(at::kDouble);
      const at::Tensor theirs = torch::tensor(golden::kAdamW8bit.at(name), torch::kDouble);
      const at::Tensor gap = (ours - theirs).abs();
      // A mean at the middle of two values may have the other's code.
      EXPECT_GE((gap <= 1e-6 * theirs.abs() + 1e-9).sum().item<int64_t>(), 98) << name;
      EXPECT_LE(gap.max().item<double>(), 0.02) << name;
    }
  }
}

// For shares of the largest value over eight decades, and for a block without any.
TEST(AdamW8bit, CodesAreThoseOfTheNearestValues) {
  at::Tensor shares = torch::pow(10.0, -8 * torch::rand({40 * 256}, torch::kDouble));
  shares = torch::cat({shares, torch::zeros({300}, torch::kDouble)});
  for (const bool is_signed : {true, false}) {
    const auto& map = detail::dynamic_map(is_signed);
    const at::Tensor values = torch::tensor(at::ArrayRef<float>(map), torch::kFloat);
    at::Tensor in = is_signed ? shares * torch::randn_like(shares).sign() : shares;
    in = (in * 3).to(at::kFloat);
    const auto codes = torch::zeros_like(in, at::kByte);
    const auto absmax = torch::zeros({detail::blocks_8bit(in.numel())});
    detail::quantize_blockwise({in}, {codes}, {absmax}, is_signed);
    const at::Tensor out = detail::dequantize_blockwise({codes}, {absmax}, is_signed)[0];
    const at::Tensor scale = absmax.repeat_interleave(256).narrow(0, 0, in.numel());
    const at::Tensor least =
        std::get<0>((in.unsqueeze(1) - scale.unsqueeze(1) * values).abs().min(1));
    EXPECT_LE(((in - out).abs() - least).max().item<float>(), 1e-6) << is_signed;
    EXPECT_TRUE((out.narrow(0, 40 * 256, 300) == 0).all().item<bool>());
  }
}

TEST(AdamW8bit, LargeContiguousTensorsHaveCodesInLessThanThreeTenthsOfAdamWsMemory) {
  const auto of = [](const at::Tensor& value) {
    at::Tensor p = value.detach().requires_grad_();
    p.mutable_grad() = torch::ones_like(value);
    AdamW8bit optimizer(std::vector{p});
    optimizer.step();
    return state_of(optimizer, p).exp_avg().scalar_type();
  };
  EXPECT_EQ(of(on_device::ones({4096})), at::kByte);
  EXPECT_EQ(of(on_device::ones({4096}, at::kBFloat16)), at::kByte);
  EXPECT_EQ(of(on_device::ones({4095})), at::kFloat);
  EXPECT_EQ(of(on_device::ones({4096}, at::kDouble)), at::kDouble);
  EXPECT_EQ(of(on_device::ones({8, 16, 8, 8}).contiguous(at::MemoryFormat::ChannelsLast)),
            at::kFloat);
  const std::vector<std::vector<int64_t>> shapes = {{768, 3072}, {3072}};
  const auto bytes = [&](const char* name) {
    return static_cast<double>(optimizer_state_bytes(name, {}, shapes));
  };
  EXPECT_LE(bytes("adamw_8bit"), 0.30 * bytes("adamw"));
}

TEST(AdamW8bit, AmsgradsLargestSquaresStayFp32) {
  at::Tensor largest[2];
  for (const bool by_tensors : {false, true}) {
    at::Tensor p = golden_waves(0.37, 0.1).to(at::kFloat).requires_grad_();
    AdamW8bit optimizer(std::vector{p}, torch::optim::AdamWOptions(0.02).amsgrad(true));
    if (by_tensors) {
      detail::engine_force_tensor_operations(optimizer.engine());
    }
    for (int step = 0; step < 3; ++step) {
      p.mutable_grad() = (golden_waves(1.7, 0.1) / (step + 1)).to(at::kFloat);
      optimizer.step();
    }
    largest[by_tensors] = state_of(optimizer, p).max_exp_avg_sq();
  }
  EXPECT_EQ(largest[0].scalar_type(), at::kFloat);
  EXPECT_LE((largest[0] - largest[1]).abs().max().item<double>(), 1e-5);
  EXPECT_GT(largest[0].max().item<double>(), 1e-3);
}

// Its neighbours in the block keep theirs.
TEST(AdamW8bit, AParameterWhoseGradientIsNanBecomesNan) {
  at::Tensor p = on_device::ones({4096}).requires_grad_();
  p.mutable_grad() = on_device::ones({4096});
  p.mutable_grad()[5] = std::numeric_limits<double>::quiet_NaN();
  AdamW8bit optimizer(std::vector{p});
  optimizer.step();
  EXPECT_EQ(p.isnan().sum().item<int64_t>(), 1);
}

} // namespace hasten::adamw_8bit_test
