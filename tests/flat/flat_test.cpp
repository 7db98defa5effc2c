#include <gtest/gtest.h>
#include <torch/torch.h>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/flat/flat_gradients.h"
#include "hasten/flat/flat_layout.h"
#include "hasten/flat/grad_hooks.h"
#include "support/on_device.h"

namespace hasten::flat_test {

using at::Tensor;

Tensor parameter(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return on_device::randn(sizes, torch::dtype(dtype)).set_requires_grad(true);
}

TEST(GradHooks, SeveralShareTorchsOneSlot) {
  Tensor p = parameter({3});
  std::string order;
  GradHook a(p, [&](const Tensor&) { order += 'a'; });
  {
    GradHook b(p, [&](const Tensor& t) {
      order += 'b';
      EXPECT_TRUE(t.is_same(p));
      EXPECT_EQ(t.grad()[0].item<float>(), 4) << "final: both uses are in it";
    });
    (p * 3 + p).sum().backward();
  }
  (p * 2).sum().backward();
  torch::autograd::grad({(p * 2).sum()}, {p});
  EXPECT_EQ(order, "aba");
  EXPECT_THROW(GradHook(p * 2, [](const Tensor&) {}), InputError);
}

struct Foreign : torch::autograd::PostAccumulateGradHook {
  explicit Foreign(std::string* out) : out(out) {}
  void operator()(const Tensor&) override { *out += 'f'; }
  std::string* out;
};

TEST(GradHooks, KeepForeignHooksAndTakeTheSlotBack) {
  Tensor p = parameter({3});
  std::string order;
  const auto set_foreign = [&] {
    torch::autograd::impl::set_post_acc_grad_hooks(p, std::make_unique<Foreign>(&order));
  };
  set_foreign();
  GradHook a(p, [&](const Tensor&) { order += 'a'; });
  p.sum().backward();
  EXPECT_EQ(order, "fa");
  set_foreign(); // replaces hasten's hook
  GradHook b(p, [&](const Tensor&) { order += 'b'; });
  order.clear();
  p.sum().backward();
  EXPECT_EQ(order, "fb");
  for (int i = 0; i < 3; ++i) { // repeated: no hook runs twice
    a.ensure_installed();
    b.ensure_installed();
  }
  order.clear();
  p.sum().backward();
  EXPECT_EQ(order, "fba");
}

TEST(FlatLayout, ReversesAlignsAndLeavesOutTiedAndFrozen) {
  Tensor a = parameter({3, 5}), b = parameter({7}, at::kDouble), c = parameter({}),
         frozen = parameter({4});
  frozen.set_requires_grad(false);
  const FlatLayout layout({{"a", a}, {"b", b}, {"frozen", frozen}, {"again", a}, {"c", c}});
  ASSERT_EQ(layout.slots().size(), 3u);
  ASSERT_EQ(layout.groups().size(), 2u);
  EXPECT_EQ(layout.slots()[0].name, "c");
  EXPECT_EQ(layout.slots()[1].name, "a");
  EXPECT_EQ(layout.slots()[2].name, "b");
  EXPECT_EQ(layout.slots()[1].offset, 16) << "64 bytes";
  EXPECT_EQ(layout.groups()[0].numel, 32);
  EXPECT_EQ(layout.groups()[1].dtype, at::kDouble);
  EXPECT_EQ(layout.groups()[1].numel, 8);
  EXPECT_EQ(layout.slots()[2].group, 1);
  EXPECT_EQ(layout.find(a), 1);
  EXPECT_EQ(layout.find(frozen), -1);
}

struct Pair {
  Pair() : a(parameter({3, 5})), b(parameter({7})), flat(FlatLayout({{"a", a}, {"b", b}})) {
    flat.install();
  }
  void backward() {
    flat.mark_written();
    (a.sum() * 2 + b.sum() * 3).backward();
  }
  Tensor a, b;
  FlatGradients flat;
};

TEST(FlatGradients, AutogradAccumulatesInPlace) {
  Pair pair;
  pair.backward();
  pair.backward();
  EXPECT_TRUE(pair.flat.installed(0) && pair.flat.installed(1));
  EXPECT_TRUE(torch::equal(pair.flat.buffers()[0].narrow(0, 0, 7), on_device::full({7}, 6.0)));
  EXPECT_TRUE(torch::equal(pair.flat.buffers()[0].narrow(0, 16, 15), on_device::full({15}, 4.0)));
  EXPECT_EQ(pair.flat.buffers()[0].sum().item<float>(), 6 * 7 + 4 * 15);
}

TEST(FlatGradients, APlaceIsGivenOnceToAParameterWithoutGradient) {
  const Tensor a = parameter({4, 3}), b = parameter({5}), other = parameter({5});
  FlatGradients gradients(FlatLayout({{"a", a}, {"b", b}}));
  EXPECT_TRUE(gradients.known_zero());
  EXPECT_FALSE(gradients.reserve_gradient_place(a).defined()) << "not open";
  gradients.open_places(true);
  const Tensor place = gradients.reserve_gradient_place(a);
  if (!a.is_cpu()) {
    EXPECT_FALSE(place.defined());
    return;
  }
  ASSERT_EQ(place.sizes(), a.sizes());
  EXPECT_EQ(place.const_data_ptr(), gradients.view(gradients.layout().find(a)).const_data_ptr());
  EXPECT_FALSE(gradients.known_zero()) << "who has a place may write there";
  EXPECT_FALSE(gradients.reserve_gradient_place(a).defined());
  EXPECT_FALSE(gradients.reserve_gradient_place(other).defined());
  b.mutable_grad() = torch::ones({5});
  EXPECT_FALSE(gradients.reserve_gradient_place(b).defined());
  b.mutable_grad() = Tensor();
  gradients.open_places(true);
  EXPECT_TRUE(gradients.reserve_gradient_place(a).defined());
  EXPECT_TRUE(gradients.reserve_gradient_place(b).defined());
  gradients.open_places(true);
  gradients.open_places(false);
  EXPECT_FALSE(gradients.reserve_gradient_place(a).defined());
}

TEST(FlatGradients, AnyZeroGradIsLegal) {
  Pair pair;
  torch::optim::SGD sgd({pair.a, pair.b}, 0.1);
  const auto expect = [&](double a, double b) {
    pair.flat.install();
    EXPECT_TRUE(pair.flat.installed(0) && pair.flat.installed(1));
    EXPECT_FLOAT_EQ(pair.a.grad()[0][0].item<float>(), static_cast<float>(a));
    EXPECT_FLOAT_EQ(pair.b.grad()[0].item<float>(), static_cast<float>(b));
  };
  pair.backward();
  EXPECT_FALSE(pair.flat.cleared());
  sgd.zero_grad();
  EXPECT_TRUE(pair.flat.cleared());
  expect(0, 0);
  pair.backward();
  sgd.zero_grad(false);
  EXPECT_TRUE(pair.flat.cleared());
  expect(0, 0);
  pair.backward();
  pair.a.mutable_grad().reset(); // zero_grad for one parameter only
  EXPECT_FALSE(pair.flat.cleared());
  expect(0, 3);
  pair.b.mutable_grad() = on_device::ones({7}); // another tensor; its values are kept
  expect(0, 1);
  EXPECT_FALSE(pair.flat.known_zero());
  EXPECT_FALSE(pair.flat.all_zero());
  // The view's data is replaced, so the view is created again.
  pair.a.grad().set_data(on_device::full({3, 5}, 5.0));
  expect(5, 1);
  // create_graph replaces the view by a new tensor.
  (pair.a * pair.a).sum().backward({}, true, true);
  pair.a.mutable_grad() = pair.a.grad().detach();
  expect(5 + 2 * pair.a[0][0].item<double>(), 1);
  pair.flat.buffers()[0].fill_(NAN);
  EXPECT_FALSE(pair.flat.all_zero());
}

TEST(FlatGradients, SparseAndChannelsLastGradientsStayInTheBuffer) {
  auto table =
      on_device::moved(torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 4).sparse(true)));
  auto conv = on_device::moved(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3)));
  conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  FlatGradients flat(
      FlatLayout({{"table", table->weight}, {"conv", conv->weight}, {"b", conv->bias}}));
  flat.install();
  EXPECT_EQ(conv->weight.grad().strides(), conv->weight.strides());
  flat.mark_written();
  const auto image = on_device::randn({2, 3, 8, 8});
  (table->forward(on_device::tensor({1, 2, 2})).sum() + conv->forward(image).sum()).backward();
  for (int64_t slot = 0; slot < 3; ++slot) {
    EXPECT_TRUE(flat.installed(slot)) << slot;
  }
  EXPECT_EQ(table->weight.grad()[2][0].item<float>(), 2);
  auto plain = on_device::moved(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3)));
  plain->forward(image).sum().backward();
  EXPECT_TRUE(torch::allclose(conv->weight.grad(), plain->weight.grad(), 1e-5, 1e-5));
}

