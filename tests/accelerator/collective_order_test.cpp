// Operations of all groups start in one order on all ranks, whatever a rank's loss uses. Ranks that
// start them in another order can wait for each other for ever: two groups of a GPU in their
// kernels, and a group that compares shapes in its first operations.
#include <regex>

#include "accelerator/sharded_rig.h"
#include "hasten/comm/forwarding_communicator.h"
#include "support/on_device.h"

namespace hasten::sharded_test {

using Starts = std::vector<std::string>;

/// Writes down what it and the groups made from it start.
class RecordingCommunicator final : public ForwardingCommunicator {
 public:
  RecordingCommunicator(std::shared_ptr<Communicator> inner, std::shared_ptr<Starts> starts)
      : ForwardingCommunicator(std::move(inner)), starts_(std::move(starts)) {}

  std::shared_ptr<Communicator> duplicate(const CommunicatorOptions& options) override {
    return std::make_shared<RecordingCommunicator>(inner_->duplicate(options), starts_);
  }
  std::shared_ptr<Communicator> new_group(const std::vector<int>& ranks,
                                          const CommunicatorOptions& options) override {
    return std::make_shared<RecordingCommunicator>(inner_->new_group(ranks, options), starts_);
  }

 private:
  void entered(std::string_view operation, std::string_view name, const Tensor&) override {
    starts_->push_back(options().name + ": " + std::string(operation) + " " + std::string(name));
  }

  const std::shared_ptr<Starts> starts_;
};

/// Rank 0 uses all parameters. The others leave out the last block and a layer that runs early, whose
/// gradients come after the norm's backward. That layer is registered last, so its bucket is the
/// first until the order is learned.
struct PartlyUsedImpl : torch::nn::Module {
  PartlyUsedImpl() {
    stack = register_module("stack", Stack(3));
    norm = register_module("norm",
                           torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(6).affine(false)));
    early = register_module("early", torch::nn::Linear(6, 6));
  }
  Tensor forward(const Tensor& ids, bool all) {
    Tensor x = stack->words->forward(ids).mean(1);
    Tensor before = all ? x + early->forward(x) : x;
    Tensor after = before;
    for (const auto& layer : *stack->layers) {
      before = std::exchange(after, call_block(*layer->as<BlockImpl>(), after));
    }
    return stack->head->forward(norm->forward(all ? after : before));
  }
  Stack stack{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear early{nullptr};
};
TORCH_MODULE(PartlyUsed);

Starts starts_of(const AcceleratorOptions& options, const std::shared_ptr<Communicator>& world,
                 bool checkpoints) {
  const auto starts = std::make_shared<Starts>();
  const auto own = world->duplicate(
      {.timeout = std::chrono::seconds(30),
       .name = std::string(strategy_name(options.strategy)) + (checkpoints ? " recomputed" : "")});
  Accelerator accelerator(options, std::make_shared<RecordingCommunicator>(own, starts));
  torch::manual_seed(3);
  PartlyUsed net;
  net->to(testing_support::run_device());
  auto rows = batches(4 * world->world_size() + 1); // the last turn is rank 0's alone
  for (auto& [ids, labels] : rows) { // torch's layer refuses one row
    ids = ids.repeat({2, 1});
    labels = labels.repeat(2);
  }
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, rows);
  if (checkpoints) {
    gradient_checkpointing_enable(net);
  }
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      const Tensor logits = net->forward(batch.first, world->rank() == 0);
      accelerator.backward(torch::nn::functional::cross_entropy(logits, batch.second));
      accelerator.clip_grad_norm_(net->parameters(), 1.0);
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  accelerator.end_training();
  // The number of a group of shards counts those of the process that is its first rank: other cases may
  // have made more of them on one replica.
  for (std::string& start : *starts) {
    start = std::regex_replace(start, std::regex("shards [0-9]+"), "shards");
  }
  return *starts;
}

void expect_one_order(AcceleratorOptions options, const std::shared_ptr<Communicator>& world,
                      bool checkpoints = false) {
  options.device = testing_support::run_device().str();
  options.bucket_cap_mb = 1e-4;
  const Starts mine = starts_of(options, world, checkpoints);
  const auto all = world->all_gather_object(mine, "what each rank has started");
  for (const auto& other : all) {
    EXPECT_EQ(other.get<Starts>(), all[0].get<Starts>());
  }
  EXPECT_GE(std::ssize(mine), world->world_size() > 1 ? 20 : 0);
}

TEST(CollectiveOrder, OfDdpWithSyncBatchNormAndUnusedParameters) {
  const auto world = testing_support::fresh_communicator();
  expect_one_order({.find_unused_parameters = true, .sync_batchnorm = true}, world);
}

TEST(CollectiveOrder, OfAStaticGraphWithSyncBatchNorm) {
  const auto world = testing_support::fresh_communicator();
  expect_one_order({.static_graph = true, .sync_batchnorm = true}, world);
}

// A window of two batches sends its vector, one bucket and which parameters were used, once, and the
// losses of a device.
TEST(CollectiveOrder, AWindowSendsThreeMessages) {
  const auto world = testing_support::fresh_communicator();
  const auto starts = std::make_shared<Starts>();
  Accelerator accelerator(options_of({.accumulation = 2}),
                          std::make_shared<RecordingCommunicator>(world, starts));
  Stack stack = make_stack({}, accelerator.process_index());
  torch::optim::SGD sgd(stack->parameters(), 0.1);
  auto data = batches(6 * world->world_size() - 1); // three windows; one stand-in
  auto [model, optimizer, loader] = accelerator.prepare(stack, sgd, data);
  std::vector<Starts> of_window;
  for (const auto& rows : loader) {
    auto window = accelerator.accumulate(model);
    accelerator.backward(loss_of(stack, rows));
    optimizer.step();
    optimizer.zero_grad();
    if (accelerator.sync_gradients()) {
      of_window.push_back(std::exchange(*starts, {}));
    }
  }
  ASSERT_EQ(of_window.size(), 3u);
  const size_t expected = testing_support::run_device().is_cpu() ? 3 : 4;
  EXPECT_EQ(of_window[1].size(), world->world_size() > 1 ? expected : 0u);
  EXPECT_EQ(starts->size(), world->world_size() > 1 ? 1u : 0u); // the end of the pass
  accelerator.end_training();
}

TEST(CollectiveOrder, OfShardsAndTheirReplicas) {
  const auto world = testing_support::fresh_communicator();
  const int ranks = world->world_size();
  for (const Strategy strategy :
       {Strategy::fsdp, Strategy::zero2, Strategy::zero1, Strategy::hsdp}) {
    for (const bool checkpoints : {false, true}) {
      AcceleratorOptions options;
      options.gradient_accumulation_steps = 2;
      options.strategy = strategy;
      options.shard_size = strategy != Strategy::hsdp ? 0 : ranks % 2 == 0 ? ranks / 2 : ranks;
      options.sync_batchnorm = true;
      expect_one_order(options, world, checkpoints);
    }
  }
}

} // namespace hasten::sharded_test
