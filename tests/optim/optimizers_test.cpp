#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/config/training_arguments.h"
#include "hasten/optim/adafactor.h"
#include "hasten/optim/adamw.h"
#include "hasten/optim/lion.h"
#include "hasten/optim/make_optimizer.h"
#include "hasten/optim/optimizer_state.h"
#include "hasten/optim/sgd.h"
#include "optimizer_golden.h"
#include "support/on_device.h"

namespace hasten::optimizers_test {

using Tensors = std::vector<at::Tensor>;

/// The interface of all optimizers that the tests use.
struct Made {
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  FusedOptimizer* fused;
  detail::StepEngine* engine;
};

using Make = std::function<Made(const Tensors&, FusedOptions)>;

template <typename Optimizer, typename Options>
Make maker(Options options) {
  return [options](const Tensors& parameters, FusedOptions fused) {
    auto made = std::make_unique<Optimizer>(parameters, options, fused);
    Made result{nullptr, made.get(), &made->engine()};
    result.optimizer = std::move(made);
    return result;
  };
}

/// The cases of tools/golden/optimizers.py.
const std::map<std::string, Make>& makers() {
  using torch::optim::AdamOptions;
  using torch::optim::AdamWOptions;
  using torch::optim::SGDOptions;
  static const std::map<std::string, Make> all = {
      {"adamw", maker<AdamW>(AdamWOptions(0.02).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1))},
      {"adamw_amsgrad", maker<AdamW>(AdamWOptions(0.02).weight_decay(0.1).amsgrad(true))},
      {"adam", maker<Adam>(AdamOptions(0.02).weight_decay(0.05))},
      {"sgd", maker<SGD>(SGDOptions(0.1).weight_decay(0.05))},
      {"sgd_momentum", maker<SGD>(SGDOptions(0.05).momentum(0.9).dampening(0.2))},
      {"sgd_nesterov",
       maker<SGD>(SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(0.05))},
      {"adafactor_relative", maker<Adafactor>(AdafactorOptions())},
      {"adafactor_warmup_beta1", maker<Adafactor>(AdafactorOptions().warmup_init(true).beta1(0.9))},
      {"adafactor_lr", maker<Adafactor>(AdafactorOptions(0.02)
                                            .relative_step(false)
                                            .scale_parameter(false)
                                            .weight_decay(0.1)
                                            .clip_threshold(0.7))},
      {"lion", maker<Lion>(LionOptions(0.01).weight_decay(0.1))},
      {"adamw_8bit", maker<AdamW8bit>(AdamWOptions(0.02).weight_decay(0.1))}};
  return all;
}

at::Tensor waves(std::vector<int64_t> shape, double a, double b) {
  int64_t count = 1;
  for (const int64_t n : shape) {
    count *= n;
  }
  return torch::sin(a * on_device::arange(count, torch::kDouble) + b).view(shape);
}

Tensors mlp(at::ScalarType dtype) {
  const std::vector<std::vector<int64_t>> shapes = {{5, 3}, {5}, {2, 5}, {2}};
  Tensors parameters;
  for (size_t i = 0; i < shapes.size(); ++i) {
    parameters.push_back(
        (0.5 * waves(shapes[i], 1.3, 0.7 + static_cast<double>(i))).to(dtype).requires_grad_());
  }
  return parameters;
}

void mlp_gradients(Tensors& p) {
  const auto dtype = p[0].scalar_type();
  const auto x = waves({4, 3}, 0.9, 0.2).to(dtype);
  const auto y = waves({4, 2}, 2.1, 0.4).to(dtype);
  for (at::Tensor& parameter : p) {
    parameter.mutable_grad() = at::Tensor();
  }
  (torch::tanh(x.mm(p[0].t()) + p[1]).mm(p[2].t()) + p[3] - y).square().mean().backward();
}

