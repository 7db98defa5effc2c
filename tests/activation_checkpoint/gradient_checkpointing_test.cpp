// gradient_checkpointing_enable: which blocks run again, and that gradients and names do not
// change.
#include "activation_checkpoint/block_rig.h"
#include "hasten/core/random.h"
#include "support/on_device.h"

namespace hasten::checkpoint_test {

using namespace testing_support;

TEST(GradientCheckpointing, RunsTheBlocksItNamesAgainAndNoOther) {
  torch::manual_seed(4);
  Chain chain(5);
  const Tensor x = on_device::randn({4, 8});
  const Derived plain = derive_model(chain, x);
  calls_of(*chain);
  const std::vector<std::pair<std::string, std::vector<int>>> modes{{"none", {1, 1, 1, 1, 1}},
                                                                    {"full", {2, 2, 2, 2, 2}},
                                                                    {"every:2", {2, 1, 2, 1, 2}},
                                                                    {"every:3", {2, 1, 1, 2, 1}},
                                                                    {"ops", {2, 2, 2, 2, 2}}};
  for (const auto& [mode, calls] : modes) {
    gradient_checkpointing_enable(chain, {.mode = mode});
    EXPECT_EQ(gradient_checkpointing_enabled(chain.ptr()), mode != "none");
    expect_same_bits(plain, derive_model(chain, x));
    EXPECT_EQ(calls_of(*chain), calls) << mode;
  }
  {
    const at::NoGradGuard no_grad;
    chain->forward(x);
    EXPECT_EQ(calls_of(*chain), (std::vector<int>{1, 1, 1, 1, 1}));
  }
  gradient_checkpointing_disable(chain);
  EXPECT_FALSE(gradient_checkpointing_enabled(chain.ptr()));
  expect_same_bits(plain, derive_model(chain, x));
  EXPECT_EQ(calls_of(*chain), (std::vector<int>{1, 1, 1, 1, 1}));
  expect_says(error_of<std::exception>(
                  [&] { gradient_checkpointing_enable(chain, {.mode = "budget:50%"}); }),
              {"budget:50%", "enable_within_budget"});
}

struct PairImpl : torch::nn::Module {
  PairImpl()
      : first(register_module("first", torch::nn::Linear(6, 6))),
        second(register_module("second", torch::nn::BatchNorm1d(6))) {}
  Tensor forward(Tensor x) { return second(first(x)).relu(); }
  torch::nn::Linear first;
  torch::nn::BatchNorm1d second;
};
TORCH_MODULE(Pair);

TEST(GradientCheckpointing, ASequentialNeedsNoEdit) {
  torch::manual_seed(6);
  torch::nn::Sequential net(Pair(), Pair(), torch::nn::Linear(6, 6), torch::nn::ReLU(),
                            torch::nn::Dropout(0.3), torch::nn::Linear(6, 6), torch::nn::Tanh());
  on_device::moved(net);
  const Tensor x = on_device::randn({5, 6});
  const auto run = [&] {
    return derive(net->parameters(), [&] { return net->forward(x).square().sum(); });
  };
  run();
  const auto buffers = net->named_buffers(); // values after one batch
  const Tensor mean = buffers["0.second.running_mean"].clone();
  const Derived plain = run();
  const auto names = net->named_parameters().keys();
  buffers["0.second.running_mean"].copy_(mean);
  gradient_checkpointing_enable(std::shared_ptr<torch::nn::Module>(net.ptr()));
  const Recomputes counted;
  expect_same_bits(plain, run());
  // Each pair, and the five leaves in three regions.
  EXPECT_EQ(counted.count(), 5);
  EXPECT_EQ(net->named_parameters().keys(), names);
  EXPECT_EQ(buffers["0.second.num_batches_tracked"].item<int64_t>(), 3);
  gradient_checkpointing_disable(std::shared_ptr<torch::nn::Module>(net.ptr()));
  EXPECT_NO_THROW(net->at<torch::nn::LinearImpl>(2));
  expect_same_bits(plain, run());
  EXPECT_EQ(counted.count(), 5);
}

// Blocks inside blocks, shared blocks, and a model that no longer exists.
struct OuterImpl : torch::nn::Module {
  OuterImpl() : inner(register_module("inner", Mlp(8))) {}
  Tensor forward(const Tensor& x) { return call_block(inner, x).sin(); }
  Mlp inner;
};
TORCH_MODULE(Outer);
struct SharingImpl : torch::nn::Module {
  SharingImpl() : block(register_module("block", Outer())) { register_module("again", block); }
  Tensor forward(const Tensor& x) {
    return call_block(block, call_block(block, call_block(block, x)));
  }
  Outer block;
};
TORCH_MODULE(Sharing);

TEST(GradientCheckpointing, ABlockInsideABlockIsPartOfIt) {
  torch::manual_seed(8);
  Sharing model;
  const Tensor x = on_device::randn({4, 8});
  const Derived plain = derive_model(model, x);
  gradient_checkpointing_enable(model);
  const Recomputes counted;
  expect_same_bits(plain, derive_model(model, x));
  EXPECT_EQ(counted.count(), 3);
  {
    Sharing gone;
    gradient_checkpointing_enable(gone);
  }
  gradient_checkpointing_disable(model);
  EXPECT_EQ(detail::attached_blocks, 0);
}

// Sharding needs the parameters in every recomputation. An interceptor is notified around each one,
// also if it ends early.
struct CountingShard : BlockInterceptor {
  std::vector<Tensor> intercept(const BlockCall&, std::vector<Tensor> inputs,
                                Forward forward) override {
    ++forwards;
    return forward(std::move(inputs));
  }
  void before_recompute(const BlockCall&) override {
    ++recomputes;
    ++open;
  }
  void after_recompute(const BlockCall&) noexcept override { --open; }
  int forwards = 0;
  int recomputes = 0;
  int open = 0;
};

TEST(GradientCheckpointing, ReportsEveryFurtherRunToTheSharding) {
  torch::manual_seed(9);
  Straight chain(3);
  const Tensor x = on_device::randn({4, 8});
  const Derived plain = derive_model(chain, x);
  std::vector<std::shared_ptr<CountingShard>> shards;
  std::vector<BlockAttachment> attachments;
  for (Mlp& block : chain->blocks) {
    shards.push_back(std::make_shared<CountingShard>());
    attachments.push_back(attach_block(block.ptr(), BlockStage::shard, shards.back()));
  }
  const auto expect_counts = [&](std::vector<int> recomputes) {
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(shards[i]->forwards, 1) << i;
      EXPECT_EQ(shards[i]->recomputes, recomputes[i]) << i;
      EXPECT_EQ(shards[i]->open, 0) << i;
      *shards[i] = CountingShard();
    }
  };
  gradient_checkpointing_enable(chain);
  expect_same_bits(plain, derive_model(chain, x));
  expect_counts({1, 1, 1});
  // One region over all three blocks with an inner region over the first two, which run once more.
  gradient_checkpointing_enable(chain, {.plan = plan_of(*chain, {{0, 3}, {0, 2}})});
  expect_same_bits(plain, derive_model(chain, x));
  expect_counts({2, 2, 1});
}

TEST(CheckpointSpec, ReadsItsWordsAndNamesWhatIsNone) {
  EXPECT_EQ(GradientCheckpointing(true).text(), "full");
  EXPECT_FALSE(GradientCheckpointing("none"));
  EXPECT_EQ(GradientCheckpointing("every:3").every(), 3);
  EXPECT_EQ(GradientCheckpointing("budget:2GiB").budget_bytes(), 2LL << 30);
  EXPECT_EQ(GradientCheckpointing("budget:1.5MB").budget_bytes(), 1'500'000);
  EXPECT_DOUBLE_EQ(GradientCheckpointing("budget:30%").budget_share(), 0.3);
  EXPECT_EQ(GradientCheckpointing("budget:30%").text(), "budget:30%");
  for (const char* wrong : {"", "some", "every:0", "every:x", "budget:", "budget:0", "budget:150%",
                            "budget:-1", "budget:5XB"}) {
    expect_says(error_of<std::exception>([&] { GradientCheckpointing spec{std::string(wrong)}; }),
                {"gradient_checkpointing=" + std::string(wrong), "every:K"});
  }
}

} // namespace hasten::checkpoint_test