TEST(FlatGradients, HandedOverGradientsAreCopiedInOnce) {
  Pair pair;
  EXPECT_TRUE(pair.flat.release()) << "known to be zero";
  EXPECT_FALSE(pair.a.grad().defined());
  EXPECT_FALSE(pair.b.grad().defined());
  for (const int64_t slot : {0, 1}) { // old values; an undefined gradient counts as zero
    Tensor(pair.flat.view(slot)).fill_(7);
  }
  (pair.a.sum() * 2).backward();
  pair.flat.install_slot(pair.flat.layout().find(pair.a));
  EXPECT_TRUE(torch::equal(pair.a.grad(), on_device::full({3, 5}, 2.0)));
  EXPECT_FALSE(pair.flat.release()) << "it holds a gradient";
  pair.flat.install();
  EXPECT_EQ(pair.b.grad().abs().sum().item<float>(), 0);
  pair.a.grad().zero_(); // as a user does; only a look at the values shows it
  EXPECT_FALSE(pair.flat.release());
  EXPECT_TRUE(pair.flat.cleared());
  EXPECT_TRUE(pair.flat.release());
  pair.a.mutable_grad() = on_device::ones({5, 3});
  EXPECT_THROW(pair.flat.install(), InputError);
}

TEST(FlatGradients, ReorderMovesWhatLiesThere) {
  Tensor a = parameter({3, 5}), b = parameter({7}), c = parameter({2});
  FlatGradients flat(FlatLayout({{"a", a}, {"b", b}, {"c", c}}));
  flat.install();
  (a.sum() * 2 + b.sum() * 3).backward();
  c.mutable_grad().reset();
  const int64_t at_a = flat.layout().find(a), at_b = flat.layout().find(b),
                at_c = flat.layout().find(c);
  flat.reorder({at_b, at_c, at_a});
  EXPECT_EQ(flat.layout().slots()[static_cast<size_t>(at_b)].offset, 0);
  EXPECT_EQ(flat.layout().slots()[static_cast<size_t>(at_a)].offset, 32);
  EXPECT_TRUE(flat.installed(at_a) && flat.installed(at_b));
  EXPECT_FALSE(c.grad().defined());
  EXPECT_TRUE(torch::equal(flat.buffers()[0].narrow(0, 0, 7), on_device::full({7}, 3.0)));
  EXPECT_TRUE(torch::equal(a.grad(), on_device::full({3, 5}, 2.0)));
  flat.install();
  EXPECT_EQ(flat.buffers()[0].sum().item<float>(), 7 * 3 + 15 * 2) << "padding and c are zero";
  EXPECT_THROW(flat.reorder({0, 1, 1}), InputError);
  EXPECT_THROW(flat.reorder({0, 1}), InputError);
}

