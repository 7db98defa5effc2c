// Clipping and norms of windows equal those of torch on the joined batch. Worlds 1 to 4.
#include <cmath>
#include <limits>

#include "accelerator/plain_steps.h"
#include "hasten/local_sgd/local_sgd.h"
#include "hasten/optim/adamw.h"
#include "hasten/optim/sgd.h"
#include "support/on_device.h"

namespace hasten::accelerator_test {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double largest_of(const torch::nn::Module& module) {
  double largest = 0;
  for (const Tensor& p : module.parameters()) {
    largest = std::max(largest, p.grad().abs().max().item<double>());
  }
  return largest;
}

// A window has two batches on each rank. It is clipped by value at 0.03, then by norm at 0.05.
struct ClippedRun {
  Net net = net_of_seed(1);
  std::vector<double> largest{}; // before clipping
  std::vector<double> norms{}; // after clipping by value, before clipping by norm
};

template <typename Optimizer>
ClippedRun clipped_plain_run(const std::vector<Pair>& batches, int world, double norm_type) {
  ClippedRun run;
  Optimizer optimizer(run.net->parameters(), 0.1);
  for (int64_t w = 0;; ++w) {
    const auto batch = joined_window(batches, world, 2, w);
    if (batch.empty()) {
      return run;
    }
    optimizer.zero_grad();
    mean_loss(run.net, joined(batch)).backward();
    run.largest.push_back(largest_of(*run.net));
    torch::nn::utils::clip_grad_value_(run.net->parameters(), 0.03);
    run.norms.push_back(torch::nn::utils::clip_grad_norm_(run.net->parameters(), 0.05, norm_type));
    optimizer.step();
  }
}

template <typename Optimizer>
void expect_clipped_as_by_torch(int64_t batches_left_out, double norm_type, bool scale_in_step) {
  auto accelerator =
      accelerator_of({.gradient_accumulation_steps = 2, .scale_in_step = scale_in_step});
  const int world = accelerator.num_processes();
  auto batches = make_batches(std::max<int64_t>(1, 5 * world - batches_left_out * world - 1));
  const auto expected = clipped_plain_run<Optimizer>(batches, world, norm_type);
  Net net = net_of_rank(accelerator);
  Optimizer own(net->parameters(), 0.1);
  auto [model, optimizer, loader] = accelerator.prepare(net, own, batches);
  size_t window = 0;
  for (const auto& batch : loader) {
    auto guard = accelerator.accumulate(model);
    accelerator.backward(mean_loss(model, batch));
    const double largest = accelerator.clip_grad_value_(model, 0.03);
    const double norm = accelerator.clip_grad_norm_(model, 0.05, norm_type);
    if (accelerator.sync_gradients()) {
      ASSERT_LT(window, expected.largest.size());
      EXPECT_NEAR(largest, expected.largest[window], 1e-12);
      EXPECT_NEAR(norm, expected.norms[window], 1e-12);
      EXPECT_GT(largest, 0.03) << "the case has a meaning";
      ++window;
    } else {
      EXPECT_EQ(largest, 0) << "an incomplete window";
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.end_training();
  EXPECT_LE(largest_difference(*net, *expected.net), 1e-11);
}

TEST(Gradients, ClippingByValueAndNormEqualsTorchsOnTheJoinedBatch) {
  for (const double norm_type : {1.0, 2.0, kInfinity}) {
    SCOPED_TRACE(norm_type);
    expect_clipped_as_by_torch<torch::optim::SGD>(0, norm_type, false);
  }
}

TEST(Gradients, ClippingIsTheSameWhereTheStepScales) {
  expect_clipped_as_by_torch<SGD>(0, 2, true);
}

// With several ranks, the last rank never has a sample.
TEST(Gradients, ARankWithoutBatchesClipsAsTheOthersDo) {
  expect_clipped_as_by_torch<torch::optim::SGD>(4, 2, false);
}

TEST(Gradients, ClipsChosenParametersAlone) {
  auto accelerator = accelerator_of();
  auto batches = even_batches(accelerator.num_processes());
  Net net = net_of_rank(accelerator);
  torch::optim::SGD own(net->parameters(), 0.1);
  auto [model, optimizer, loader] = accelerator.prepare(net, own, batches);
  const auto wanted =
      plain_gradients([&](Net& plain) { return mean_loss(plain, joined(batches)); });
  for (const auto& batch : loader) {
    auto guard = accelerator.accumulate(model);
    accelerator.backward(mean_loss(model, batch));
    EXPECT_NEAR(accelerator.clip_grad_value_({net->first->weight}, 1e-3),
                wanted[0].abs().max().item<double>(), 1e-12);
  }
  auto clipped = wanted;
  clipped[0] = wanted[0].clamp(-1e-3, 1e-3);
  expect_gradients(*net, clipped);
  accelerator.end_training();
}

struct Deep : torch::nn::Module {
  Deep() {
    embed = register_module("embed", torch::nn::Linear(5, 6));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 2; ++i) {
      blocks->push_back(torch::nn::Sequential(torch::nn::Linear(6, 6), torch::nn::Tanh(),
                                              torch::nn::Linear(6, 6)));
    }
    scale = register_parameter("scale", on_device::ones({1}));
    to(testing_support::run_device(), torch::kDouble);
  }
  Tensor forward(Tensor x) {
    x = embed->forward(x);
    for (const auto& block : *blocks) {
      x = x + block->as<torch::nn::Sequential>()->forward(x);
    }
    return x * scale;
  }
  torch::nn::Linear embed{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  Tensor scale{};
};

TEST(Gradients, NormsByParameterModuleAndLayer) {
  for (const bool scale_in_step : {false, true}) {
    auto accelerator =
        accelerator_of({.gradient_accumulation_steps = 2, .scale_in_step = scale_in_step});
    auto batches = even_batches(2 * accelerator.num_processes(), 3);
    torch::manual_seed(3);
    auto plain = std::make_shared<Deep>();
    torch::manual_seed(3);
    auto net = std::make_shared<Deep>();
    AdamW own(net->parameters(), 0.1);
    auto [model, optimizer, loader] = accelerator.prepare(net, own, batches);
    plain->forward(joined(batches).first).square().mean().backward();
    for (const auto& batch : loader) {
      auto guard = accelerator.accumulate(model);
      accelerator.backward(model->forward(batch.first).square().mean());
      if (!accelerator.sync_gradients()) {
        EXPECT_TRUE(accelerator.gradient_norms(model).names.empty());
        continue;
      }
      for (const double p : {1.0, 2.0, kInfinity}) {
        const auto norms_of = [&](NormsOf of) {
          return accelerator.gradient_norms(model, {.norm_type = p, .of = of});
        };
        const auto norm = [&](const std::vector<Tensor>& parameters) {
          std::vector<Tensor> all;
          for (const Tensor& parameter : parameters) {
            all.push_back(parameter.grad().flatten());
          }
          return at::linalg_vector_norm(torch::cat(all), p).item<double>();
        };
        const auto by_parameter = norms_of(NormsOf::parameter);
        const auto named = plain->named_parameters();
        ASSERT_EQ(by_parameter.names.size(), named.size());
        for (size_t i = 0; i < named.size(); ++i) {
          EXPECT_EQ(by_parameter.names[i], named[i].key());
          EXPECT_NEAR(by_parameter.norms[i], norm({named[i].value()}), 1e-12);
        }
        EXPECT_NEAR(by_parameter.total, norm(plain->parameters()), 1e-12);
        EXPECT_EQ(by_parameter.non_finite, 0);
        const auto by_module = norms_of(NormsOf::module);
        EXPECT_EQ(by_module.names,
                  (std::vector<std::string>{"", "embed", "blocks.0.0", "blocks.0.2", "blocks.1.0",
                                            "blocks.1.2"}));
        EXPECT_NEAR(by_module.norms[1], norm(plain->embed->parameters()), 1e-12);
        const auto by_layer = norms_of(NormsOf::layer);
        EXPECT_EQ(by_layer.names, (std::vector<std::string>{"", "embed", "blocks.0", "blocks.1"}));
        EXPECT_NEAR(by_layer.norms[3], norm(plain->blocks[1]->parameters()), 1e-12);
      }
      EXPECT_THROW(accelerator.gradient_norms(model, {.norm_type = 0}), InputError);
    }
    accelerator.end_training();
  }
}

// An infinite input on one rank: tanh' is 0, and 0 times infinity is NaN, only in first.weight.
TEST(Gradients, EveryRankNamesTheFirstParameterThatIsNotFinite) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  auto batches = even_batches(world);
  batches.back().first[0][2] = kInfinity; // the last rank's
  Net net = net_of_rank(accelerator);
  torch::optim::SGD own(net->parameters(), 0.1);
  auto [model, optimizer, loader] = accelerator.prepare(net, own, batches);
  for (const auto& batch : loader) {
    auto guard = accelerator.accumulate(model);
    accelerator.backward(mean_loss(model, batch));
    const std::string text =
        message_of<TrainingError>([&] { accelerator.clip_grad_norm_(model, 1.0, 2.0, true); });
    expect_says(text, "first in first.weight (largest |g|=nan)");
    expect_says(text, "in 1 of 4 parameters");
    expect_says(message_of<TrainingError>([&] {
                  accelerator.clip_grad_norm_({net->second->weight, net->first->weight}, 1.0, 2.0,
                                              true);
                }),
                "in 1 of 2 parameters");
    expect_says(message_of<TrainingError>([&] { accelerator.clip_grad_value_(model, 0.01, true); }),
                "clip_grad_value_] the gradient is not finite: norm=nan, first in first.weight");
    EXPECT_TRUE(net->second->weight.grad().isfinite().all().item<bool>()) << "left as they were";
    const GradientNorms norms = accelerator.gradient_norms(model);
    EXPECT_EQ(norms.first_non_finite, "first.weight");
    EXPECT_EQ(norms.non_finite, 1);
    EXPECT_TRUE(std::isnan(norms.total));
    EXPECT_TRUE(std::isfinite(norms.norms.at(1))) << norms.names.at(1);
    EXPECT_TRUE(std::isnan(accelerator.clip_grad_value_(model, 0.5)));
    EXPECT_TRUE(std::isnan(accelerator.clip_grad_norm_(model, 1.0)))
        << "without the option no error";
  }
  accelerator.end_training();
}

// In a LocalSGD scope the gradients are the rank's own.
TEST(Gradients, ClippingInLocalSGDIsOfTheRanksOwnGradients) {
  auto accelerator = accelerator_of();
  auto batches = even_batches(accelerator.num_processes());
  const auto mine = static_cast<size_t>(accelerator.process_index());
  Net net = net_of_rank(accelerator);
  torch::optim::SGD own(net->parameters(), 0.1);
  auto [model, optimizer, loader] = accelerator.prepare(net, own, batches);
  auto wanted = plain_gradients([&](Net& plain) { return mean_loss(plain, batches[mine]); });
  double largest = 0;
  for (Tensor& gradient : wanted) {
    largest = std::max(largest, gradient.abs().max().item<double>());
    gradient.clamp_(-0.02, 0.02);
  }
  LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 2});
  for (const auto& batch : loader) {
    auto guard = accelerator.accumulate(model);
    accelerator.backward(mean_loss(model, batch));
    EXPECT_NEAR(accelerator.clip_grad_value_(model, 0.02), largest, 1e-12);
    expect_gradients(*net, wanted);
    optimizer.step();
    local_sgd.step();
  }
  local_sgd.finish();
  accelerator.end_training();
}

TEST(Gradients, NumbersThatAreNotAboveZeroAreRefused) {
  auto accelerator = accelerator_of();
  Net net = net_of_rank(accelerator);
  auto model = accelerator.prepare(net);
  expect_says(message_of([&] { accelerator.clip_grad_value_(model, 0); }),
              "clip_value=0.000000. Expected above 0");
  expect_says(message_of([&] { accelerator.clip_grad_value_(model, std::nan("")); }),
              "clip_value=nan");
  expect_says(message_of([&] { accelerator.clip_grad_norm_(model, -1.0); }), "max_norm=-1");
  accelerator.end_training();
}

} // namespace hasten::accelerator_test