/// Several shapes and layouts: matrices of more than one block, a stack of matrices, a vector, a
/// scalar, an empty tensor, and channels last.
Tensors many(at::ScalarType dtype) {
  Tensors made;
  for (const auto& shape :
       std::vector<std::vector<int64_t>>{{3, 1500}, {2, 4, 3}, {2100}, {}, {0}, {4, 3, 2, 2}}) {
    made.push_back(waves(shape, 0.37, 0.1 * static_cast<double>(made.size())).to(dtype));
  }
  made.back() = made.back().contiguous(at::MemoryFormat::ChannelsLast);
  for (at::Tensor& parameter : made) {
    parameter.requires_grad_();
  }
  return made;
}

void set_gradients(Tensors& parameters, int step, at::ScalarType dtype, double factor = 1) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const double phase = step + 0.3 * static_cast<double>(i);
    parameters[i].mutable_grad() = (waves(parameters[i].sizes().vec(), 1.7, phase) * factor)
                                       .to(dtype)
                                       .contiguous(parameters[i].suggest_memory_format());
  }
}

double difference(const Tensors& a, const Tensors& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].numel() > 0) {
      const auto gap = (a[i].to(at::kDouble) - b[i].to(at::kDouble)).abs();
      largest = std::max(largest, gap.max().item<double>());
      largest = gap.isnan().any().item<bool>() ? INFINITY : largest;
    }
  }
  return largest;
}

TEST(Optimizers, TwentyStepsOnAnMlpEqualTheReferences) {
  for (const auto& [name, make] : makers()) {
    for (const auto& [dtype, most] : {std::pair(at::kDouble, 1e-13), std::pair(at::kFloat, 1e-6)}) {
      for (const bool by_tensors : {false, true}) {
        Tensors parameters = mlp(dtype);
        const Made made = make(parameters, {});
        if (by_tensors) {
          detail::engine_force_tensor_operations(*made.engine);
        }
        for (int step = 0; step < 20; ++step) {
          mlp_gradients(parameters);
          made.optimizer->step();
        }
        Tensors flat;
        for (const at::Tensor& parameter : parameters) {
          flat.push_back(parameter.detach().flatten());
        }
        const auto expected =
            on_device::tensor(golden::kOptimizers.at(name), at::TensorOptions(at::kDouble));
        EXPECT_LE(difference({torch::cat(flat)}, {expected}), most)
            << name << " " << dtype << (by_tensors ? " by tensors" : "");
      }
    }
  }
}

// All layouts, over several blocks, with 16-bit parameters and gradients.
TEST(Optimizers, KernelsEqualAtensOperations) {
  for (const auto& [name, make] : makers()) {
    for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const bool master : {true, false}) {
        Tensors ours = many(dtype), theirs = many(dtype);
        const Made kernels = make(ours, {.master_weights = master});
        const Made tensors = make(theirs, {.master_weights = master});
        detail::engine_force_tensor_operations(*tensors.engine);
        for (int step = 0; step < 4; ++step) {
          const auto gradients = step == 2 ? at::kFloat : dtype;
          set_gradients(ours, step, gradients);
          set_gradients(theirs, step, gradients);
          kernels.fused->step_scaled(0.5);
          tensors.fused->step_scaled(0.5);
        }
        const bool narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
        const double unit = dtype == at::kBFloat16 ? 0x1p-7 : 0x1p-9;
        // A sign may differ if a mean is close to 0, and a code if it is close to the middle of two.
        EXPECT_LE(difference(ours, theirs), dtype == at::kDouble   ? 1e-13
                                            : narrow               ? unit
                                            : name == "adamw_8bit" ? 1e-3
                                                                   : 3e-6)
            << name << " " << dtype << " master " << master;
        EXPECT_GT(difference(ours, many(dtype)), 1e-6) << name;
      }
    }
  }
}

