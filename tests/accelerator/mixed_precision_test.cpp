// bf16 and fp16 in an Accelerator: gradients, overflows, states. Worlds 1 to 4.
#include <ATen/autocast_mode.h>

#include "accelerator/precision_rig.h"
#include "hasten/activation_checkpoint/activation_checkpoint.h"
#include "support/on_device.h"
#include "support/temporary_folder.h"

namespace hasten::precision_test {

static AcceleratorOptions options_of(Precision precision, int64_t steps = 1) {
  // With several ranks, the first window's weight is an estimate.
  return {.gradient_accumulation_steps = steps,
          .mixed_precision = precision,
          .grad_scaler = {.init_scale = 2048}};
}

// The gradient of the joined batch, by torch's own autocast and no scale.
static std::vector<Tensor> joined_gradients(Precision precision, int64_t first, int64_t batches) {
  WideNet net = same_net();
  std::vector<Tensor> x, y;
  for (int64_t b = first; b < first + batches; ++b) {
    x.push_back(rows_of(b).first);
    y.push_back(rows_of(b).second);
  }
  const auto forward = [&](const Tensor& in) { return net->forward(in); };
  Tensor loss;
  {
    std::optional<Autocast> autocast;
    if (precision != Precision::no) {
      autocast.emplace(
          AutocastOptions{.device = testing_support::run_device().type(),
                          .dtype = precision == Precision::fp16 ? torch::kHalf : torch::kBFloat16});
    }
    loss = sum_of_losses(forward, {torch::cat(x), torch::cat(y)});
  }
  (loss / (6.0 * static_cast<double>(batches))).backward();
  return gradients_of(*net);
}

TEST(MixedPrecision, WindowsGiveTheJoinedBatchsGradientWithoutTheScale) {
  for (const auto precision : {Precision::bf16, Precision::fp16}) {
    for (const bool checkpoint : {false, true}) {
      auto accelerator = accelerator_with(options_of(precision, 2));
      const int world = accelerator.num_processes();
      WideNet net = same_net();
      AdamW own(net->parameters());
      auto [model, optimizer] = accelerator.prepare(net, own);
      const auto forward = [&](const Tensor& x) {
        return checkpoint
                   ? activation_checkpoint([&](const Tensor& in) { return net->forward(in); }, x)
                   : net->forward(x);
      };
      std::vector<Tensor> before = copies(net->parameters());
      for (int64_t step = 0; step < 2; ++step) {
        auto window = accelerator.accumulate(model);
        const Tensor loss = sum_of_losses(forward, rows_of(2 * accelerator.process_index() + step));
        EXPECT_EQ(loss.scalar_type(), torch::kFloat);
        accelerator.backward(loss, 6);
      }
      const auto mine = gradients_of(*net);
      const double unit = precision == Precision::bf16 ? 0x1p-8 : 0x1p-11;
      const double off = distance(mine, joined_gradients(precision, 0, 2 * world));
      const double rounding = distance(mine, joined_gradients(Precision::no, 0, 2 * world));
      EXPECT_LT(off, 2 * unit) << precision_name(precision);
      EXPECT_LT(rounding, 4 * unit);
      EXPECT_GT(rounding, unit / 64) << "it was computed in 16 bits";
      EXPECT_TRUE(optimizer.step());
      EXPECT_FALSE(same_bits(before, net->parameters()));
      expect_equal_on_ranks(accelerator, net->parameters());
      accelerator.end_training();
    }
  }
}

TEST(MixedPrecision, CheckpointedRegionsGiveTheSameBits) {
  for (const auto precision : {Precision::bf16, Precision::fp16}) {
    std::vector<std::vector<Tensor>> gradients;
    for (const bool checkpoint : {false, true}) {
      auto accelerator = accelerator_with(options_of(precision));
      WideNet net = same_net();
      accelerator.prepare(net);
      const auto plain = [&](const Tensor& in) { return net->forward(in); };
      const auto forward = [&](const Tensor& x) {
        return checkpoint ? activation_checkpoint(plain, x) : plain(x);
      };
      auto window = accelerator.accumulate(net);
      accelerator.backward(sum_of_losses(forward, rows_of(accelerator.process_index())), 6);
      gradients.push_back(gradients_of(*net));
      accelerator.end_training();
    }
    EXPECT_TRUE(same_bits(gradients[0], gradients[1]));
  }
}

// In fp16 a gradient of 1e-9 is 0 without a scale. With a scale it is not lost.
TEST(MixedPrecision, SmallGradientsSurviveInFp16) {
  for (const bool enabled : {true, false}) {
    AcceleratorOptions options = options_of(Precision::fp16);
    options.grad_scaler = {.enabled = enabled};
    auto accelerator = accelerator_with(options);
    WideNet net = same_net();
    accelerator.prepare(net);
    auto window = accelerator.accumulate(net);
    accelerator.backward(net->forward(rows_of(0).first).sum() * 1e-9, 1); // 6 rows
    const double size = net->second->bias.grad().abs().sum().item<double>();
    EXPECT_NEAR(size, enabled ? 4 * 6e-9 : 0, 5e-10);
    accelerator.end_training();
  }
}

TEST(MixedPrecision, AnInfinityOnOneRankLeavesEveryRankAsItWas) {
  for (const bool fused : {true, false}) {
    for (const Clip clip : {Clip::none, Clip::norm, Clip::value}) {
      for (const bool in_step : {false, true}) {
        AcceleratorOptions options = options_of(Precision::fp16);
        options.scale_in_step = in_step;
        auto accelerator = accelerator_with(options);
        const int world = accelerator.num_processes();
        Learner learner(accelerator, fused);
        EXPECT_TRUE(learner.learn(accelerator, 0, false, clip));
        for (int guilty = 0; guilty < world; ++guilty) {
          const auto before = copies(learner.net->parameters());
          const auto moments = learner.moments();
          const double rate = learner.rate();
          const double scale = accelerator.loss_scale().value();
          const StepResult result =
              learner.learn(accelerator, 1, accelerator.process_index() == guilty, clip);
          EXPECT_TRUE(result.was_skipped());
          EXPECT_TRUE(same_bits(before, learner.net->parameters()));
          EXPECT_TRUE(same_bits(moments, learner.moments()));
          EXPECT_EQ(learner.rate(), rate);
          EXPECT_EQ(accelerator.loss_scale().value(), scale / 2);
          EXPECT_TRUE(learner.learn(accelerator, 2, false, clip));
          EXPECT_NE(learner.rate(), rate);
        }
        expect_equal_on_ranks(accelerator, learner.net->parameters());
        accelerator.end_training();
      }
    }
  }
}

TEST(MixedPrecision, ALossThatIsNotFiniteIsNoOverflow) {
  std::string lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines += line; });
  auto accelerator = accelerator_with(options_of(Precision::fp16));
  Learner learner(accelerator, true);
  const auto before = copies(learner.net->parameters());
  {
    auto window = accelerator.accumulate(learner.net);
    const Tensor loss =
        sum_of_losses([&](const Tensor& x) { return learner.net->forward(x); }, rows_of(0));
    const bool last = accelerator.process_index() + 1 == accelerator.num_processes();
    accelerator.backward(last ? loss / 0.0 : loss, 6);
    EXPECT_TRUE(learner.optimizer->step().was_skipped());
    learner.optimizer->zero_grad();
  }
  set_log_sink({});
  EXPECT_TRUE(same_bits(before, learner.net->parameters()));
  EXPECT_EQ(accelerator.loss_scale().value(), 2048);
  EXPECT_NE(lines.find("NaN or infinite before it is scaled"), std::string::npos) << lines;
  EXPECT_TRUE(learner.learn(accelerator, 1, false, Clip::none));
  accelerator.end_training();
}

