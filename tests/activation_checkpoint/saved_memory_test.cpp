// Saved tensors on disk, and the memory report.
#include "hasten/activation_checkpoint/saved_memory.h"
#include "activation_checkpoint/block_rig.h"
#include "hasten/base/error.h"
#include "support/on_device.h"

namespace hasten::checkpoint_test {

using namespace testing_support;

TEST(SavedTensorOffload, ServesRegionsAndPlainCode) {
  torch::manual_seed(2);
  auto blocks = make_mlps(3, 64);
  const Tensor x = on_device::randn({128, 64}).requires_grad_();
  auto leaves = parameters_of(blocks);
  leaves.push_back(x);
  int64_t written = 0;
  int64_t left = 0;
  const auto run = [&](bool offload, bool regions) {
    return derive(leaves, [&] {
      std::optional<SavedTensorOffload> guard;
      if (offload) {
        guard.emplace(SavedTensorOffloadOptions{.min_bytes = 1024});
      }
      Tensor y = x * 1;
      for (Mlp& block : blocks) {
        const auto fn = [&](const Tensor& in) { return block->forward(in); };
        y = regions ? activation_checkpoint(fn, y) : fn(y);
        y = y.t().contiguous().t().sin(); // strides
      }
      if (guard) {
        written = guard->bytes();
        const Tensor loss = y.square().sum();
        loss.backward({}, true);
        left = guard->bytes();
        for (const Tensor& leaf : leaves) {
          at::Tensor(leaf).mutable_grad() = Tensor();
        }
        return loss; // the caller differentiates it again, after the guard
      }
      return y.square().sum();
    });
  };
  const Derived plain = run(false, false);
  expect_same_bits(plain, run(true, false));
  constexpr int64_t kOutput = 128 * 64 * 4;
  // Each block saves gelu's input and output (twice as wide), the mask, its output and more, each
  // storage once.
  EXPECT_GE(written, 3 * 5 * kOutput);
  EXPECT_EQ(left, written + kOutput) << "the square's input is the last";
  const int64_t all = written;
  expect_same_bits(plain, run(true, true));
  EXPECT_LT(written, all / 2) << "the regions' inputs, and what is between";
  expect_says(
      error_of<std::exception>([] { SavedTensorOffload guard({.folder = "/nowhere/at/all"}); }),
      {"folder=/nowhere/at/all"});
}

TEST(SavedTensorOffload, InsideARegionServesItsOwnPart) {
  const Tensor x = on_device::randn({1000}).requires_grad_();
  int64_t written = 0;
  const auto fn = [&](const Tensor& in) {
    Tensor y = in.square();
    {
      const SavedTensorOffload guard({.min_bytes = 1024});
      y = y.sin().cos();
      written = guard.bytes();
    }
    return y.square();
  };
  expect_same_bits(derive({x}, [&] { return fn(x).sum(); }), derive({x}, [&] {
                     const LiveBytes bytes;
                     const Tensor y = activation_checkpoint(fn, x);
                     EXPECT_EQ(written, 2 * 4096) << "pages";
                     EXPECT_EQ(bytes.extra(), 4000) << "the output";
                     y.sum().backward({}, /*retain_graph=*/true);
                     x.mutable_grad() = Tensor();
                     return y.sum();
                   }));
}

// A storage is written once, again if it was changed, and again if another storage has its address.
// Its pieces are reused when graphs die.
TEST(SavedTensorOffload, WritesAStorageAgainWhereItIsAnother) {
  const Tensor x = on_device::randn({3000}).requires_grad_();
  const auto fn = [&] {
    Tensor sum = on_device::zeros({});
    Tensor state = on_device::ones({3000});
    for (int i = 0; i < 4; ++i) {
      sum = sum + (x * state.clone()).sum(); // the clone dies at once
      sum = sum + (x.slice(0, 8, 2008) * state.slice(0, 500, 2500)).sum();
      state = state + on_device::rand({3000});
      const Tensor underived = (x * state).sum();
      state.add_(on_device::rand({3000}));
      sum = sum + (x * state).sum();
      state = state + on_device::rand({3000});
    }
    return sum;
  };
  int64_t left = -1;
  const auto run = [&](bool offload) {
    return derive({x}, [&] {
      std::optional<SavedTensorOffload> guard;
      if (offload) {
        guard.emplace(SavedTensorOffloadOptions{.min_bytes = 1024});
        fn(); // a graph that dies
        left = guard->bytes();
        torch::manual_seed(5);
      }
      return fn();
    });
  };
  expect_same_bits(run(false), run(true));
  EXPECT_EQ(left, 0);
}

TEST(SavedTensorOffload, FreesMemoryAndParametersStay) {
  torch::manual_seed(2);
  const Tensor w = on_device::randn({512, 512}).requires_grad_();
  const Tensor x = on_device::randn({512, 512});
  const LiveBytes bytes;
  constexpr int64_t kOne = 512 * 512 * 4;
  {
    const Tensor y = x.mm(w.t()).sin().cos().mm(w).sum();
    EXPECT_EQ(bytes.extra(), 2 * kOne + 4 + kOne);
  }
  SavedTensorOffload guard;
  const Tensor y = x.mm(w.t()).sin().cos().mm(w).sum();
  EXPECT_EQ(bytes.extra(), 4);
  EXPECT_EQ(guard.bytes(), 4 * kOne) << "x, and three in between";
}

TEST(ActivationReport, SaysWhatEachBlockKeepsAndWhereThePeakIs) {
  torch::manual_seed(4);
  Straight model(4, 32);
  const Tensor x = on_device::randn({128, 32});
  const auto loss = [&] { return model->forward(x).square().sum(); };
  const Derived before = derive_model(model, x);
  const ActivationReport plain = measure_activations(model.ptr(), loss);
  ASSERT_EQ(plain.blocks.size(), 4);
  constexpr int64_t kOutput = 128 * 32 * 4;
  EXPECT_GT(plain.blocks[0].saved_bytes, 5 * kOutput);
  EXPECT_EQ(plain.blocks[2].saved_bytes, plain.blocks[1].saved_bytes);
  EXPECT_EQ(plain.peak_at, "backward of block3");
  EXPECT_LT(plain.blocks[0].backward_peak, plain.blocks[3].backward_peak);
  EXPECT_EQ(plain.peak_bytes, observe_peak(model.ptr(), loss));
  gradient_checkpointing_enable(model);
  const ActivationReport regions = measure_activations(model.ptr(), loss);
  for (const BlockMemory& block : regions.blocks) {
    EXPECT_EQ(block.saved_bytes, kOutput) << block.name;
  }
  EXPECT_LT(regions.peak_bytes, plain.peak_bytes);
  EXPECT_TRUE(gradient_checkpointing_enabled(model.ptr()));
  expect_same_bits(before, derive_model(model, x));
  expect_says(regions.text(), {"block3", "peak", regions.peak_at});
  gradient_checkpointing_disable(model);
}

} // namespace hasten::checkpoint_test
