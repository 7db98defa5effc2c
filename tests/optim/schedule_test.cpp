#include "hasten/optim/schedule.h"

#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "hasten/base/error.h"
#include "hasten/optim/plateau.h"
#include "optim/optim_golden.h"
#include "support/on_device.h"

namespace hasten {

namespace detail {

Schedule golden_schedule(const golden::ScheduleCase& c) {
  const auto stable = [&c](PhaseShape up, PhaseShape down, double least) {
    return warmup_stable_decay_schedule({.warmup_steps = c.warmup,
                                         .stable_steps = c.total - c.warmup - 4,
                                         .decay_steps = 4,
                                         .warmup_type = up,
                                         .decay_type = down,
                                         .min_lr_ratio = least});
  };
  using enum PhaseShape;
  const int64_t w = c.warmup, n = c.total;
  const std::map<std::string, std::function<Schedule()>> makers = {
      {"linear", [=] { return linear_schedule(w, n); }},
      {"constant", [] { return constant_schedule(); }},
      {"constant_with_warmup", [=] { return constant_schedule_with_warmup(w); }},
      {"cosine", [=] { return cosine_schedule(w, n); }},
      {"cosine, 1.25 cycles", [=] { return cosine_schedule(w, n, 1.25); }},
      {"restarts", [=] { return cosine_with_restarts_schedule(w, n); }},
      {"restarts, 3 cycles", [=] { return cosine_with_restarts_schedule(w, n, 3); }},
      {"least 0.1", [=] { return cosine_with_min_lr_schedule(w, n, 0.1); }},
      {"polynomial", [=] { return polynomial_schedule(w, n, 1e-7 / 2e-3); }},
      {"polynomial, power 2, to 0.05", [=] { return polynomial_schedule(w, n, 0.05, 2); }},
      {"inverse root", [=] { return inverse_sqrt_schedule(w); }},
      {"inverse root, scale 50", [=] { return inverse_sqrt_schedule(w, 50); }},
      {"stable", [=] { return stable(linear, cosine, 0); }},
      {"stable, cosine up, linear down, to 0.1", [=] { return stable(cosine, linear, 0.1); }},
      {"stable, root, to 0.1", [=] { return stable(one_minus_sqrt, one_minus_sqrt, 0.1); }},
      {"one cycle", [=] { return one_cycle_schedule({.total_steps = n}); }},
      {"one cycle, straight",
       [=] { return one_cycle_schedule({.total_steps = n, .pct_start = 0.4, .cosine = false}); }},
      {"one cycle, three phases",
       [=] {
         return one_cycle_schedule({.total_steps = n, .div_factor = 10, .three_phase = true});
       }},
  };
  return makers.at(c.name)();
}

} // namespace detail

TEST(LRScheduler, LearningRatesEqualTransformersAtEveryUpdate) {
  for (const golden::ScheduleCase& c : golden::kSchedules) {
    torch::optim::SGD optimizer({on_device::zeros({1})}, 2e-3);
    LRScheduler scheduler(optimizer, detail::golden_schedule(c));
    for (size_t k = 0; k < c.learning_rates.size(); ++k) {
      EXPECT_NEAR(scheduler.get_last_lr()[0], c.learning_rates[k], 1e-15)
          << c.name << " " << c.warmup << "/" << c.total << " at " << k;
      EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), scheduler.get_last_lr()[0]);
      scheduler.step();
    }
  }
}

// One group with learning rate 2e-3.
struct PlateauRig {
  explicit PlateauRig(ReduceLrOnPlateauOptions options) : scheduler(optimizer, options) {}
  double rate() const { return optimizer.param_groups()[0].options().get_lr(); }
  torch::optim::SGD optimizer{{on_device::zeros({1})}, 2e-3};
  ReduceLrOnPlateau scheduler;
};

TEST(ReduceLrOnPlateau, RatesEqualTorchsAlsoAfterAResume) {
  const std::vector<ReduceLrOnPlateauOptions> cases = {
      {.factor = 0.5, .patience = 1},
      {.factor = 0.1, .patience = 0, .cooldown = 2, .min_lr = 1e-4},
      {.greater_is_better = true, .patience = 2, .threshold = 0.05, .relative = false}};
  ASSERT_EQ(cases.size(), golden::kPlateauRates.size());
  for (size_t c = 0; c < cases.size(); ++c) {
    auto rig = std::make_unique<PlateauRig>(cases[c]);
    for (size_t i = 0; i < golden::kPlateauMetrics.size(); ++i) {
      const double before = rig->rate();
      const bool reduced = rig->scheduler.step(golden::kPlateauMetrics[i]);
      EXPECT_NEAR(rig->rate(), golden::kPlateauRates[c][i], 1e-18) << c << " at " << i;
      EXPECT_EQ(reduced, rig->rate() < before);
      NamedTensors tensors;
      nlohmann::json values;
      rig->scheduler.save_state(tensors, values);
      auto next = std::make_unique<PlateauRig>(cases[c]);
      next->scheduler.load_state(tensors, nlohmann::json::parse(values.dump()));
      rig = std::move(next);
    }
  }
}