// Without accumulate(): two backward calls, the first under no_sync().
TEST(MixedPrecision, BackwardByHandAddsGradientsWithoutTheScale) {
  for (const bool quiet : {false, true}) {
    auto accelerator = accelerator_with(options_of(Precision::fp16));
    WideNet net = same_net();
    AdamW own(net->parameters());
    auto [model, optimizer] = accelerator.prepare(net, own);
    for (int64_t b = 0; b < 2; ++b) {
      const auto backward = [&] {
        const auto autocast = accelerator.autocast();
        accelerator.backward(
            sum_of_losses([&](const Tensor& x) { return net->forward(x); }, rows_of(b)) / 12);
      };
      if (quiet && b == 0) {
        auto silence = accelerator.no_sync(model);
        backward();
      } else {
        backward();
      }
    }
    EXPECT_LT(distance(gradients_of(*net), joined_gradients(Precision::fp16, 0, 2)), 2 * 0x1p-11);
    EXPECT_TRUE(optimizer.step());
    accelerator.end_training();
  }
}

static bool is_on() {
  return at::autocast::is_autocast_enabled(testing_support::run_device().type());
}

TEST(MixedPrecision, AutocastIsOnFromABatchToItsBackward) {
  auto accelerator = accelerator_with(options_of(Precision::bf16));
  WideNet net = same_net();
  accelerator.prepare(net);
  {
    auto window = accelerator.accumulate(net);
    EXPECT_TRUE(is_on());
    accelerator.backward(net->forward(rows_of(0).first).sum(), 6, {.last = false});
    EXPECT_TRUE(is_on()) << "another follows";
    const Tensor loss = net->forward(rows_of(0).first).sum();
    loss.register_hook([](const Tensor&) { EXPECT_FALSE(is_on()); });
    accelerator.backward(loss, 6);
    EXPECT_FALSE(is_on());
  }
  {
    auto window = accelerator.accumulate(net);
    const Autocast users({.device = testing_support::run_device().type(), .dtype = torch::kHalf});
    accelerator.backward(net->forward(rows_of(0).first).sum(), 6);
  }
  EXPECT_FALSE(is_on()) << "a scope of the user's ended after the batch's";
  {
    const auto autocast = accelerator.autocast();
    EXPECT_EQ(autocast_dtype(accelerator.device().type()), torch::kBFloat16);
  }
  accelerator.end_training();
  if (accelerator.num_processes() == 1) {
    auto other = accelerator_with(options_of(Precision::fp16));
    other.prepare(net);
    EXPECT_THROW(
        {
          auto window = other.accumulate(net);
          throw std::runtime_error("in the forward");
        },
        std::runtime_error);
    EXPECT_FALSE(is_on());
  }
}

