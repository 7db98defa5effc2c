#include "hasten/core/block_call.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <new>
#include <stdexcept>
#include <thread>

#include "hasten/base/error.h"

namespace hasten::block_call_test {

using at::Tensor;
using torch::nn::Module;

struct Output {
  Tensor logits;
  std::optional<Tensor> loss;
  int64_t layers = 0;
};

template <typename Visit>
void flatten(Visit& visit, Output& output) {
  visit(output.logits);
  visit(output.loss);
}

struct ScaleImpl : Module {
  explicit ScaleImpl(double factor) : factor(factor) {}
  Tensor forward(const Tensor& x, double shift = 0) {
    ++calls;
    return x * factor + shift;
  }
  double factor;
  std::atomic<int> calls{0};
};
TORCH_MODULE(Scale);

// Every kind of argument and result that contains tensors.
struct MixedImpl : Module {
  Output forward(const std::vector<Tensor>& list, std::optional<Tensor> mask,
                 std::tuple<Tensor, int64_t> pair, const std::string& name) {
    Tensor sum = list[0] + list[1] + std::get<0>(pair);
    return {sum, mask, static_cast<int64_t>(name.size()) + std::get<1>(pair)};
  }
};
TORCH_MODULE(Mixed);

using Step = std::function<std::vector<Tensor>(const BlockCall&, std::vector<Tensor>, Forward)>;
struct Interceptor : BlockInterceptor {
  explicit Interceptor(Step step) : step(std::move(step)) {}
  std::vector<Tensor> intercept(const BlockCall& call, std::vector<Tensor> inputs,
                                Forward forward) override {
    return step(call, std::move(inputs), std::move(forward));
  }
  Step step;
};
std::shared_ptr<Interceptor> make(Step step) {
  return std::make_shared<Interceptor>(std::move(step));
}

double value(const Tensor& t) { return t.item<double>(); }
Tensor scalar(double v) { return torch::tensor(v, torch::kDouble); }

TEST(BlockCall, IsThePlainForwardUntilSomethingIsAttached) {
  Scale block(3.0);
  EXPECT_EQ(value(call_block(block, scalar(2), 1.0)), 7);
  EXPECT_EQ(value(call_block(block.ptr(), scalar(2))), 6);
  EXPECT_EQ(value(call_block(*block, scalar(2))), 6);
  Scale other(1.0);
  auto hold =
      attach_block(other.ptr(), BlockStage::shard,
                   make([](auto&, auto, Forward forward) { return forward({scalar(100)}); }));
  EXPECT_EQ(value(call_block(block, scalar(2))), 6);
  EXPECT_EQ(value(call_block(other, scalar(2))), 100);
  hold.detach();
  EXPECT_EQ(value(call_block(other, scalar(2))), 2);
  EXPECT_EQ(detail::attached_blocks, 0);
}

// The outer interceptor replaces inputs and outputs. The inner one runs forward again.
TEST(BlockCall, ShardIsOutsideCheckpointWhateverTheOrderOfAttachment) {
  for (const bool shard_first : {true, false}) {
    Scale block(3.0);
    std::vector<std::string> order;
    auto shard = make([&](const BlockCall& call, auto inputs, Forward forward) {
      order.push_back("shard");
      EXPECT_EQ(call.block.get(), block.get());
      inputs[0] = inputs[0] + 1;
      auto outputs = forward(inputs);
      outputs[0] = outputs[0] * 10;
      return outputs;
    });
    auto checkpoint = make([&](auto&, auto inputs, Forward forward) {
      order.push_back("checkpoint");
      return forward(forward(inputs));
    });
    BlockAttachment first, second;
    if (shard_first) {
      first = attach_block(block.ptr(), BlockStage::shard, shard);
      second = attach_block(block.ptr(), BlockStage::checkpoint, checkpoint);
    } else {
      first = attach_block(block.ptr(), BlockStage::checkpoint, checkpoint);
      second = attach_block(block.ptr(), BlockStage::shard, shard);
    }
    // ((1 + 1) * 3 + 0.5) * 3 + 0.5, times 10.
    EXPECT_EQ(value(call_block(block, scalar(1), 0.5)), 200);
    EXPECT_EQ(block->calls, 2);
    EXPECT_EQ(order, (std::vector<std::string>{"shard", "checkpoint"}));
    EXPECT_THROW(attach_block(block.ptr(), BlockStage::shard, shard), InputError);
  }
  EXPECT_EQ(detail::attached_blocks, 0);
}

TEST(BlockCall, FlattensVectorsOptionalsTuplesAndStructs) {
  Mixed block;
  size_t seen = 0;
  bool mask_defined = false;
  auto hold =
      attach_block(block.ptr(), BlockStage::shard, make([&](auto&, auto inputs, Forward forward) {
                     seen = inputs.size();
                     mask_defined = inputs[2].defined();
                     inputs[1] = scalar(20);
                     auto outputs = forward(inputs);
                     EXPECT_EQ(outputs.size(), 2u);
                     outputs[0] = outputs[0] + 1000;
                     return outputs;
                   }));
  std::vector<Tensor> list{scalar(1), scalar(2)};
  Output output = call_block(block, list, std::optional<Tensor>(),
                             std::make_tuple(scalar(300), int64_t{4}), "abc");
  EXPECT_EQ(seen, 4u);
  EXPECT_FALSE(mask_defined);
  EXPECT_EQ(value(output.logits), 1321);
  EXPECT_FALSE(output.loss.has_value());
  EXPECT_EQ(output.layers, 7);
  EXPECT_EQ(value(list[1]), 2) << "the caller's own tensors stay";
  output = call_block(block, list, std::optional<Tensor>(scalar(5)),
                      std::make_tuple(scalar(0), int64_t{0}), std::string("a"));
  EXPECT_TRUE(mask_defined);
  EXPECT_EQ(value(*output.loss), 5);
}

TEST(BlockCall, AnExceptionPassesThroughBothInterceptors) {
  struct EarlyStop {}; // not a std::exception, like the one that checkpoints use
  Scale block(1.0);
  int unwound = 0;
  auto pass = make([&](auto&, auto inputs, Forward forward) {
    struct Count {
      int& n;
      ~Count() { ++n; }
    } count{unwound};
    return forward(inputs);
  });
  auto thrower = make([&](auto&, auto, Forward) -> std::vector<Tensor> { throw EarlyStop{}; });
  auto outer = attach_block(block.ptr(), BlockStage::shard, pass);
  {
    auto inner = attach_block(block.ptr(), BlockStage::checkpoint, thrower);
    EXPECT_THROW(call_block(block, scalar(1)), EarlyStop);
    EXPECT_EQ(unwound, 1);
  }
  auto inner = attach_block(block.ptr(), BlockStage::checkpoint, pass);
  EXPECT_THROW(call_block(block, Tensor()), std::exception);
  EXPECT_EQ(unwound, 3);
  EXPECT_EQ(value(call_block(block, scalar(1))), 1) << "still usable";
}

TEST(BlockCall, ADeadBlockLeavesNothingToTheNextAtItsAddress) {
  alignas(ScaleImpl) static std::byte place[sizeof(ScaleImpl)];
  auto build = [&](double factor) {
    return std::shared_ptr<ScaleImpl>(new (place) ScaleImpl(factor),
                                      [](ScaleImpl* p) { p->~ScaleImpl(); });
  };
  auto hundred = make([](auto&, auto, Forward forward) { return forward({scalar(100)}); });
  auto block = build(2);
  auto hold = attach_block(block, BlockStage::shard, hundred);
  EXPECT_EQ(value(call_block(block, scalar(1))), 200);
  block.reset();
  block = build(3);
  EXPECT_EQ(value(call_block(block, scalar(1))), 3);
  auto next = attach_block(block, BlockStage::shard, hundred);
  hold.detach(); // its block is destroyed; the live block's must remain
  EXPECT_EQ(value(call_block(block, scalar(1))), 300);
  next.detach();
  EXPECT_EQ(detail::attached_blocks, 0);
}

TEST(BlockCall, ABlockMayDieDuringItsCallAndForwardOutlivesIt) {
  Scale block(2.0);
  Forward kept;
  auto hold = attach_block(block.ptr(), BlockStage::checkpoint,
                           make([&](auto&, auto inputs, Forward forward) {
                             block = nullptr;
                             kept = forward;
                             return forward(inputs);
                           }));
  EXPECT_EQ(value(call_block(block.ptr(), scalar(4), 1.0)), 9);
  EXPECT_EQ(value(kept({scalar(5)})[0]), 11) << "as a recompute in backward";
  EXPECT_THROW(kept({}), InputError);
}

TEST(BlockCall, AForwardHeldForBackwardKeepsNoTensorOfTheCall) {
  Scale block(2.0);
  std::vector<Forward> kept;
  auto hold = attach_block(block.ptr(), BlockStage::checkpoint,
                           make([&](auto&, auto inputs, Forward forward) {
                             kept.push_back(forward);
                             return forward(std::move(inputs));
                           }));
  Tensor input = torch::ones({3});
  Tensor output = call_block(block, input);
  kept[0]({torch::ones({3})});
  EXPECT_EQ(input.use_count(), 1u);
  EXPECT_EQ(output.use_count(), 1u);
}

TEST(BlockCall, RefusesAnotherNumberOfOutputs) {
  Scale block(2.0);
  auto hold = attach_block(block.ptr(), BlockStage::shard, make([](auto&, auto inputs, Forward) {
                             inputs.push_back(inputs[0]);
                             return inputs;
                           }));
  try {
    call_block(block, scalar(1));
    FAIL() << "must throw";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("outputs=2"), std::string::npos) << error.what();
  }
}

TEST(BlockCall, AttachesWhileOtherThreadsCall) {
  Scale block(2.0), still(5.0);
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0}, calls{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (!stop) {
        const double v = value(call_block(block, scalar(1)));
        wrong += v != 2 && v != 200;
        wrong += value(call_block(still, scalar(1))) != 5;
        ++calls;
      }
    });
  }
  auto hundred = make([](auto&, auto, Forward forward) { return forward({scalar(100)}); });
  while (calls < 500) {
    auto hold = attach_block(block.ptr(), BlockStage::shard, hundred);
    Scale dead(1.0);
    auto swept = attach_block(dead.ptr(), BlockStage::checkpoint, hundred);
  }
  stop = true;
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(detail::attached_blocks, 0);
}

} // namespace hasten::block_call_test
