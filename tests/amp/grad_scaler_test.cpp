// GradScaler compared with torch.amp.GradScaler, and its errors.
#include "hasten/amp/grad_scaler.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "grad_scaler_golden.h"
#include "hasten/base/error.h"
#include "hasten/core/autocast.h"
#include "hasten/optim/adamw.h"
#include "hasten/optim/sgd.h"
#include "support/on_device.h"

namespace hasten {

static GradScalerOptions options_of(const ScalerGolden& golden) {
  return {.init_scale = golden.init_scale,
          .growth_factor = golden.growth_factor,
          .backoff_factor = golden.backoff_factor,
          .growth_interval = golden.growth_interval};
}

template <typename Optimizer>
static void expect_golden(const ScalerGolden& golden, bool unscale) {
  GradScaler scaler(options_of(golden));
  auto parameter = on_device::tensor({1.0f, -2.0f, 3.0f}, torch::requires_grad());
  Optimizer optimizer({parameter}, torch::optim::SGDOptions(0.125).momentum(0.5));
  for (size_t i = 0; i < golden.steps.size(); ++i) {
    optimizer.zero_grad();
    scaler.scale((parameter * parameter).sum() / 4).backward();
    const char kind = golden.steps[i];
    if (kind != '.') {
      parameter.mutable_grad()[1] =
          kind == 'i' ? INFINITY : std::numeric_limits<float>::quiet_NaN();
    }
    if (unscale) {
      scaler.unscale_(optimizer);
    }
    EXPECT_EQ(scaler.step(optimizer), kind == '.') << i;
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), golden.scales[i]) << i;
    EXPECT_EQ(scaler.loss_scale().growth_tracker(), golden.trackers[i]) << i;
    EXPECT_NEAR(parameter[0].template item<double>(), golden.parameters[i], 1e-7) << i;
  }
}

TEST(GradScaler, ScalesTrackersAndParametersAreTorchs) {
  for (const ScalerGolden& golden : kScalerGoldens) {
    for (const bool unscale : {false, true}) {
      expect_golden<SGD>(golden, unscale);
      expect_golden<torch::optim::SGD>(golden, unscale);
    }
  }
}

// Both optimizers share a scale: the one with finite gradients steps, and the scale falls.
TEST(GradScaler, OptimizersSkipByThemselvesAndTheScaleFollowsThemAll) {
  GradScaler scaler;
  auto a = on_device::ones({4}, torch::requires_grad());
  auto b = on_device::ones({4}, torch::requires_grad());
  AdamW first({a}), second({b});
  scaler.scale((a * b).sum()).backward();
  b.mutable_grad()[2] = INFINITY;
  EXPECT_TRUE(scaler.step(first));
  EXPECT_FALSE(scaler.step(second));
  EXPECT_FALSE(torch::equal(a, on_device::ones({4})));
  EXPECT_TRUE(torch::equal(b, on_device::ones({4})));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 32768);
}

TEST(GradScaler, ClippingIsThatOfTheUnscaledGradients) {
  for (const double scale : {1.0, 65536.0}) {
    for (const bool fused : {true, false}) {
      GradScaler scaler({.init_scale = scale});
      auto p = on_device::ones({3}, torch::requires_grad());
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      if (fused) {
        optimizer = std::make_unique<SGD>(std::vector<at::Tensor>{p}, torch::optim::SGDOptions(1));
      } else {
        optimizer = std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{p},
                                                        torch::optim::SGDOptions(1));
      }
      scaler.scale((p * on_device::tensor({3.0f, 0.0f, 4.0f})).sum()).backward();
      EXPECT_NEAR(scaler.clip_grad_norm_(*optimizer, 1.0), 5, 1e-6);
      EXPECT_TRUE(scaler.step(*optimizer));
      EXPECT_TRUE(torch::allclose(p.detach(), on_device::tensor({0.4f, 1.0f, 0.2f}), 0, 1e-6)) << p;
      scaler.update();
    }
  }
}

TEST(GradScaler, ANormThatIsNotFiniteSkipsToo) {
  GradScaler scaler;
  auto p = on_device::ones({3}, torch::requires_grad());
  AdamW optimizer({p});
  scaler.scale(p.sum()).backward();
  p.mutable_grad()[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(std::isfinite(scaler.clip_grad_norm_(optimizer, 1.0)));
  EXPECT_FALSE(scaler.step(optimizer));
  EXPECT_TRUE(torch::equal(p, on_device::ones({3})));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 32768);
}

