// Errors of regions, and that they leave no state.
#include <ATen/autocast_mode.h>

#include "activation_checkpoint/region_rig.h"
#include "hasten/base/error.h"
#include "support/on_device.h"

namespace hasten::checkpoint_test {

using namespace testing_support;

TEST(ActivationCheckpointErrors, ARegionWithoutATensorIsNamed) {
  const Tensor x = on_device::randn({2}).requires_grad_();
  const std::string text = error_of<std::exception>([&] {
    activation_checkpoint([](const Tensor& in) { return in.size(0); }, x, Options{.name = "head"});
  });
  expect_says(text, {"[activation_checkpoint]", "head", "no tensor", "Fix:"});
}

TEST(ActivationCheckpointErrors, AnInputChangedInPlaceIsNamed) {
  const Tensor x = on_device::randn({2}).requires_grad_();
  const Tensor other = on_device::randn({2});
  EXPECT_THROW(
      activation_checkpoint([](const Tensor& a, Tensor b) { return b.mul_(2) * a; }, x, other),
      InputError);
  expect_says(error_of<std::exception>([&] {
                activation_checkpoint([](const Tensor& a, Tensor b) { return b.mul_(2) * a; }, x,
                                      other);
              }),
              {"input 1", "in place", "clone"});
  // A change of a copy is allowed, although it is the region's first operator.
  const auto fn = [](const Tensor& in) { return in.clone().mul_(2).sin(); };
  expect_same_bits(derive({x}, [&] { return fn(x).sum(); }),
                   derive({x}, [&] { return activation_checkpoint(fn, x).sum(); }));
  // A change after forward.
  Tensor y = x * 1;
  const Tensor z = activation_checkpoint([](const Tensor& in) { return in.sin(); }, y);
  const at::NoGradGuard no_grad;
  y.add_(1);
  const at::AutoGradMode grad(true);
  expect_says(error_of<std::exception>([&] { z.sum().backward(); }),
              {"input 0", "changed in place after forward", "version=1, was 0"});
}

TEST(ActivationCheckpointErrors, AnOptimizerStepBeforeTheRecomputationIsNamed) {
  auto layer = on_device::moved(torch::nn::Linear(3, 4));
  torch::optim::SGD sgd(layer->parameters(), 0.1);
  const Tensor x = on_device::randn({2, 3});
  const Tensor loss = activation_checkpoint([&](const Tensor& in) { return layer(in).tanh(); }, x,
                                            Options{.name = "encoder.1"})
                          .sum();
  // Only the bias changes. No operator saves it, so autograd does not check its version.
  layer->bias.mutable_grad() = torch::ones_like(layer->bias);
  sgd.step();
  expect_says(error_of<std::exception>([&] { loss.backward(); }),
              {"parameter of shape [4]", "encoder.1", "optimizer"});
}

TEST(ActivationCheckpointErrors, TheFirstTensorThatDiffersIsNamed) {
  auto layer = on_device::moved(torch::nn::Linear(4, 4));
  const Tensor x = on_device::randn({2, 4});
  int calls = 0;
  const auto shape = [&](const Tensor& in) {
    return layer(calls++ == 0 ? in : at::cat({in, in})).relu().sum();
  };
  Tensor loss = activation_checkpoint(shape, x);
  expect_says(error_of<std::exception>([&] { loss.backward(); }),
              {"saved tensor 0 of", "[4, 4] Float " + run_device().str(),
               "[2, 4] Float " + run_device().str()});
  calls = 0;
  const auto dtype = [&](const Tensor& in) {
    const Tensor y = layer(in).exp();
    return (calls++ == 0 ? y : y.to(torch::kDouble)).sin().sum();
  };
  loss = activation_checkpoint(dtype, x);
  expect_says(error_of<std::exception>([&] { loss.backward(); }), {"Double", "Float"});
  // If the tensors are not compared, an operator of backward fails.
  calls = 0;
  loss = activation_checkpoint(shape, x, Options{.determinism_check = DeterminismCheck::none});
  expect_says(error_of<std::exception>([&] { loss.backward(); }), {"must match the size"});
}

TEST(ActivationCheckpointErrors, AnotherNumberOfTensorsIsNamed) {
  const Tensor x = on_device::randn({2, 4}).requires_grad_();
  int calls = 0;
  const auto fewer = [&](const Tensor& in) {
    const Tensor y = in.exp();
    return (calls++ == 0 ? y.sin().cos() : y).sum();
  };
  Tensor loss = activation_checkpoint(fewer, x);
  expect_says(error_of<std::exception>([&] { loss.backward(); }), {"are saved, in forward"});
  calls = 0;
  const auto more = [&](const Tensor& in) {
    const Tensor y = in.exp();
    return (calls++ == 0 ? y : y.sin().cos()).sum();
  };
  loss = activation_checkpoint(more, x, Options{.early_stop = false});
  expect_says(error_of<std::exception>([&] { loss.backward(); }), {"more tensors"});
  calls = 0;
  loss = activation_checkpoint(more, x); // all tensors that backward needs are recomputed
  EXPECT_NO_THROW(loss.backward());
}

TEST(ActivationCheckpointErrors, DebugNamesTheOperatorThatDiffers) {
  const Tensor x = on_device::randn({2, 4}).requires_grad_();
  int calls = 0;
  const auto fn = [&](const Tensor& in) {
    const Tensor y = in.exp();
    return (calls++ == 0 ? y.sin().cos() : y.relu()).sum();
  };
  const Tensor loss = activation_checkpoint(fn, x, Options{.debug = true});
  expect_says(error_of<std::exception>([&] { loss.backward(); }),
              {"operator 1 is aten::relu, in forward it was aten::sin"});
}

// A region that throws on request.
struct Thrower {
  int* calls;
  int when;
  Tensor operator()(const Tensor& in) const {
    const Tensor y = at::dropout(in.exp().sin(), 0.5, true);
    if (++*calls == when) {
      throw std::runtime_error("planned");
    }
    return y.cos();
  }
};

TEST(ActivationCheckpointErrors, ExceptionsLeaveNothingBehind) {
  const Tensor x = on_device::randn({1000}).requires_grad_();
  x.mutable_grad() = torch::zeros_like(x);
  int calls = 0;
  const LiveBytes bytes;
  EXPECT_EQ(error_of<std::exception>([&] { activation_checkpoint(Thrower{&calls, 1}, x); }),
            "planned");
  EXPECT_EQ(bytes.extra(), 0);
  // After the error, tensors are saved as usual and nothing is recomputed.
  Recomputes counted;
  x.exp().sum().backward();
  EXPECT_EQ(counted.count(), 0);
  // An error in the recomputation: backward throws, random state and autocast are restored, and the
  // retained graph works afterwards.
  calls = 0;
  torch::manual_seed(3);
  Tensor y = activation_checkpoint(Thrower{&calls, 2}, x).sum();
  const auto before = at::detail::getDefaultCPUGenerator().get_state();
  EXPECT_EQ(error_of<std::exception>([&] { y.backward({}, true); }), "planned");
  EXPECT_TRUE(torch::equal(before, at::detail::getDefaultCPUGenerator().get_state()));
  EXPECT_FALSE(in_recompute());
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  const auto generator_bytes = static_cast<int64_t>(before.nbytes());
  EXPECT_EQ(bytes.extra(), 4 + generator_bytes);
  x.mutable_grad().zero_();
  EXPECT_NO_THROW(y.backward());
  torch::manual_seed(3);
  const Tensor mask = at::dropout(on_device::ones({1000}), 0.5, true);
  const Tensor inner = x.detach().exp();
  EXPECT_TRUE(torch::allclose(x.grad(), -(inner.sin() * mask).sin() * mask * inner.cos() * inner));
}

} // namespace hasten::checkpoint_test
