// Activation checkpointing with the Accelerator, worlds 1 to 4. The results have the same bits as
// without it, also with dropout, accumulation and a short last window.
#include <torch/torch.h>

#include "activation_checkpoint/block_rig.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/flat/grad_hooks.h"
#include "hasten/local_sgd/local_sgd.h"
#include "support/communicator.h"

namespace hasten::checkpoint_test {

using namespace testing_support;

struct ChainTraining {
  bool count_hooks = false;
  int64_t local_sgd_steps = 0; // 0: DDP
  Precision precision = Precision::fp32;
};

struct TrainedChain {
  std::vector<Tensor> parameters{};
  std::vector<double> losses{};
  std::vector<int> hooks{}; // calls of each parameter's hook
};

static TrainedChain train_chain(const std::function<void(Straight&)>& enable,
                                const ChainTraining& how = {}) {
  AcceleratorOptions options;
  options.mixed_precision = how.precision;
  options.gradient_accumulation_steps = 3;
  options.seed = 12;
  options.bucket_cap_mb = 0.001; // several buckets
  Accelerator accelerator(options, fresh_communicator());
  torch::manual_seed(1);
  Straight chain(4);
  enable(chain);
  torch::optim::SGD sgd(chain->parameters(), 0.1);
  std::vector<std::pair<Tensor, Tensor>> rows;
  for (int64_t b = 0; b < 5 * accelerator.num_processes(); ++b) {
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(70 + b);
    rows.emplace_back(torch::randn({2, 8}, generator),
                      torch::randint(0, 2, {2}, generator, torch::kLong));
  }
  auto [model, optimizer, loader] = accelerator.prepare(chain, sgd, rows);
  TrainedChain result;
  std::vector<GradHook> hooks;
  if (how.count_hooks) {
    const auto parameters = chain->parameters();
    result.hooks.resize(parameters.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      hooks.emplace_back(parameters[i], [&calls = result.hooks[i]](const Tensor&) { ++calls; });
    }
  }
  LocalSGD local_sgd(accelerator, model,
                     {.local_sgd_steps = std::max<int64_t>(1, how.local_sgd_steps),
                      .enabled = how.local_sgd_steps > 0});
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (const auto& [x, y] : loader) {
      auto window = accelerator.accumulate(model);
      const Tensor loss = torch::nn::functional::cross_entropy(model->forward(x), y);
      result.losses.push_back(loss.item<double>());
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      local_sgd.step();
    }
  }
  local_sgd.finish();
  accelerator.end_training();
  for (const Tensor& parameter : chain->parameters()) {
    result.parameters.push_back(parameter.detach().clone());
  }
  gradient_checkpointing_disable(chain);
  return result;
}

static void expect_same_training(const TrainedChain& a, const TrainedChain& b) {
  EXPECT_EQ(a.losses, b.losses);
  ASSERT_EQ(a.parameters.size(), b.parameters.size());
  for (size_t i = 0; i < a.parameters.size(); ++i) {
    EXPECT_TRUE(torch::equal(a.parameters[i], b.parameters[i])) << i;
  }
}

TEST(CheckpointWorld, TrainingIsTheSameToTheBitWhateverIsRecomputed) {
  const TrainedChain plain = train_chain([](Straight&) {});
  for (const char* mode : {"full", "every:2", "ops"}) {
    const Recomputes counted;
    expect_same_training(plain, train_chain([&](Straight& chain) {
                           gradient_checkpointing_enable(chain, {.mode = mode});
                         }));
    EXPECT_GT(counted.count(), 0) << mode;
  }
  expect_same_training(plain, train_chain([](Straight& chain) {
                         gradient_checkpointing_enable(chain,
                                                       {.plan = plan_of(*chain, {{0, 4}, {0, 2}})});
                       }));
}

TEST(CheckpointWorld, SoItIsWithLocalSGDAndInSixteenBits) {
  for (const ChainTraining& how : {ChainTraining{.local_sgd_steps = 2},
                                   {.precision = Precision::bf16},
                                   {.local_sgd_steps = 2, .precision = Precision::bf16}}) {
    const TrainedChain plain = train_chain([](Straight&) {}, how);
    for (const char* mode : {"full", "ops"}) {
      const Recomputes counted;
      const auto enable = [&](Straight& chain) {
        gradient_checkpointing_enable(chain, {.mode = mode});
      };
      expect_same_training(plain, train_chain(enable, how));
      EXPECT_GT(counted.count(), 0) << mode;
    }
  }
}

TEST(CheckpointWorld, HooksFireOnceForEachBackward) {
  const ChainTraining how{.count_hooks = true};
  const TrainedChain plain = train_chain([](Straight&) {}, how);
  const TrainedChain region =
      train_chain([](Straight& chain) { gradient_checkpointing_enable(chain); }, how);
  EXPECT_EQ(plain.hooks, region.hooks);
  EXPECT_GT(plain.hooks[0], 0);
  expect_same_training(plain, region);
}

TEST(CheckpointWorld, RanksMayRecomputeDifferently) {
  const TrainedChain plain = train_chain([](Straight&) {});
  const int rank = fresh_communicator()->rank();
  expect_same_training(plain, train_chain([&](Straight& chain) {
                         gradient_checkpointing_enable(chain,
                                                       {.mode = rank % 2 == 0 ? "full" : "none"});
                       }));
}

} // namespace hasten::checkpoint_test
