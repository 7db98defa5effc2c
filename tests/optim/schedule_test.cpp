#include "hasten/optim/schedule.h"

#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <nlohmann/json.hpp>
#include <string>

#include "hasten/base/error.h"
#include "optim/optim_golden.h"

namespace hasten {

namespace detail {

Schedule golden_schedule(const golden::ScheduleCase& c) {
  const std::string name = c.name;
  if (name == "linear") {
    return linear_schedule(c.warmup, c.total);
  }
  return name == "constant" ? constant_schedule()
                            : constant_schedule_with_warmup(c.warmup);
}

} // namespace detail

TEST(LrScheduler, LearningRatesEqualHuggingFacesAtEveryUpdate) {
  for (const golden::ScheduleCase& c : golden::kSchedules) {
    torch::optim::SGD optimizer({torch::zeros({1})}, 2e-3);
    LrScheduler scheduler(optimizer, detail::golden_schedule(c));
    for (size_t k = 0; k < c.learning_rates.size(); ++k) {
      EXPECT_NEAR(scheduler.get_last_lr()[0], c.learning_rates[k], 1e-18)
          << c.name << " " << c.warmup << "/" << c.total << " at " << k;
      EXPECT_EQ(
          optimizer.param_groups()[0].options().get_lr(),
          scheduler.get_last_lr()[0]);
      scheduler.step();
    }
  }
}

TEST(LrScheduler, EachGroupKeepsItsOwnPeakAndStateGoesOnWhereItWas) {
  const auto make = [] {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (const double lr : {1.0, 0.5}) {
      groups.emplace_back(
          std::vector<at::Tensor>{torch::zeros({1})},
          std::make_unique<torch::optim::SGDOptions>(lr));
    }
    return groups;
  };
  torch::optim::SGD first(make(), torch::optim::SGDOptions(9.0));
  LrScheduler scheduler(first, linear_schedule(0, 4));
  scheduler.step();
  EXPECT_EQ(scheduler.get_last_lr(), (std::vector<double>{0.75, 0.375}));

  NamedTensors tensors;
  nlohmann::json values;
  scheduler.save_state(tensors, values);
  torch::optim::SGD second(make(), torch::optim::SGDOptions(9.0));
  LrScheduler restored(second, linear_schedule(0, 4));
  restored.load_state(tensors, nlohmann::json::parse(values.dump()));
  EXPECT_EQ(restored.get_last_lr(), scheduler.get_last_lr());
  EXPECT_EQ(second.param_groups()[1].options().get_lr(), 0.375);

  values["base_lrs"] = {1.0};
  EXPECT_THROW(restored.load_state(tensors, values), InputError);
  EXPECT_EQ(restored.completed_updates(), 1);
}

} // namespace hasten
