// Batches of weight 0: a masked mean on a rank without a masked row, and stand-in batches. The
// training equals that of one process on the joined batches without these losses, whatever their
// values are. The statistics of synchronised batch norm include the rows of a masked batch, but not
// those of a stand-in batch. Worlds 1 to 4, fp64.
#include <limits>

#include "accelerator/plain_steps.h"
#include "accelerator/sharded_rig.h"
#include "support/on_device.h"

namespace hasten::weight_zero_test {

using accelerator_test::expect_says;
using accelerator_test::message_of;
using sharded_test::Block;
using sharded_test::BlockImpl;
using sharded_test::Tensor;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kTurns = 4; // of each rank; in the last turn some ranks have stand-in batches

// Layers before and after a batch norm.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    words = register_module("words", torch::nn::Embedding(13, 6));
    for (int i = 0; i < 2; ++i) {
      layers->push_back(Block());
    }
    register_module("layers", layers);
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    head = register_module("head", torch::nn::Linear(6, 3));
    to(testing_support::run_device(), torch::kDouble);
  }
  Tensor forward(const Tensor& ids) {
    Tensor x = words->forward(ids).mean(1);
    x = call_block(*layers[0]->as<BlockImpl>(), x);
    x = norm->forward(x);
    x = call_block(*layers[1]->as<BlockImpl>(), x);
    return head->forward(x);
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::ModuleList layers{};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

// Batches of three rows: words [3, 4], and [3, 2] with the label and whether the row is masked.
// Batch 1 and every third batch after it have no masked row.
std::vector<std::pair<Tensor, Tensor>> ids_and_labels(int64_t count) {
  std::vector<std::pair<Tensor, Tensor>> all;
  for (int64_t b = 0; b < count; ++b) {
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(600 + b));
    Tensor labels = on_device::randint(0, 3, {3}, generator, torch::kLong);
    const Tensor mask = b % 3 == 1 ? on_device::zeros({3}, torch::kLong)
                                   : on_device::tensor({int64_t{1}, b % 2, int64_t{1}});
    all.emplace_back(on_device::randint(0, 13, {3, 4}, generator, torch::kLong),
                     torch::stack({labels, mask}, 1)); // [3, 2]
  }
  return all;
}

Tensor losses(const Tensor& logits, const Tensor& labels) {
  return torch::nn::functional::cross_entropy(
      logits, labels.select(1, 0),
      torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
}

struct Way {
  Strategy strategy = Strategy::ddp;
  std::string checkpointing{};
  bool synced = false;
  int64_t accumulation = 2;
};

Net net_of(int seed, bool synced) {
  torch::manual_seed(static_cast<uint64_t>(seed));
  Net net;
  if (!synced) {
    net->norm->eval(); // in training mode the ranks would have different statistics
  }
  return net;
}

struct Result {
  std::vector<Tensor> parameters{}, buffers{};
};

Result train(const Way& way, std::shared_ptr<Communicator> communicator) {
  AcceleratorOptions options;
  options.device = testing_support::run_device().str();
  options.seed.reset();
  options.strategy = way.strategy;
  options.shard_size = communicator->world_size() / 2;
  options.sync_batchnorm = way.synced;
  options.gradient_accumulation_steps = way.accumulation;
  options.bucket_cap_mb = 2e-4;
  const int world = communicator->world_size();
  Accelerator accelerator(options, std::move(communicator));
  Net net = net_of(accelerator.process_index() + 1, way.synced);
  if (!way.checkpointing.empty()) {
    gradient_checkpointing_enable(net, {.mode = way.checkpointing});
  }
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  auto data = ids_and_labels((kTurns - 1) * world + 1);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, data);
  for (int epoch = 0; epoch < 2; ++epoch) {
    int64_t turn = 0;
    for (const auto& [ids, labels] : loader) {
      const bool stands_in = ++turn == kTurns && accelerator.process_index() > 0;
      const Tensor mask = labels.select(1, 1).to(torch::kDouble);
      const double weight = mask.sum().item<double>();
      auto window = accelerator.accumulate(loader, weight, model);
      const Tensor each = losses(net->forward(ids), labels);
      // Derivatives that are infinite or NaN, inside the model and at its end.
      Tensor loss =
          weight > 0 ? (each * mask).sum() / mask.sum() : (each / mask / mask).sum() / mask.sum();
      if (stands_in) {
        loss = loss * kNan;
      }
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  Result result;
  accelerator.summon_full_params(
      [&] {
        for (const Tensor& parameter : net->parameters()) {
          result.parameters.push_back(parameter.detach().clone());
        }
      },
      net);
  for (const Tensor& buffer : net->buffers()) {
    result.buffers.push_back(buffer.detach().clone());
  }
  accelerator.end_training();
  gradient_checkpointing_disable(net);
  return result;
}

// The statistics are those of a turn's rows. The gradients are those of a window's masked rows.
Result plain(int world, bool synced, int64_t accumulation) {
  const auto data = ids_and_labels((kTurns - 1) * world + 1);
  Net net = net_of(1, synced);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int epoch = 0; epoch < 2; ++epoch) {
    double weight = 0;
    sgd.zero_grad();
    for (int64_t turn = 0; turn < kTurns; ++turn) {
      std::vector<Tensor> ids, labels;
      for (int64_t b = turn * world; b < (turn + 1) * world; ++b) {
        if (b < static_cast<int64_t>(data.size())) {
          ids.push_back(data[static_cast<size_t>(b)].first);
          labels.push_back(data[static_cast<size_t>(b)].second);
        }
      }
      const Tensor logits = net->forward(torch::cat(ids));
      const Tensor all = torch::cat(labels);
      const Tensor counted = all.select(1, 1).nonzero().view({-1});
      weight += static_cast<double>(counted.numel());
      if (counted.numel() > 0) {
        losses(logits.index_select(0, counted), all.index_select(0, counted)).sum().backward();
      }
      if ((turn + 1) % accumulation == 0) {
        for (const Tensor& parameter : net->parameters()) {
          if (parameter.grad().defined()) {
            parameter.mutable_grad().div_(weight > 0 ? weight : 1);
          }
        }
        sgd.step();
        sgd.zero_grad();
        weight = 0;
      }
    }
  }
  return {net->parameters(), net->buffers()};
}

double apart(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const Tensor difference = (a[i] - b[i]).abs().to(torch::kDouble);
    most = std::max(most, difference.nan_to_num(1e9).max().item<double>());
  }
  return most;
}

