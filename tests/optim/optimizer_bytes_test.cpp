// optimizer_state_bytes() equals what the optimizer allocates.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "hasten/base/error.h"
#include "hasten/core/memory.h"
#include "hasten/optim/make_optimizer.h"
#include "support/on_device.h"

namespace hasten {

TEST(OptimizerStateBytes, IsWhatTheFirstStepAllocates) {
  install_memory_meter();
  const std::vector<std::vector<int64_t>> shapes = {{30, 7}, {7}, {}, {2, 3, 5}, {0}, {64, 1}};
  const std::pair<std::string, std::string> cases[] = {{"adamw_torch", ""},
                                                       {"adamw", "bf16_moments=true"},
                                                       {"adamw", "amsgrad=true"},
                                                       {"adam", "master_weights=false"},
                                                       {"sgd", ""},
                                                       {"sgd", "momentum=0.9"},
                                                       {"adafactor", ""},
                                                       {"adafactor", "beta1=0.9"},
                                                       {"lion", ""},
                                                       {"lion", "bf16_moments=true"},
                                                       {"adamw_8bit", "min_8bit_size=64"}};
  for (const auto& [name, args] : cases) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      OptimizerSettings settings;
      settings.args = args;
      std::vector<at::Tensor> parameters;
      for (const auto& shape : shapes) {
        parameters.push_back(on_device::zeros(shape, dtype).requires_grad_());
        parameters.back().mutable_grad() = on_device::ones(shape, dtype);
      }
      make_optimizer(name, {torch::optim::OptimizerParamGroup(parameters)}, settings)
          ->step(); // it makes what a device keeps for all optimizers
      const int64_t before = memory_stats(testing_support::run_device()).live_bytes;
      const auto optimizer =
          make_optimizer(name, {torch::optim::OptimizerParamGroup(parameters)}, settings);
      optimizer->step();
      EXPECT_EQ(optimizer_state_bytes(name, settings, shapes, dtype),
                memory_stats(testing_support::run_device()).live_bytes - before)
          << name << " " << args << " " << dtype;
    }
  }
}

TEST(OptimizerStateBytes, RefusesWhatMakeOptimizerRefuses) {
  EXPECT_THROW(optimizer_state_bytes("adamx", {}, {{2}}), InputError);
  OptimizerSettings settings;
  settings.args = "momentum=0.9";
  EXPECT_THROW(optimizer_state_bytes("adamw", settings, {{2}}), InputError);
}

} // namespace hasten
