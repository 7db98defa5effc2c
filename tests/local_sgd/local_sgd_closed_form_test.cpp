// Policies of LocalSGD with results that a formula gives. The model has one parameter and a linear
// loss, so a step of SGD with rate 1 subtracts c. Each rank has its own c. Worlds 1 to 4.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/local_sgd/outer_step.h"
#include "local_sgd/local_sgd_rig.h"

namespace hasten::accelerator_test {

struct OneNumberImpl : torch::nn::Module {
  OneNumberImpl()
      : w(register_parameter("w", torch::zeros({1}, torch::kDouble))),
        level(register_buffer("level", torch::zeros({1}, torch::kDouble))) {}
  Tensor w;
  Tensor level; // a running statistic
};
TORCH_MODULE(OneNumber);

// Steps of one rank; c is 1 + rank.
class Line {
 public:
  explicit Line(Accelerator& accelerator)
      : accelerator_(accelerator),
        inner_(model->parameters(), 1),
        optimizer_(std::get<1>(accelerator.prepare(model, inner_))) {}
  void step(double weight = 1) {
    const double c = 1.0 + static_cast<double>(accelerator_.process_index());
    auto window = accelerator_.accumulate(model);
    accelerator_.backward(weight * c * model->w.sum(), weight);
    optimizer_.step();
    optimizer_.zero_grad();
  }
  double value() const { return model->w.item<double>(); }
  void set_rate(double rate) { inner_.param_groups()[0].options().set_lr(rate); }
  OneNumber model;

