// Ranges that distribute their batches themselves and give ranks different numbers: with a size(),
// which ranks exchange once, or without, so that they ask each other batch by batch.
#include "accelerator/plain_steps.h"
#include "accelerator/sharded_rig.h"
#include "accelerator/state_rig.h"
#include "hasten/local_sgd/local_sgd.h"
#include "support/watched_communicator.h"

namespace hasten::accelerator_test {

// Rank r has the batches from r (r + 1) / 2 on, r + 1 of them.
struct Stream {
  explicit Stream(int world) : all(make_batches(world * (world + 1) / 2)) {}
  void shard(int rank, int) {
    const auto first = all.begin() + rank * (rank + 1) / 2;
    mine.assign(first, first + rank + 1);
  }
  auto begin() const { return mine.begin(); }
  auto end() const { return mine.end(); }
  std::vector<Pair> all, mine{};
};

struct SizedStream : Stream {
  using Stream::Stream;
  int64_t size() const { return std::ssize(mine); }
};

// The batches of turn t: those of the ranks from t on.
std::vector<Pair> turn_of(const Stream& stream, int world, int turn) {
  std::vector<Pair> batches;
  for (int rank = turn; rank < world; ++rank) {
    batches.push_back(stream.all[static_cast<size_t>(rank * (rank + 1) / 2 + turn)]);
  }
  return batches;
}

Net plain_training(const Stream& stream, int world, int64_t k, int epochs) {
  std::vector<std::vector<Pair>> steps;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (int turn = 0; turn < world; ++turn) {
      if (turn % k == 0) {
        steps.emplace_back();
      }
      for (const Pair& batch : turn_of(stream, world, turn)) {
        steps.back().push_back(batch);
      }
    }
  }
  return plain_steps(steps, 0.2);
}

template <typename Range>
void expect_training_is_plain(int64_t k) {
  auto accelerator = accelerator_of({.gradient_accumulation_steps = k});
  const int world = accelerator.num_processes();
  Range stream(world);
  Net net = net_of_rank(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.2);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, stream);
  for (int epoch = 0; epoch < 2; ++epoch) {
    int turns = 0;
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      ++turns;
      EXPECT_EQ(accelerator.sync_gradients(), turns % k == 0 || turns == world);
      accelerator.backward(mean_loss(model, batch));
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_EQ(turns, world);
  }
  accelerator.end_training();
  EXPECT_LE(largest_difference(*net, *plain_training(stream, world, k, 2)), 1e-12);
}

TEST(RollCall, ARangeWithItsOwnShardsTrainsAsOneProcess) {
  for (const int64_t k : {1, 2, 3}) {
    SCOPED_TRACE(k);
    expect_training_is_plain<Stream>(k);
    expect_training_is_plain<SizedStream>(k);
  }
}

// With a size() one exchange when a pass begins, else one message a batch.
TEST(RollCall, SendsOneMessageABatch) {
  auto watched =
      std::make_shared<testing_support::WatchedCommunicator>(testing_support::fresh_communicator());
  int sent = 0;
  watched->before = [&sent](std::string_view) { ++sent; };
  Accelerator accelerator({}, watched);
  const int world = accelerator.num_processes();
  Stream stream(world);
  SizedStream sized(world);
  Net net = net_of_rank(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.2);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, stream);
  auto known = accelerator.prepare(sized);
  const auto turns = [&](auto& range) {
    sent = 0;
    int64_t count = 0;
    for (auto batch = range.begin(); batch != range.end(); ++batch) {
      ++count;
    }
    return count;
  };
  EXPECT_EQ(turns(known), world);
  EXPECT_EQ(sent, world > 1 ? 2 : 0);
  EXPECT_EQ(turns(loader), world);
  EXPECT_EQ(sent, world > 1 ? world + 2 : 0); // the last answer is no; and the end of the pass
  accelerator.end_training();
}

template <typename Range>
void expect_each_row_gathered_once(bool in_scope) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  Range stream(world);
  Net net = net_of_seed(1);
  torch::optim::SGD sgd(net->parameters(), 0.2);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  LocalSGD scope(accelerator, model, {.enabled = in_scope});
  auto loader = accelerator.prepare(stream);
  int64_t rows = 0;
  double sum = 0;
  for (const auto& batch : loader) {
    const Tensor all = accelerator.gather_for_metrics(batch.first.sum(1));
    rows += all.size(0);
    sum += all.sum().template item<double>();
  }
  const Pair whole = joined(stream.all);
  EXPECT_EQ(rows, whole.second.size(0));
  EXPECT_NEAR(sum, whole.first.sum().template item<double>(), 1e-9);
  scope.finish();
  accelerator.end_training();
}