void expect_joined_batch(bool synced, const std::string& checkpointing) {
  const auto everyone = testing_support::fresh_communicator();
  const int world = everyone->world_size();
  for (const int64_t accumulation : {1, 2}) {
    const Result wanted = plain(world, synced, accumulation);
    for (const Strategy strategy :
         {Strategy::ddp, Strategy::zero1, Strategy::zero2, Strategy::fsdp, Strategy::hsdp}) {
      if (strategy == Strategy::hsdp && world % 2 != 0) {
        continue;
      }
      SCOPED_TRACE(std::string(strategy_name(strategy)) + ", accumulation " +
                   std::to_string(accumulation));
      const Result found = train({.strategy = strategy,
                                  .checkpointing = checkpointing,
                                  .synced = synced,
                                  .accumulation = accumulation},
                                 everyone);
      if (everyone->rank() == 0) {
        EXPECT_LE(apart(found.parameters, wanted.parameters), 1e-10);
      }
      EXPECT_LE(apart(found.buffers, wanted.buffers), 1e-10);
    }
  }
}

TEST(WeightZero, AMaskedMeanWithAnEmptyRankIsThatOfTheJoinedBatch) {
  expect_joined_batch(false, "");
}

TEST(WeightZero, AMaskedMeanWithAnEmptyRankIsThatOfTheJoinedBatchRecomputed) {
  expect_joined_batch(false, "full");
}

// The statistics include its rows, and the gradient through the statistics is kept.
TEST(WeightZero, ItsRowsStayInTheStatisticsOfSynchronisedBatchNorm) {
  expect_joined_batch(true, "");
}

TEST(WeightZero, ItsRowsStayInTheStatisticsOfSynchronisedBatchNormRecomputed) {
  expect_joined_batch(true, "full");
}

// Losses that are sums, inside and outside accumulate(), also for a batch whose gradient waits.
TEST(WeightZero, ASumOverNoTermsIsNotLookedAt) {
  using accelerator_test::expect_gradients;
  using accelerator_test::sum_loss;
  const auto batches = accelerator_test::even_batches(2);
  const auto wanted = accelerator_test::plain_gradients(
      [&](accelerator_test::Net& net) { return sum_loss(net, batches[0]) / 4; });
  for (const bool inside : {true, false}) {
    auto accelerator =
        accelerator_test::accelerator_of({.gradient_accumulation_steps = inside ? 2 : 1});
    const bool first = accelerator.is_main_process();
    auto net = accelerator_test::net_of_rank(accelerator);
    auto model = accelerator.prepare(net);
    const auto backward = [&](const auto& batch, bool counts) {
      const Tensor loss = sum_loss(net, batch) * (counts ? 1 : kNan);
      accelerator.backward(loss, counts ? 4 : 0);
    };
    if (inside) {
      for (size_t b = 0; b < 2; ++b) {
        auto window = accelerator.accumulate(model);
        backward(batches[b], first && b == 0);
      }
    } else {
      {
        auto quiet = accelerator.no_sync();
        backward(batches[1], false);
      }
      backward(batches[0], first);
    }
    expect_gradients(*net, wanted);
    EXPECT_EQ(accelerator.last_window().non_finite, 0);
    EXPECT_EQ(accelerator.last_window().weight, 4);
    accelerator.end_training();
  }
}

// The statistics include the rows of a batch with weight 0, so their values must be finite.
TEST(WeightZero, InputsOfSynchronisedBatchNormThatAreNotFiniteNameTheRank) {
  for (const double bad : {kNan, std::numeric_limits<double>::infinity()}) {
    auto accelerator = accelerator_test::accelerator_of({.sync_batchnorm = true});
    const int world = accelerator.num_processes();
    if (world == 1) {
      continue;
    }
    Net net = net_of(1, true);
    auto model = accelerator.prepare(net);
    const std::string said = message_of([&] {
      Tensor x = on_device::ones({2, 6}, torch::kDouble);
      if (accelerator.process_index() == world - 1) {
        x[1][2] = bad;
      }
      net->norm->forward(x);
    });
    expect_says(said, "rank " + std::to_string(world - 1));
    expect_says(said, "batch norm \"norm\"");
    accelerator.end_training();
  }
}

} // namespace hasten::weight_zero_test