 private:
  Accelerator& accelerator_;
  torch::optim::SGD inner_;
  PreparedOptimizer<torch::optim::SGD> optimizer_;
};

// The mean of 1 + rank.
double mean_c(const Accelerator& accelerator) {
  return (1.0 + static_cast<double>(accelerator.num_processes())) / 2;
}

TEST(LocalSGDClosedForm, OuterStepsBeginWherePlainTrainingEnded) {
  auto accelerator = local_accelerator();
  if (accelerator.num_processes() == 1) {
    return;
  }
  const double c = mean_c(accelerator);
  Line line(accelerator);
  LocalSGD scope(
      accelerator, line.model,
      {.local_sgd_steps = 2,
       .post_local_start = 3,
       .average = {.outer = std::make_shared<DiLoCo>(DiLoCoOptions{.lr = 0.5, .momentum = 0})}});
  for (int step = 0; step < 5; ++step) {
    line.step();
    scope.step();
  }
  EXPECT_NEAR(line.value(), -3 * c - 0.5 * 2 * c, 1e-12);
  scope.finish();
  EXPECT_NEAR(line.value(), -3 * c - 0.5 * 2 * c, 1e-12);
  EXPECT_EQ(scope.report().rounds, 1) << "nothing was left to average";
  accelerator.end_training();
}

// An average counts only the weights of steps since the last average of the same kind, and not the
// weights of plain steps.
TEST(LocalSGDClosedForm, SamplesCountSinceTheLastAverageOfTheirKind) {
  auto accelerator = local_accelerator();
  const int world = static_cast<int>(accelerator.num_processes());
  if (world == 1) {
    return;
  }
  const bool first = accelerator.process_index() == 0;
  Line line(accelerator);
  LocalSGD scope(accelerator, line.model,
                 {.local_sgd_steps = 4,
                  .post_local_start = 1,
                  .inner_steps = 2,
                  .group = "all",
                  .weigh_by_samples = true});
  // The weighted mean of the ranks' c. Rank 0 has `weight`, the others have 1.
  const auto weighed = [&](double weight) {
    double sum = weight;
    for (int rank = 1; rank < world; ++rank) {
      sum += 1.0 + rank;
    }
    return sum / (weight + world - 1);
  };
  double expected = 0;
  const auto step = [&](double weight) {
    line.step(first ? weight : 1);
    scope.step();
  };
  step(7); // plain training: the gradients are weighted
  expected -= weighed(7);
  EXPECT_NEAR(line.value(), expected, 1e-12);
  step(3);
  step(2); // averages the group: rank 0 has weight 3 + 2, the others have 2
  expected -= 2 * weighed(2.5);
  EXPECT_NEAR(line.value(), expected, 1e-12);
  step(1);
  EXPECT_NEAR(line.value(), expected - (first ? 1 : 1 + accelerator.process_index()), 1e-12);
  {
    const torch::NoGradGuard no_grad;
    line.model->level.fill_(1 + accelerator.process_index());
  }
  // The next step averages all ranks: rank 0 has weight 3 + 2 + 1 + 5, the others have 4. The ranks
  // differ only by the last two steps.
  step(5);
  expected -= 2 * weighed(11.0 / 4);
  EXPECT_NEAR(line.value(), expected, 1e-12);
  EXPECT_NEAR(line.model->level.item<double>(), weighed(11.0 / 4), 1e-12);
  step(1);
  step(9); // averages the group: rank 0 has weight 1 + 9, the others have 2
  expected -= 2 * weighed(5);
  EXPECT_NEAR(line.value(), expected, 1e-12);
  scope.finish();
  EXPECT_EQ(scope.report().inner_rounds, 2);
  accelerator.end_training();
}

// The scope does not count steps before it.
TEST(LocalSGDClosedForm, CountsFromItsBeginning) {
  auto accelerator = local_accelerator();
  Line line(accelerator);
  line.step();
  line.step();
  LocalSGD scope(accelerator, line.model, {.local_sgd_steps = 2});
  EXPECT_FALSE(scope.step()) << "no step since";
  line.step();
  EXPECT_FALSE(scope.step());
  line.step();
  EXPECT_EQ(scope.step(), accelerator.num_processes() > 1);
  EXPECT_NEAR(line.value(), -4 * mean_c(accelerator), 1e-12);
  scope.finish();
  accelerator.end_training();
}

// SlowMo divides by the rate at the round's beginning: m = b m + (a - mean) / r,
// a -= r m.
TEST(LocalSGDClosedForm, SlowMomentumIsMeasuredInTheRateOfTheRoundsBeginning) {
  auto accelerator = local_accelerator();
  if (accelerator.num_processes() == 1) {
    return;
  }
  const double c = mean_c(accelerator);
  Line line(accelerator);
  LocalSGD scope(accelerator, line.model,
                 {.local_sgd_steps = 1,
                  .average = {.outer = std::make_shared<SlowMo>(
                                  SlowMoOptions{.slowmo_factor = 0.5, .slowmo_lr = 1})}});
  double anchor = 0;
  double momentum = 0;
  double rate = 1; // of the current round
  for (const double next : {0.25, 2.0, 0.5}) {
    const double own = rate; // the rate that the step uses
    line.step();
    line.set_rate(next); // as a scheduler does, before the scope's step
    scope.step();
    momentum = 0.5 * momentum + own * c / rate;
    anchor -= rate * momentum;
    EXPECT_NEAR(line.value(), anchor, 1e-12) << next;
    rate = next;
  }
  scope.finish();
  accelerator.end_training();
}

TEST(LocalSGDClosedForm, AScheduleBelowOneIsAnError) {
  auto accelerator = local_accelerator();
  if (accelerator.num_processes() == 1) {
    return;
  }
  Line line(accelerator);
  std::string error;
  try {
    LocalSGD scope(accelerator, line.model, {.schedule = [](int64_t) { return 0; }});
    line.step();
    scope.step();
  } catch (const InputError& e) {
    error = e.what();
  }
  EXPECT_NE(error.find("schedule(0)=0"), std::string::npos) << error;
}

// Two fragments in one round are two parts of one outer step. Each part is applied once.
TEST(LocalSGDClosedForm, AWholeRoundStepsEachFragmentOnce) {
  const auto communicator = testing_support::fresh_communicator();
  const auto rounds = [&](int64_t fragments) {
    Tensor a = torch::zeros({30}, torch::kDouble);
    Tensor b = torch::ones({30}, torch::kDouble);
    Averager averager(communicator, {{"a", a}, {"b", b}},
                      {.outer = std::make_shared<DiLoCo>(), .fragments = fragments});
    for (int round = 0; round < 3; ++round) {
      a.add_(1 + communicator->rank());
      b.sub_(2 + communicator->rank());
      averager.average(1);
    }
    return torch::cat({a, b});
  };
  EXPECT_TRUE(torch::allclose(rounds(1), rounds(2), 0, 1e-12));
}

} // namespace hasten::accelerator_test
