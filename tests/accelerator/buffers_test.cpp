// When the Accelerator synchronises buffers: when a window opens, and for an evaluation or a save
// inside a window. Also: which rank's buffers are used.
#include "accelerator/plain_steps.h"
#include "accelerator/state_rig.h"
#include "support/on_device.h"

namespace hasten::accelerator_test {

struct NotedImpl : torch::nn::Module {
  NotedImpl() {
    linear = register_module("linear", torch::nn::Linear(5, 3));
    note = register_buffer("note", on_device::zeros({2}));
    to(testing_support::run_device(), torch::kDouble);
  }
  Tensor forward(const Tensor& x) { return linear->forward(x); }
  torch::nn::Linear linear{nullptr};
  Tensor note;
};
TORCH_MODULE(Noted);

struct NotedRun {
  explicit NotedRun(BroadcastBuffers policy, int64_t steps = 2, int64_t more_batches = 0)
      : accelerator(
            accelerator_of({.gradient_accumulation_steps = steps, .broadcast_buffers = policy})),
        world(accelerator.num_processes()),
        rank(accelerator.process_index()),
        batches(make_batches(2 * world + more_batches)),
        sgd(net->parameters(), 0.1),
        handles(accelerator.prepare(net, sgd, batches)) {}
  void write(double value) {
    torch::NoGradGuard no_grad;
    net->note.fill_(value);
  }
  double note() { return net->note[1].item<double>(); }
  void backward(const Pair& batch) {
    const Tensor loss =
        torch::nn::functional::cross_entropy(net->forward(batch.first), batch.second);
    const auto rows = static_cast<double>(batch.second.numel());
    accelerator.backward(loss * rows, rows);
  }
  auto& loader() { return std::get<2>(handles); }

  Accelerator accelerator;
  int world, rank;
  std::vector<Pair> batches;
  Noted net{};
  torch::optim::SGD sgd;
  decltype(std::declval<Accelerator&>().prepare(std::declval<Noted&>(),
                                                std::declval<torch::optim::SGD&>(),
                                                std::declval<std::vector<Pair>&>())) handles;
};

TEST(Buffers, AreRankZerosFromTheFirstForwardOfAWindow) {
  NotedRun run(BroadcastBuffers::on);
  int turn = 0;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (const auto& batch : run.loader()) {
      run.write(10 * turn + run.rank); // between windows, and in the middle
      auto window = run.accelerator.accumulate(run.net);
      EXPECT_EQ(run.note(), 10 * turn + (turn % 2 == 0 ? 0 : run.rank));
      run.backward(batch);
      if (turn % 2 == 1) { // the window is complete
        EXPECT_EQ(run.note(), 10 * turn);
      }
      ++turn;
    }
  }
  EXPECT_EQ(turn, 4);
}

// Rank 0 has one batch, the others have two.
struct LaterRanksHaveMore {
  void shard(int rank, int world) { batches = make_batches(rank == 0 && world > 1 ? 1 : 2); }
  int64_t size() const { return std::ssize(batches); }
  auto begin() const { return batches.begin(); }
  auto end() const { return batches.end(); }
  std::vector<Pair> batches = make_batches(2);
};

TEST(Buffers, AreThoseOfTheFirstRankThatHasABatch) {
  NotedRun run(BroadcastBuffers::on, 1);
  LaterRanksHaveMore batches;
  auto [model, optimizer, loader] = run.accelerator.prepare(run.net, run.sgd, batches);
  int64_t turn = 0;
  for (const Pair& batch : loader) {
    run.write(static_cast<double>(10 * turn + run.rank));
    auto window = run.accelerator.accumulate(loader, run.net);
    EXPECT_EQ(run.note(), 10 * turn);
    run.write(static_cast<double>(10 * turn + run.rank));
    run.backward(batch);
    EXPECT_EQ(run.note(), run.world == 1 ? 10 * turn : 11 * turn);
    ++turn;
  }
  EXPECT_EQ(turn, 2);
}

TEST(Buffers, AreEqualInAnEvaluationInsideAWindow) {
  NotedRun run(BroadcastBuffers::average);
  std::vector<Pair> held_out = make_batches(run.world);
  auto evaluation = run.accelerator.prepare(held_out);
  int turn = 0;
  for (const auto& batch : run.loader()) {
    auto window = run.accelerator.accumulate(run.net);
    run.write(run.rank + 1);
    for (const auto& other : evaluation) {
      EXPECT_DOUBLE_EQ(run.note(), (run.world + 1) / 2.0);
      EXPECT_GT(other.second.numel(), 0);
    }
    run.backward(batch);
    ++turn;
  }
  EXPECT_EQ(turn, 2);
}

