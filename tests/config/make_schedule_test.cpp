#include "hasten/config/schedule.h"

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"

namespace hasten::make_schedule_test {

using Json = nlohmann::json;

// schedule_test.cpp has golden values of the formulas. This tests which name selects which formula,
// and what each keyword changes.
TEST(MakeSchedule, NamesAndKeywordsReachTheSchedules) {
  struct Case {
    const char* name;
    Json kwargs;
    Schedule expected;
  };
  const int64_t w = 3, n = 20;
  const double peak = 2e-3;
  const std::vector<Case> cases = {
      {"linear", {}, linear_schedule(w, n)},
      {"cosine", {}, cosine_schedule(w, n)},
      {"cosine", {{"num_cycles", 1.5}}, cosine_schedule(w, n, 1.5)},
      {"cosine_with_restarts", {}, cosine_with_restarts_schedule(w, n, 1)},
      {"cosine_with_restarts", {{"num_cycles", 2}}, cosine_with_restarts_schedule(w, n, 2)},
      {"cosine_with_min_lr",
       {{"min_lr", 2e-4}, {"num_cycles", 1}},
       cosine_with_min_lr_schedule(w, n, 0.1, 1)},
      {"cosine_with_min_lr", {{"min_lr_rate", 0.2}}, cosine_with_min_lr_schedule(w, n, 0.2)},
      {"polynomial", {}, polynomial_schedule(w, n, 1e-7 / peak)},
      {"polynomial", {{"lr_end", 1e-4}, {"power", 2}}, polynomial_schedule(w, n, 0.05, 2)},
      {"constant", {}, constant_schedule()},
      {"constant_with_warmup", {}, constant_schedule_with_warmup(w)},
      {"inverse_sqrt", {}, inverse_sqrt_schedule(w)},
      {"inverse_sqrt", {{"timescale", 7}}, inverse_sqrt_schedule(w, 7)},
      {"warmup_stable_decay",
       {{"num_decay_steps", 5}},
       warmup_stable_decay_schedule({.warmup_steps = w, .stable_steps = 12, .decay_steps = 5})},
      {"warmup_stable_decay",
       {{"num_decay_steps", 5},
        {"num_stable_steps", 4},
        {"warmup_type", "cosine"},
        {"decay_type", "1-sqrt"},
        {"min_lr_ratio", 0.1},
        {"num_cycles", 0.25}},
       warmup_stable_decay_schedule({.warmup_steps = w,
                                     .stable_steps = 4,
                                     .decay_steps = 5,
                                     .warmup_type = PhaseShape::cosine,
                                     .decay_type = PhaseShape::one_minus_sqrt,
                                     .min_lr_ratio = 0.1,
                                     .num_cycles = 0.25})},
      {"reduce_lr_on_plateau", {{"patience", 2}}, constant_schedule()},
      {"one_cycle", {}, one_cycle_schedule({.total_steps = n})},
      {"one_cycle",
       {{"pct_start", 0.4},
        {"anneal_strategy", "linear"},
        {"div_factor", 10},
        {"final_div_factor", 100},
        {"three_phase", true}},
       one_cycle_schedule({.total_steps = n,
                           .pct_start = 0.4,
                           .cosine = false,
                           .div_factor = 10,
                           .final_div_factor = 100,
                           .three_phase = true})}};
  for (const Case& c : cases) {
    const Schedule made = make_schedule(c.name, w, n, peak, c.kwargs);
    for (int64_t k = 0; k < n; ++k) {
      EXPECT_DOUBLE_EQ(made(k), c.expected(k)) << c.name << " " << c.kwargs << " " << k;
    }
  }
}

TEST(MakeSchedule, PlateauHasItsKeywords) {
  const auto o = plateau_options({{"factor", 0.5},
                                  {"patience", 2},
                                  {"threshold", 0.01},
                                  {"threshold_mode", "abs"},
                                  {"cooldown", 3},
                                  {"min_lr", 1e-6},
                                  {"eps", 1e-9}},
                                 true);
  EXPECT_TRUE(o.greater_is_better);
  EXPECT_FALSE(o.relative);
  EXPECT_EQ(o.factor, 0.5);
  EXPECT_EQ(o.patience, 2);
  EXPECT_EQ(o.threshold, 0.01);
  EXPECT_EQ(o.cooldown, 3);
  EXPECT_EQ(o.min_lr, 1e-6);
  EXPECT_EQ(o.eps, 1e-9);
  EXPECT_FALSE(plateau_options({{"mode", "min"}}, true).greater_is_better);
}

TEST(MakeSchedule, WhatIsWrongIsNamed) {
  const auto says = [](const char* name, int64_t warmup, const Json& kwargs,
                       const std::string& text) {
    try {
      make_schedule(name, warmup, 20, 1e-3, kwargs);
      ADD_FAILURE() << name << " took " << kwargs;
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  for (const std::string& name : schedule_names()) {
    const bool needs = name == "warmup_stable_decay";
    says(name.c_str(), 3,
         needs ? Json{{"num_decay_steps", 1}, {"no_such", 1}} : Json{{"no_such", 1}}, "no_such");
    says(name.c_str(), 21, {}, "warmup_steps=21");
  }
  says("cosine", 3, {{"num_cycle", 2}}, "write num_cycles");
  says("cosine_with_restarts", 3, {{"num_cycles", 1.5}}, "num_cycles=1.5");
  says("cosine_with_min_lr", 3, {}, "min_lr");
  says("cosine_with_min_lr", 3, {{"min_lr", 0}, {"min_lr_rate", 0}}, "min_lr");
  says("warmup_stable_decay", 3, {}, "num_decay_steps");
  says("warmup_stable_decay", 3, {{"num_decay_steps", 18}},
       "num_decay_steps=18 after warmup_steps=3 exceed the run's optimizer "
       "steps=20. Expected at most 17");
  says("warmup_stable_decay", 3, {{"num_decay_steps", 5}, {"decay_type", "sqrt"}},
       "decay_type=\"sqrt\"");
  says("reduce_lr_on_plateau", 3, {{"factor", "x"}}, "factor=\"x\"");
  says("cosin", 3, {}, "write cosine");
  says("linear", 3, Json::array({1}), "lr_scheduler_kwargs=[1]");
}

TEST(MakeSchedule, ARegisteredNameMakesItsSchedule) {
  // [register]
  const ScheduleFactory factory = [](const ScheduleRequest& request) -> Schedule {
    return [every = request.kwargs.value("every", int64_t{100})](int64_t k) {
      return 1.0 / static_cast<double>(1 + k / every);
    };
  };
  register_schedule("steps-down", factory); // lr_scheduler_type
  // [/register]
  const Schedule made = make_schedule("steps-down", 0, 20, 1e-3, {{"every", 4}});
  EXPECT_EQ(made(3), 1);
  EXPECT_EQ(made(4), 0.5);
  for (const char* name : {"", "linear", "steps-down"}) {
    EXPECT_THROW(register_schedule(name, factory), InputError) << name;
  }
  EXPECT_THROW(register_schedule("none-yet", nullptr), InputError);
}

} // namespace hasten::make_schedule_test