TEST(RollCall, AnEvaluationGathersEachRowOnce) {
  for (const bool in_scope : {false, true}) {
    expect_each_row_gathered_once<Stream>(in_scope);
    expect_each_row_gathered_once<SizedStream>(in_scope);
  }
}

TEST(RollCall, ABreakIsForAllRanks) {
  const int world = testing_support::test_world().world_size;
  EXPECT_EQ(said_after_break(Stream(world + 1), true), "nothing was thrown");
  if (world > 1) {
    expect_says(said_after_break(Stream(world + 1), false), "some ranks have ended their loop");
  }
}

// Two loaders in turns, each with windows of its own model.
TEST(RollCall, TwoLoadersInTurnsKeepTheirAnswersApart) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  Stream stream_a(world), stream_b(world);
  std::ranges::reverse(stream_b.all);
  Net net_a = net_of_rank(accelerator), net_b = net_of_rank(accelerator);
  torch::optim::SGD sgd_a(net_a->parameters(), 0.2), sgd_b(net_b->parameters(), 0.2);
  auto [a, optimizer_a, loader_a] = accelerator.prepare(net_a, sgd_a, stream_a);
  auto [b, optimizer_b, loader_b] = accelerator.prepare(net_b, sgd_b, stream_b);
  auto next = loader_b.begin();
  for (const auto& batch : loader_a) {
    for (const bool first : {true, false}) {
      auto window =
          first ? accelerator.accumulate(loader_a, a) : accelerator.accumulate(loader_b, b);
      accelerator.backward(mean_loss(first ? a : b, first ? batch : *next));
      optimizer_a.step();
      optimizer_b.step();
      optimizer_a.zero_grad();
      optimizer_b.zero_grad();
    }
    ++next;
  }
  EXPECT_TRUE(next == loader_b.end());
  accelerator.end_training();
  EXPECT_LE(largest_difference(*net_a, *plain_training(stream_a, world, 1, 1)), 1e-12);
  EXPECT_LE(largest_difference(*net_b, *plain_training(stream_b, world, 1, 1)), 1e-12);
}

// Six batches for every rank, all alike, so that local steps are those of the joined batch.
TEST(RollCall, AScopeOfLocalSGDMayOpenAndCloseInsideAPass) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  struct EvenStream : Stream {
    using Stream::Stream;
    void shard(int, int) { mine.assign(6, all[0]); }
  } stream(world);
  Net net = net_of_seed(1);
  torch::optim::SGD sgd(net->parameters(), 0.2);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, stream);
  std::optional<LocalSGD> scope;
  int turns = 0;
  for (const auto& batch : loader) {
    if (++turns == 2) {
      scope.emplace(accelerator, model, LocalSGDOptions{.local_sgd_steps = 2});
    } else if (turns == 5) {
      scope->finish();
    }
    auto window = accelerator.accumulate(model);
    accelerator.backward(mean_loss(model, batch));
    optimizer.step();
    optimizer.zero_grad();
    if (scope) {
      EXPECT_EQ(scope->step(), world > 1 && turns == 3);
    }
  }
  EXPECT_EQ(turns, 6);
  accelerator.end_training();
  EXPECT_LE(largest_difference(
                *net, *plain_steps(std::vector<std::vector<Pair>>(6, {stream.all[0]}), 0.2)),
            1e-12);
}

// Rank r makes r + 1 steps in a pass. The others wait for the last at the end of theirs.
TEST(RollCall, InsideLocalSGDAPassEndsWithTheRanksOwnData) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  Stream stream(world);
  Net net = net_of_seed(1);
  torch::optim::SGD sgd(net->parameters(), 0.2);
  Decay decay(sgd);
  auto [model, optimizer, loader, scheduler] = accelerator.prepare(net, sgd, stream, decay);
  LocalSGD scope(accelerator, model, {.local_sgd_steps = 2});
  for (int epoch = 0; epoch < 2; ++epoch) {
    int turns = 0;
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, batch));
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
      scope.step();
      ++turns;
    }
    EXPECT_EQ(turns, accelerator.process_index() + 1);
    EXPECT_EQ(decay.ticks, (epoch + 1) * world);
    accelerator.wait_for_everyone(); // the ranks are at one place
  }
  scope.finish();
  expect_equal_on_ranks(accelerator, net->parameters());
  accelerator.end_training();
}