TEST(Optimizers, ScaleAndZeroInTheStep) {
  for (const auto& [name, make] : makers()) {
    Tensors by_hand = many(at::kFloat), scaled = many(at::kFloat);
    Tensors zeroed = many(at::kFloat);
    const Made first = make(by_hand, {}), second = make(scaled, {});
    const Made third = make(zeroed, {});
    for (int step = 0; step < 3; ++step) {
      set_gradients(by_hand, step, at::kFloat, 0.25);
      set_gradients(scaled, step, at::kFloat);
      set_gradients(zeroed, step, at::kFloat);
      const void* lies = zeroed[0].grad().data_ptr();
      first.optimizer->step();
      second.fused->step_scaled(0.25);
      third.fused->step_and_zero(0.25);
      for (size_t i = 0; i < scaled.size(); ++i) {
        EXPECT_TRUE(torch::equal(scaled[i].grad(), by_hand[i].grad())) << name;
        EXPECT_TRUE((zeroed[i].grad() == 0).all().item<bool>()) << name;
      }
      EXPECT_EQ(zeroed[0].grad().data_ptr(), lies) << "where it lay";
    }
    EXPECT_EQ(difference(by_hand, scaled), 0) << name;
    EXPECT_EQ(difference(by_hand, zeroed), 0) << name;
  }
}

TEST(Optimizers, BitsDoNotDependOnThreads) {
  const int threads = at::get_num_threads();
  for (const auto& [name, make] : makers()) {
    Tensors runs[2];
    for (const int i : {0, 1}) {
      at::set_num_threads(i + 1);
      auto big = waves({70, 1000}, 0.37, 0.2).to(at::kFloat).requires_grad_();
      runs[i] = many(at::kFloat);
      runs[i].push_back(big);
      const Made made = make(runs[i], {.bf16_moments = true});
      for (int step = 0; step < 3; ++step) {
        set_gradients(runs[i], step, at::kFloat);
        made.optimizer->step();
      }
    }
    EXPECT_EQ(difference(runs[0], runs[1]), 0) << name;
  }
  at::set_num_threads(threads);
}

TEST(Optimizers, SixteenBitParametersFollowAnFp32CopyAndItFollowsThem) {
  for (const auto& [name, make] : makers()) {
    for (const auto dtype : {at::kBFloat16, at::kHalf}) {
      Tensors narrow = many(dtype), wide;
      for (const at::Tensor& parameter : narrow) {
        wide.push_back(parameter.detach().to(at::kFloat).requires_grad_());
      }
      const Made small = make(narrow, {}), large = make(wide, {});
      for (int step = 0; step < 6; ++step) {
        if (step == 3) { // as if other code loads weights
          const at::NoGradGuard no_grad;
          narrow[0].fill_(5);
          wide[0].fill_(5);
        }
        set_gradients(narrow, step, at::kFloat);
        set_gradients(wide, step, at::kFloat);
        small.optimizer->step();
        large.optimizer->step();
        for (size_t i = 0; i < wide.size(); ++i) {
          EXPECT_TRUE(torch::equal(narrow[i], wide[i].to(dtype)))
              << name << " " << dtype << " step " << step << " " << i;
        }
      }
    }
  }
}

TEST(Optimizers, MomentsInBf16AreRoundedWithoutBias) {
  auto parameter = on_device::zeros({20000}).requires_grad_();
  SGD optimizer(Tensors{parameter}, torch::optim::SGDOptions(1.0).momentum(0.9),
                {.bf16_moments = true, .seed = 3});
  // 1 + 2^-9 is between two neighbours of bf16, 1 and 1 + 2^-7, a quarter of the distance up.
  parameter.mutable_grad() = on_device::full({20000}, 1 + 0x1p-9);
  optimizer.step();
  const auto& state =
      static_cast<const SGDParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
  const auto moment = state.momentum_buffer();
  ASSERT_EQ(moment.scalar_type(), at::kBFloat16);
  const double up = (moment > 1).to(at::kDouble).mean().item<double>();
  EXPECT_NEAR(up, 0.25, 0.013); // four standard deviations
  EXPECT_EQ(((moment == 1) + (moment == 1 + 0x1p-7)).sum().item<int64_t>(), 20000);
}