TEST(FlatGradients, TheAllocatorOwnsTheMemory) {
  Tensor a = parameter({3, 5});
  Tensor memory;
  FlatGradients flat(FlatLayout({{"a", a}}), [&](int64_t numel, const at::TensorOptions& options) {
    return memory = on_device::zeros({numel}, options);
  });
  flat.install();
  a.sum().backward();
  EXPECT_FALSE(flat.known_zero()) << "torch's writes are noticed";
  EXPECT_EQ(memory.sum().item<float>(), 15);
}

// 256 + 1 is 256 in bf16.
TEST(FlatGradients, Of16BitParametersAddUpInFp32) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    Tensor p = parameter({3}, dtype);
    Tensor q = parameter({2});
    (p * 256).sum().backward(); // a gradient from before
    FlatGradients flat(FlatLayout({{"p", p}, {"q", q}}));
    EXPECT_EQ(flat.layout().groups().size(), 1U) << "one buffer with fp32's";
    flat.install();
    for (int i = 0; i < 3; ++i) {
      p.sum().backward();
    }
    EXPECT_EQ(p.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(torch::equal(p.grad(), on_device::full({3}, 259.0F)));
    EXPECT_TRUE(flat.installed(flat.layout().find(p)));
    flat.reset(); // the tensor that autograd makes is also fp32
    p.sum().backward();
    EXPECT_EQ(p.grad().scalar_type(), at::kFloat);
    p.sum().backward();
    flat.install();
    EXPECT_TRUE(torch::equal(p.grad(), on_device::full({3}, 2.0F)));
  }
}

} // namespace hasten::flat_test