// A product in fp16 whose gradient is below 2^-24 without a scale.
TEST(GradScaler, KeepsGradientsThatFp16WouldLose) {
  const auto gradient = [](bool enabled) {
    GradScaler scaler({.enabled = enabled});
    auto weight = on_device::ones({4, 4}, torch::requires_grad());
    SGD optimizer({weight}, torch::optim::SGDOptions(1));
    torch::Tensor loss;
    {
      const Autocast autocast(
          {.device = testing_support::run_device().type(), .dtype = torch::kHalf});
      loss = torch::mm(on_device::ones({4, 4}), weight).to(torch::kFloat).mean() * 1e-7;
    }
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);
    return weight.grad().abs().sum().item<double>();
  };
  EXPECT_EQ(gradient(false), 0);
  EXPECT_NEAR(gradient(true), 4e-7, 1e-9);
}

static std::string message_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(GradScaler, ALossThatIsNotFiniteIsNamedAsSuch) {
  GradScaler scaler;
  for (const double bad : {double(INFINITY), double(NAN)}) {
    const auto loss = on_device::full({}, bad, torch::requires_grad());
    const std::string message = message_of([&] { scaler.scale(loss); });
    EXPECT_NE(message.find("before scaling"), std::string::npos) << message;
    EXPECT_NE(message.find("lower loss scale cannot help"), std::string::npos) << message;
  }
  EXPECT_EQ(scaler.get_scale(), 65536);
}

TEST(GradScaler, RefusesToBeUsedTwiceOnOneStep) {
  GradScaler scaler;
  auto p = on_device::ones({3}, torch::requires_grad());
  AdamW optimizer({p});
  EXPECT_NE(message_of([&] { scaler.update(); }).find("no optimizer was unscaled"),
            std::string::npos);
  scaler.scale(p.sum()).backward();
  scaler.unscale_(optimizer);
  EXPECT_NE(message_of([&] { scaler.unscale_(optimizer); }).find("divided by the scale already"),
            std::string::npos);
  EXPECT_NE(message_of([&] {
              scaler.clip_grad_norm_(optimizer, 1);
            }).find("divided by the scale already"),
            std::string::npos);
  EXPECT_TRUE(scaler.step(optimizer));
  for (const auto& again : std::vector<std::function<void()>>{
           [&] { scaler.step(optimizer); }, [&] { scaler.unscale_(optimizer); }}) {
    EXPECT_NE(message_of(again).find("stepped since the last update()"), std::string::npos);
  }
  scaler.update();
  scaler.scale(p.sum()).backward();
  EXPECT_TRUE(scaler.step(optimizer)); // the scaler stays usable
}

TEST(GradScaler, RefusesNumbersOutOfRange) {
  for (const GradScalerOptions& options : std::vector<GradScalerOptions>{{.init_scale = 0},
                                                                         {.init_scale = 1e300},
                                                                         {.growth_factor = 1},
                                                                         {.backoff_factor = 1},
                                                                         {.growth_interval = 0}}) {
    EXPECT_THROW(GradScaler{options}, InputError);
  }
}

TEST(GradScaler, StateIsTorchsAndGoesOn) {
  GradScaler scaler({.growth_interval = 3});
  scaler.loss_scale().update(true);
  scaler.loss_scale().update(false);
  scaler.loss_scale().update(false);
  NamedTensors tensors;
  nlohmann::json values;
  scaler.save_state(tensors, values);
  EXPECT_EQ(values.at("scale"), 32768);
  EXPECT_EQ(values.at("_growth_tracker"), 2);
  GradScaler other;
  other.load_state(tensors, values);
  other.loss_scale().update(false);
  EXPECT_EQ(other.get_scale(), 65536); // the third step without an overflow

  GradScaler disabled({.enabled = false});
  nlohmann::json empty;
  disabled.save_state(tensors, empty);
  EXPECT_TRUE(empty.empty());
  EXPECT_THROW(other.load_state(tensors, empty), InputError);
}

TEST(GradScaler, DisabledLeavesEverythingAsItIs) {
  GradScaler scaler({.enabled = false});
  auto p = on_device::ones({3}, torch::requires_grad());
  SGD optimizer({p}, torch::optim::SGDOptions(1));
  const auto loss = p.sum();
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  loss.backward();
  p.mutable_grad()[0] = INFINITY;
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_TRUE(std::isinf(p[0].item<double>()));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 1);
}

} // namespace hasten