TEST(Buffers, AreEqualInAStateSavedInsideAWindow) {
  const auto folder = state_test::common_folder();
  NotedRun run(BroadcastBuffers::average);
  int turn = 0;
  for (const auto& batch : run.loader()) {
    auto window = run.accelerator.accumulate(run.net);
    run.backward(batch);
    if (++turn == 1) {
      run.write(run.rank + 1);
      run.accelerator.save_state(folder / "state");
      EXPECT_DOUBLE_EQ(run.note(), (run.world + 1) / 2.0);
    }
  }
  run.write(-1);
  run.accelerator.load_state(folder / "state");
  EXPECT_DOUBLE_EQ(run.note(), (run.world + 1) / 2.0);
}

TEST(Buffers, OfARankWhoseBatchStandsInDoNotCount) {
  NotedRun run(BroadcastBuffers::average, 1, 1);
  int turn = 0;
  for (const auto& batch : run.loader()) {
    auto window = run.accelerator.accumulate(run.net);
    run.write(run.rank + 1);
    run.backward(batch);
    // In the last turn only rank 0 has samples.
    EXPECT_DOUBLE_EQ(run.note(), ++turn == 3 ? 1 : (run.world + 1) / 2.0);
  }
  EXPECT_EQ(turn, 3);
}

struct CountingImpl : torch::nn::Module {
  CountingImpl() {
    linear = register_module("linear", torch::nn::Linear(5, 3));
    steps = register_buffer("steps", on_device::zeros({}, torch::kLong));
    seen = register_buffer("seen", on_device::zeros({8}, torch::kBool));
    to(testing_support::run_device(), torch::kDouble);
    steps.set_data(steps.to(torch::kLong));
    seen.set_data(seen.to(torch::kBool));
  }
  // Rank r counts r + 1 and marks its own place.
  Tensor forward(const Tensor& x, int rank) {
    const torch::NoGradGuard no_grad;
    steps += rank + 1;
    seen[rank].fill_(true);
    const torch::AutoGradMode grad(true);
    return linear->forward(x);
  }
  torch::nn::Linear linear{nullptr};
  Tensor steps, seen;
};
TORCH_MODULE(Counting);

// Integer and boolean buffers only. No buffer has floating-point values.
TEST(Buffers, OfEveryDtypeAreRankZerosUnderEveryStrategy) {
  for (const Strategy strategy :
       {Strategy::ddp, Strategy::zero1, Strategy::zero2, Strategy::fsdp, Strategy::hsdp}) {
    for (const bool static_graph : {false, true}) {
      SCOPED_TRACE(std::string(strategy_name(strategy)) + (static_graph ? ", static graph" : ""));
      const int world = testing_support::test_world().world_size;
      if (strategy == Strategy::hsdp && world == 3) {
        continue; // no halves
      }
      auto accelerator =
          accelerator_of({.static_graph = static_graph,
                          .strategy = strategy,
                          .shard_size = strategy == Strategy::hsdp ? (world + 1) / 2 : 0});
      Counting net;
      torch::optim::SGD sgd(net->parameters(), 0.1);
      std::vector<Pair> batches = make_batches(3 * world);
      auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
      std::vector<Pair> held_out = make_batches(world);
      auto evaluation = accelerator.prepare(held_out);
      int64_t turn = 0;
      for (const auto& batch : loader) {
        const auto expect_rank_zeros = [&] {
          EXPECT_EQ(net->steps.item<int64_t>(), turn);
          EXPECT_EQ(net->seen.sum().item<int64_t>(), turn > 0);
          EXPECT_EQ(net->seen[0].item<bool>(), turn > 0);
        };
        auto window = accelerator.accumulate(net);
        expect_rank_zeros();
        const Tensor loss = torch::nn::functional::cross_entropy(
            net->forward(batch.first, accelerator.process_index()), batch.second);
        ++turn;
        accelerator.backward(loss);
        expect_rank_zeros();
        optimizer.step();
        optimizer.zero_grad();
      }
      EXPECT_EQ(turn, 3);
      accelerator.end_training();
    }
  }
}

TEST(Buffers, OfEveryDtypeAreEqualInAnEvaluationInsideAWindow) {
  auto accelerator = accelerator_of({.gradient_accumulation_steps = 2});
  const int world = accelerator.num_processes();
  Counting net;
  torch::optim::SGD sgd(net->parameters(), 0.1);
  std::vector<Pair> batches = make_batches(2 * world);
  std::vector<Pair> held_out = make_batches(world);
  auto [model, optimizer, loader, evaluation] = accelerator.prepare(net, sgd, batches, held_out);
  int64_t turn = 0;
  for (const auto& batch : loader) {
    auto window = accelerator.accumulate(net);
    const Tensor loss = torch::nn::functional::cross_entropy(
        net->forward(batch.first, accelerator.process_index()), batch.second);
    for (const auto& other : evaluation) {
      EXPECT_GT(other.second.numel(), 0);
      // The first batch's window is still open here. Rank 0 has counted 1.
      EXPECT_EQ(net->steps.item<int64_t>(), turn + 1);
    }
    accelerator.backward(loss);
    ++turn;
  }
  EXPECT_EQ(turn, 2);
  accelerator.end_training();
}

} // namespace hasten::accelerator_test
