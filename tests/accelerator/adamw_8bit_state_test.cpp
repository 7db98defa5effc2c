// AdamW8bit with shards, and states of it, worlds 1 to 4.
#include "accelerator/sharded_rig.h"
#include "accelerator/state_rig.h"

namespace hasten::adamw_8bit_state_test {

using at::Tensor;

torch::nn::Sequential make_net() {
  torch::manual_seed(4);
  torch::nn::Sequential net(torch::nn::Linear(30, 70), torch::nn::Linear(70, 9));
  net->to(testing_support::run_device());
  return net;
}

/// Shards of several blocks, of parts of a block, and of no rows.
struct Learner {
  Learner(Strategy strategy, std::shared_ptr<Communicator> communicator)
      : accelerator(sharded_test::options_of(
                        {.strategy = strategy,
                         .change =
                             [](AcceleratorOptions& o) {
                               o.shard_size =
                                   testing_support::test_world().world_size % 2 == 0 ? 2 : 0;
                             }}),
                    std::move(communicator)),
        net(make_net()),
        own(net->parameters(), torch::optim::AdamWOptions(0.01), {.min_8bit_size = 9}),
        optimizer(std::get<1>(accelerator.prepare(net, own))) {}
  /// Every rank has the same rows.
  void step(int64_t number) {
    auto window = accelerator.accumulate(net);
    const Tensor x =
        torch::sin(on_device::arange(60).view({2, 30}) * (1.3 + 0.1 * static_cast<double>(number)));
    accelerator.backward(net->forward(x).square().sum() / static_cast<double>(1 + number), 1);
    optimizer.step();
    optimizer.zero_grad();
  }
  std::vector<Tensor> whole() {
    std::vector<Tensor> result;
    accelerator.summon_full_params(
        [&] {
          for (const Tensor& parameter : net->parameters()) {
            result.push_back(parameter.detach().clone());
          }
        },
        net);
    return result;
  }

  Accelerator accelerator;
  torch::nn::Sequential net;
  AdamW8bit own;
  PreparedOptimizer<AdamW8bit> optimizer;
};

// Bit for bit with the same shards. With others, moments are rounded again.
TEST(AdamW8bitState, AnyStrategyGoesOnFromAny) {
  state_test::expect_any_strategy_goes_on<Learner>(0, 1e-3);
}

TEST(AdamW8bitState, BlocksBeginAtEachShard) {
  Learner learner(Strategy::fsdp, testing_support::fresh_communicator());
  learner.step(0);
  int64_t elements = 0;
  for (const Tensor& parameter : learner.net->parameters()) {
    const auto& state = static_cast<const AdamWParamState&>(
        *learner.own.state().at(parameter.unsafeGetTensorImpl()));
    const bool codes = parameter.numel() >= 9;
    EXPECT_EQ(state.exp_avg().scalar_type() == at::kByte, codes);
    EXPECT_TRUE(!codes || state.exp_avg_absmax().numel() == (parameter.numel() + 255) / 256);
    elements += parameter.numel();
  }
  EXPECT_LE(elements, 2809 / learner.accelerator.num_processes() + 100);
}

} // namespace hasten::adamw_8bit_state_test