// torch's best loss starts at infinity, so an infinite first loss is no improvement. The state has
// only finite values, because JSON has no others.
TEST(ReduceLrOnPlateau, WhatIsNotFiniteIsNoImprovement) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double metric : {std::nan(""), infinity, -infinity}) {
    for (const bool greater : {false, true}) {
      PlateauRig rig({.greater_is_better = greater, .patience = 0});
      EXPECT_TRUE(rig.scheduler.step(metric));
      NamedTensors tensors;
      nlohmann::json values;
      rig.scheduler.save_state(tensors, values);
      PlateauRig next({.greater_is_better = greater, .patience = 0});
      next.scheduler.load_state(tensors, nlohmann::json::parse(values.dump()));
      EXPECT_EQ(values, nlohmann::json::parse(values.dump()));
      EXPECT_EQ(next.rate(), rig.rate());
      EXPECT_FALSE(next.scheduler.step(1));
      EXPECT_EQ(next.scheduler.best(), 1);
    }
  }
  EXPECT_THROW(PlateauRig({.factor = 1}), InputError);
}

TEST(ReduceLrOnPlateau, AReductionNotAboveEpsIsLeftOut) {
  PlateauRig rig({.factor = 0.5, .patience = 0, .eps = 6e-4}); // the rate is 2e-3
  rig.scheduler.step(1);
  EXPECT_TRUE(rig.scheduler.step(1)); // reduced by 1e-3
  EXPECT_FALSE(rig.scheduler.step(1)); // a reduction by 5e-4 is below eps
  EXPECT_EQ(rig.rate(), 1e-3);
}

TEST(Schedules, NumbersOutOfRangeAreNamed) {
  const auto says = [](const auto& make) -> std::string {
    try {
      make();
    } catch (const InputError& error) {
      return error.what();
    }
    return "nothing";
  };
  const auto expect = [&says](const auto& make, const std::string& part) {
    const std::string text = says(make);
    EXPECT_NE(text.find(part), text.npos) << text;
  };
  expect([] { linear_schedule(6, 5); }, "warmup_steps=6");
  expect([] { cosine_schedule(-1, 5); }, "warmup_steps=-1");
  expect([] { cosine_schedule(1, 5, NAN); }, "num_cycles=nan");
  expect([] { cosine_with_min_lr_schedule(1, 5, 1.5); }, "min_lr_rate=1.5");
  expect([] { cosine_with_restarts_schedule(1, 5, 0); }, "num_cycles=0");
  expect([] { polynomial_schedule(5, 5, 0.1); }, "warmup_steps=5");
  expect([] { polynomial_schedule(1, 5, 1); }, "end_rate=1");
  expect([] { polynomial_schedule(1, 5, 0, 0); }, "power=0");
  expect([] { inverse_sqrt_schedule(1, -2); }, "timescale=-2");
  expect([] { warmup_stable_decay_schedule({.decay_steps = -1}); }, "_steps=");
  expect([] { one_cycle_schedule({.total_steps = 1}); }, "total_steps=1");
  expect([] { one_cycle_schedule({.total_steps = 9, .pct_start = 1}); }, "pct_start=1");
}

TEST(LRScheduler, NewPeaksCountAtOnce) {
  torch::optim::SGD optimizer({on_device::zeros({1})}, 2e-3);
  LRScheduler scheduler(optimizer, linear_schedule(0, 4));
  scheduler.step();
  scheduler.set_base_lrs({4e-3});
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 3e-3);
  EXPECT_EQ(scheduler.get_last_lr(), std::vector<double>{3e-3});
  EXPECT_THROW(scheduler.set_base_lrs({1, 2}), InputError);
}

TEST(LRScheduler, TheUsedRateIsThatOfTheStepThatWasClosedLast) {
  torch::optim::SGD optimizer({on_device::zeros({1})}, 2.0);
  LRScheduler scheduler(optimizer, linear_schedule(0, 4));
  const auto used_by_next = [&](int ticks) {
    for (int i = 0; i < ticks; ++i) {
      scheduler.step();
    }
    scheduler.close_step();
    return scheduler.used_lr().at(0);
  };
  EXPECT_EQ(used_by_next(1), 2.0);
  scheduler.set_base_lrs({4.0});
  EXPECT_EQ(scheduler.used_lr().at(0), 2.0); // which the step had
  EXPECT_EQ(used_by_next(0), 3.0); // skipped
  EXPECT_EQ(used_by_next(2), 3.0); // SchedulerTicks::per_process
  EXPECT_EQ(used_by_next(1), 1.0);
}

TEST(LRScheduler, EachGroupKeepsItsOwnPeakAndStateGoesOnWhereItWas) {
  const auto make = [] {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (const double lr : {1.0, 0.5}) {
      groups.emplace_back(std::vector<at::Tensor>{on_device::zeros({1})},
                          std::make_unique<torch::optim::SGDOptions>(lr));
    }
    return groups;
  };
  torch::optim::SGD first(make(), torch::optim::SGDOptions(9.0));
  LRScheduler scheduler(first, linear_schedule(0, 4));
  scheduler.step();
  EXPECT_EQ(scheduler.get_last_lr(), (std::vector<double>{0.75, 0.375}));

  NamedTensors tensors;
  nlohmann::json values;
  scheduler.save_state(tensors, values);
  torch::optim::SGD second(make(), torch::optim::SGDOptions(9.0));
  LRScheduler restored(second, linear_schedule(0, 4));
  restored.load_state(tensors, nlohmann::json::parse(values.dump()));
  EXPECT_EQ(restored.get_last_lr(), scheduler.get_last_lr());
  EXPECT_EQ(second.param_groups()[1].options().get_lr(), 0.375);

  values["base_lrs"] = {1.0};
  EXPECT_THROW(restored.load_state(tensors, values), InputError);
  EXPECT_EQ(restored.completed_updates(), 1);
}

} // namespace hasten