ParameterNames names_of(const Tensors& parameters) {
  ParameterNames names;
  for (size_t i = 0; i < parameters.size(); ++i) {
    names[parameters[i].unsafeGetTensorImpl()] = "p" + std::to_string(i);
  }
  return names;
}

TEST(Optimizers, GoOnFromSavedStateBitForBit) {
  for (const auto& [name, make] : makers()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const FusedOptions options{.bf16_moments = dtype == at::kBFloat16};
      Tensors one = many(dtype);
      const Made first = make(one, options);
      const auto advance = [&](const Made& made, Tensors& p, int from, int to) {
        for (int step = from; step < to; ++step) {
          set_gradients(p, step, dtype);
          made.optimizer->step();
        }
      };
      advance(first, one, 0, 3);
      NamedTensors tensors;
      nlohmann::json values;
      save_optimizer_state(*first.optimizer, names_of(one), tensors, values);
      Tensors two;
      for (const at::Tensor& parameter : one) {
        two.push_back(parameter.detach().clone().requires_grad_());
      }
      for (auto& [key, tensor] : tensors) {
        tensor = tensor.clone();
      }
      FusedOptions other = options;
      other.seed = 7; // the state's seed replaces it
      const Made second = make(two, other);
      prepare_optimizer_load(*second.optimizer, names_of(two), tensors,
                             nlohmann::json::parse(values.dump()))();
      advance(first, one, 3, 6);
      advance(second, two, 3, 6);
      EXPECT_EQ(difference(one, two), 0) << name << " " << dtype;

      // The same through torch::save.
      std::stringstream file;
      torch::save(*first.optimizer, file);
      Tensors three;
      for (const at::Tensor& parameter : one) {
        three.push_back(parameter.detach().clone().requires_grad_());
      }
      const Made third = make(three, options);
      torch::load(*third.optimizer, file);
      advance(first, one, 6, 8);
      advance(third, three, 6, 8);
      EXPECT_EQ(difference(one, three), 0) << name << " " << dtype;
    }
  }
}

TEST(Optimizers, LeaveAloneWhatHasNoGradientAndCountWhatTheyWrite) {
  for (const auto& [name, make] : makers()) {
    Tensors p = {on_device::ones({3}).requires_grad_(), on_device::ones({3}).requires_grad_(),
                 on_device::ones({3})};
    p.push_back(p[0]); // tied
    const Made made = make(p, {});
    Tensors once = {on_device::ones({3}).requires_grad_()};
    const Made single = make(once, {});
    p[0].mutable_grad() = on_device::full({3}, 0.5);
    once[0].mutable_grad() = on_device::full({3}, 0.5);
    const auto version = p[0]._version();
    made.optimizer->step();
    single.optimizer->step();
    EXPECT_TRUE(torch::equal(p[0], once[0])) << name;
    EXPECT_LT(p[0][0].item<float>(), 1) << name;
    EXPECT_GT(p[0]._version(), version) << name;
    EXPECT_EQ(made.optimizer->state().size(), 1U) << name;
    EXPECT_TRUE(torch::equal(p[1], on_device::ones({3}))) << name;

    p[0].mutable_grad() = on_device::ones({3}).to_sparse();
    EXPECT_THROW(made.optimizer->step(), InputError) << name;
    EXPECT_TRUE(torch::equal(p[0], once[0])) << name;
    p[0].mutable_grad() = at::Tensor();
    Tensors holes = {on_device::ones({4, 4}).narrow(1, 0, 2).requires_grad_()};
    const Made refuses = make(holes, {});
    holes[0].mutable_grad() = on_device::ones({4, 2});
    EXPECT_THROW(refuses.optimizer->step(), InputError) << name;
  }
}