TEST(MixedPrecision, StatesKeepTheScaleAndItsCount) {
  auto accelerator = accelerator_with(options_of(Precision::fp16));
  const testing_support::TemporaryFolder own; // all ranks use rank 0's folder
  const auto folder = accelerator.communicator()
                          ->broadcast_object(own.path().string(), "folder")
                          .get<std::string>();
  Learner learner(accelerator, true);
  learner.learn(accelerator, 0, true, Clip::norm);
  learner.learn(accelerator, 1, false, Clip::norm);
  accelerator.save_state(folder + "/state");
  learner.learn(accelerator, 2, true, Clip::norm);
  EXPECT_EQ(accelerator.loss_scale().value(), 512);
  accelerator.load_state(folder + "/state");
  EXPECT_EQ(accelerator.loss_scale().value(), 1024);
  EXPECT_EQ(accelerator.loss_scale().growth_tracker(), 1);
  EXPECT_TRUE(learner.learn(accelerator, 3, false, Clip::norm));
  accelerator.end_training();
}

TEST(MixedPrecision, RanksAgreeOnTheirPrecision) {
  auto accelerator = accelerator_with(options_of(Precision::automatic));
  const auto chosen = static_cast<int64_t>(accelerator.mixed_precision());
  EXPECT_NE(accelerator.mixed_precision(), Precision::automatic);
  expect_equal_on_ranks(accelerator, {on_device::tensor({chosen})});
  if (accelerator.num_processes() > 1) {
    const bool first = accelerator.is_main_process();
    try {
      accelerator.set_mixed_precision(first ? Precision::fp16 : Precision::bf16);
      ADD_FAILURE() << "they asked for different ones";
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1 requests bf16, rank 0 requests fp16"),
                std::string::npos)
          << error.what();
    }
  }
  accelerator.set_mixed_precision(Precision::fp16);
  EXPECT_EQ(accelerator.mixed_precision(), Precision::fp16);
  accelerator.end_training();
}

// A model with bf16 parameters. Each batch's gradient is rounded once; the sum over batches and
// ranks is not rounded. Small updates reach the fp32 master parameters.
TEST(MixedPrecision, SixteenBitParametersHaveFp32GradientsAndMasters) {
  auto accelerator = accelerator_with({.gradient_accumulation_steps = 3});
  const int world = accelerator.num_processes();
  WideNet net = same_net();
  net->to(testing_support::run_device(), torch::kBFloat16);
  std::vector<Tensor> expected; // the batches' gradients in bf16, summed in fp64
  for (int64_t batch = 0; batch < 3 * world; ++batch) {
    WideNet other = same_net();
    other->to(testing_support::run_device(), torch::kBFloat16);
    const auto [x, y] = rows_of(batch);
    torch::nn::functional::cross_entropy(
        other->forward(x.to(torch::kBFloat16)).to(torch::kFloat), y,
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum))
        .backward();
    for (size_t i = 0; i < other->parameters().size(); ++i) {
      const Tensor part = other->parameters()[i].grad().to(torch::kDouble) / (18.0 * world);
      batch == 0 ? expected.push_back(part) : static_cast<void>(expected[i].add_(part));
    }
  }
  AdamW own(net->parameters(), torch::optim::AdamWOptions(1e-6));
  auto [model, optimizer] = accelerator.prepare(net, own);
  for (int64_t step = 0; step < 3; ++step) {
    auto window = accelerator.accumulate(model);
    const auto [x, y] = rows_of(3 * accelerator.process_index() + step);
    accelerator.backward(
        torch::nn::functional::cross_entropy(
            net->forward(x.to(torch::kBFloat16)).to(torch::kFloat), y,
            torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum)),
        6);
  }
  const auto parameters = net->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Tensor& grad = parameters[i].grad();
    ASSERT_EQ(grad.scalar_type(), torch::kFloat);
    EXPECT_LT((grad.to(torch::kDouble) - expected[i]).abs().max().item<double>(),
              1e-6 * expected[i].abs().max().item<double>())
        << i;
  }
  EXPECT_TRUE(optimizer.step());
  for (const Tensor& parameter : parameters) {
    EXPECT_EQ(parameter.scalar_type(), torch::kBFloat16);
  }
  expect_equal_on_ranks(accelerator, parameters);
  accelerator.end_training();
}

} // namespace hasten::precision_test
