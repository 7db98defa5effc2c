// AcceleratorOptions::scale_in_step does not change results. Worlds 1 to 4.
#include "accelerator/plain_steps.h"
#include "hasten/optim/adamw.h"

namespace hasten::accelerator_test {

struct ScaledRun {
  std::vector<Tensor> parameters{};
  std::vector<double> norms{};
  std::vector<Tensor> stepped_gradients{}; // of the last step
  double finished = 0; // largest |grad after step - grad before| of any step
};

template <typename Optimizer>
ScaledRun scaled_run(bool in_step, at::ScalarType dtype) {
  auto accelerator = accelerator_of({.gradient_accumulation_steps = 2, .scale_in_step = in_step});
  auto batches = make_batches(7 * accelerator.num_processes() - 1);
  for (Pair& batch : batches) {
    batch.first = batch.first.to(dtype);
  }
  Net net = net_of_rank(accelerator);
  net->to(dtype);
  Optimizer own(net->parameters(), 0.01);
  auto [model, optimizer, loader] = accelerator.prepare(net, own, batches);
  ScaledRun run;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, batch));
      if (!accelerator.sync_gradients()) {
        continue;
      }
      run.norms.push_back(accelerator.clip_grad_norm_(model, 0.05));
      const Tensor before = net->parameters()[0].grad().clone();
      optimizer.step();
      run.stepped_gradients.clear();
      for (const Tensor& p : net->parameters()) {
        run.stepped_gradients.push_back(p.grad().clone());
      }
      run.finished =
          std::max(run.finished, (run.stepped_gradients[0] - before).abs().max().item<double>());
      optimizer.zero_grad();
    }
  }
  accelerator.end_training();
  for (const Tensor& p : net->parameters()) {
    run.parameters.push_back(p.detach().clone());
  }
  return run;
}

void expect_near(const std::vector<Tensor>& a, const std::vector<Tensor>& b, double most) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_LE((a[i] - b[i]).abs().max().item<double>(), most) << i;
  }
}

TEST(ScaleInStep, GivesTheSameNormsGradientsAndParameters) {
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    const double most = dtype == torch::kFloat ? 2e-6 : 1e-13;
    const ScaledRun off = scaled_run<AdamW>(false, dtype);
    const ScaledRun on = scaled_run<AdamW>(true, dtype);
    EXPECT_EQ(off.finished, 0);
    EXPECT_GT(on.finished, 0) << "left to the step";
    expect_near(on.parameters, off.parameters, most);
    expect_near(on.stepped_gradients, off.stepped_gradients, most);
    ASSERT_EQ(on.norms.size(), off.norms.size());
    for (size_t i = 0; i < on.norms.size(); ++i) {
      EXPECT_GT(off.norms[i], 0.05) << "clipped";
      EXPECT_NEAR(on.norms[i], off.norms[i], most * off.norms[i]);
    }
  }
}

TEST(ScaleInStep, HasNoEffectWhereAnOptimizerCannot) {
  const auto off = scaled_run<torch::optim::SGD>(false, torch::kDouble);
  const auto on = scaled_run<torch::optim::SGD>(true, torch::kDouble);
  EXPECT_EQ(on.finished, 0) << "final when backward returns";
  expect_near(on.parameters, off.parameters, 0);
}

// Without a zero_grad the next window adds to the finished gradient. It does not add to a gradient
// that has not been multiplied yet.
TEST(ScaleInStep, AGradientThatIsNotSteppedIsFinishedBeforeOthersAreAdded) {
  std::vector<Tensor> sums[2];
  for (const bool in_step : {false, true}) {
    auto accelerator = accelerator_of({.gradient_accumulation_steps = 2, .scale_in_step = in_step});
    auto batches = make_batches(8 * accelerator.num_processes());
    Net net = net_of_rank(accelerator);
    AdamW own(net->parameters(), 0.01);
    auto [model, optimizer, loader] = accelerator.prepare(net, own, batches);
    int64_t windows = 0;
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, batch));
      if (accelerator.sync_gradients() && ++windows % 2 == 0) {
        optimizer.step();
        for (const Tensor& p : net->parameters()) {
          sums[in_step].push_back(p.grad().clone());
        }
        optimizer.zero_grad();
      }
    }
    accelerator.end_training();
  }
  expect_near(sums[1], sums[0], 1e-12);
}

} // namespace hasten::accelerator_test