void expect_says(const std::function<void()>& act, const std::string& text) {
  try {
    act();
    ADD_FAILURE() << "nothing was thrown: " << text;
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(Optimizers, OptionsOutOfRangeAreNamed) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Tensors p = {on_device::ones({3}).requires_grad_()};
  const auto with = [&](const std::string& name, OptimizerSettings settings) {
    return [=] { check_optimizer(name, settings); };
  };
  for (const std::string& name : spelling_names<OptimizerType>()) {
    EXPECT_NO_THROW(check_optimizer(name, {})) << name;
    expect_says(with(name, {.learning_rate = -1}), "lr=-1");
    expect_says(with(name, {.learning_rate = nan}), "lr=nan");
    expect_says(with(name, {.weight_decay = -0.5}), "weight_decay=-0.5");
    expect_says(with(name, {.args = "no_such=1"}), "no_such");
  }
  for (const char* name : {"adam", "adamw", "adamw_8bit"}) {
    expect_says(with(name, {.adam_beta1 = 1}), "beta1=1");
    expect_says(with(name, {.adam_beta2 = nan}), "beta2=nan");
    expect_says(with(name, {.adam_epsilon = -1}), "eps=-1");
  }
  expect_says(with("sgd", {.args = "momentum=-0.1"}), "momentum=-0.1");
  expect_says(with("sgd", {.args = "nesterov=true"}), "momentum=0");
  expect_says(with("sgd", {.args = "momentum=x"}), "momentum=x");
  expect_says(with("sgd", {.args = "momentun=0.9"}), "write momentum");
  expect_says(with("lion", {.args = "beta2=1"}), "beta2=1");
  expect_says(with("adamw_8bit", {.args = "min_8bit_size=-1"}), "min_8bit_size=-1");
  expect_says(with("adafactor", {.args = "eps1=0"}), "eps[0]=0");
  expect_says(with("adafactor", {.args = "clip_threshold=0"}), "clip_thr");
  expect_says(with("adafactor", {.args = "decay_rate=0.8"}), "decay_rate=0.8");
  expect_says(with("adafactor", {.args = "warmup_init=true"}), "relative_step");
  expect_says(with("adamm", {}), "write adam");

  // Options that are set after construction, and options of a group.
  AdamW adamw(p, {1e-3});
  adamw.param_groups()[0].options().set_lr(nan);
  expect_says([&] { adamw.step(); }, "lr=nan");
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(p, std::make_unique<LionOptions>(LionOptions(0.1).weight_decay(-1)));
  expect_says([&] { Lion lion(groups); }, "weight_decay=-1");
}

TEST(Optimizers, ByNameHaveTheirGroupsDecayAndArguments) {
  for (const std::string& name : spelling_names<OptimizerType>()) {
    const Tensors p = {on_device::ones({3}).requires_grad_(),
                       on_device::ones({3}).requires_grad_()};
    std::vector<torch::optim::OptimizerParamGroup> groups;
    // 0.01 is torch's default, so torch takes it for unset.
    for (const double decay : {0.01, 0.0}) {
      groups.emplace_back(Tensors{p[decay == 0]},
                          std::make_unique<torch::optim::AdamWOptions>(
                              torch::optim::AdamWOptions().weight_decay(decay)));
    }
    const auto optimizer = make_optimizer(name, groups, {.learning_rate = 0.5, .weight_decay = 3});
    nlohmann::json values;
    NamedTensors tensors;
    save_optimizer_state(*optimizer, names_of(p), tensors, values);
    EXPECT_EQ(values["groups"][0]["weight_decay"], 0.01) << name;
    EXPECT_EQ(values["groups"][1]["weight_decay"], 0.0) << name;
    EXPECT_EQ(values["groups"][0]["lr"], 0.5) << name;
    EXPECT_NE(dynamic_cast<FusedOptimizer*>(optimizer.get()), nullptr) << name;
  }
  const Tensors p = {on_device::ones({3}).requires_grad_()};
  const auto sgd = make_optimizer("sgd", {torch::optim::OptimizerParamGroup(p)},
                                  {.args = "momentum=0.5, nesterov=true"});
  const auto& options =
      static_cast<const torch::optim::SGDOptions&>(sgd->param_groups()[0].options());
  EXPECT_EQ(options.momentum(), 0.5);
  EXPECT_TRUE(options.nesterov());
}

} // namespace hasten::optimizers_test