// Saved in the middle of a window, where some ranks have no batches left.
TEST(RollCall, ASavedPassGoesOnInMidWindow) {
  const auto folder = state_test::common_folder();
  const auto train = [&](int saved_at, bool resumes) {
    auto accelerator = accelerator_of({.gradient_accumulation_steps = 2});
    const int world = accelerator.num_processes();
    Stream stream(world);
    Net net = net_of_rank(accelerator);
    torch::optim::SGD sgd(net->parameters(), 0.2);
    auto [model, optimizer, loader] = accelerator.prepare(net, sgd, stream);
    int turns = 0;
    if (resumes) {
      accelerator.load_state(folder / "state");
      turns = saved_at;
    }
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, batch));
      optimizer.step();
      optimizer.zero_grad();
      if (++turns == saved_at && !resumes) {
        accelerator.save_state(folder / "state");
        break;
      }
    }
    EXPECT_EQ(turns, resumes ? world : saved_at);
    const Net whole = plain_training(stream, world, 2, 1);
    EXPECT_TRUE(!resumes || largest_difference(*net, *whole) <= 1e-12);
    accelerator.end_training();
  };
  const int world = testing_support::test_world().world_size;
  for (int at = 1; at < world; ++at) {
    train(at, false);
    train(at, true);
  }
}

// The same for a model that takes token ids.
struct TokenStream {
  void shard(int rank, int world) {
    mine = sharded_test::batches(world * (world + 1) / 2);
    mine.erase(mine.begin(), mine.begin() + rank * (rank + 1) / 2);
    mine.resize(static_cast<size_t>(rank) + 1);
  }
  auto begin() const { return mine.begin(); }
  auto end() const { return mine.end(); }
  std::vector<std::pair<Tensor, Tensor>> mine{};
};

// Inside LocalSGD the ranks of a replica ask each other, and the replicas do not.
TEST(RollCall, TheRanksOfAReplicaEndTogetherInsideLocalSGD) {
  using namespace sharded_test;
  const auto world = testing_support::fresh_communicator();
  if (world->world_size() != 4) {
    return;
  }
  AcceleratorOptions options = options_of({.strategy = Strategy::hsdp});
  options.shard_size = 2;
  Accelerator accelerator(options, world);
  Stack stack = make_stack({}, accelerator.process_index());
  torch::optim::SGD sgd(stack->parameters(), 0.1);
  TokenStream rows;
  auto [model, optimizer, loader] = accelerator.prepare(stack, sgd, rows);
  LocalSGD scope(accelerator, model, {.local_sgd_steps = 2});
  for (int epoch = 0; epoch < 2; ++epoch) {
    int turns = 0;
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(loss_of(stack, batch));
      optimizer.step();
      optimizer.zero_grad();
      scope.step();
      ++turns;
    }
    EXPECT_EQ(turns, accelerator.process_index() < 2 ? 2 : 4);
    EXPECT_EQ(scope.steps(), 4 * (epoch + 1));
  }
  scope.finish();
  accelerator.end_training();
}

// All ranks take part in each forward, also with stand-ins.
TEST(RollCall, ShardedModelsTrainAsReplicatedOnes) {
  const auto train = [](Strategy strategy) {
    using namespace sharded_test;
    Accelerator accelerator(options_of({.strategy = strategy}),
                            testing_support::fresh_communicator());
    const int rank = accelerator.process_index();
    Stack stack = make_stack({}, rank);
    torch::optim::SGD sgd(stack->parameters(), 0.1);
    TokenStream rows;
    auto [model, optimizer, loader] = accelerator.prepare(stack, sgd, rows);
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(loss_of(stack, batch));
      optimizer.step();
      optimizer.zero_grad();
    }
    auto parameters = whole_parameters(accelerator, stack);
    accelerator.end_training();
    return parameters;
  };
  const auto plain = train(Strategy::ddp);
  const auto sharded = train(Strategy::fsdp);
  for (size_t p = 0; p < plain.size(); ++p) {
    EXPECT_LE((plain[p] - sharded[p]).abs().max().item<double>(), 1e-10) << p;
  }
}

} // namespace hasten::accelerator_test
