// When buffers are made equal, through the Accelerator: as windows open, in the
// middle of one for evaluation and saving, and who counts.
#include "accelerator/plain_steps.h"
#include "accelerator/state_rig.h"

namespace hasten::accelerator_test {

struct NotedImpl : torch::nn::Module {
  NotedImpl() {
    linear = register_module("linear", torch::nn::Linear(5, 3));
    note = register_buffer("note", torch::zeros({2}));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) { return linear->forward(x); }
  torch::nn::Linear linear{nullptr};
  Tensor note;
};
TORCH_MODULE(Noted);

struct NotedRun {
  explicit NotedRun(
      BufferPolicy policy, int64_t steps = 2, int64_t more_batches = 0)
      : accelerator(accelerator_of(
            {.gradient_accumulation_steps = steps, .buffers = policy})),
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
    const Tensor loss = torch::nn::functional::cross_entropy(
        net->forward(batch.first), batch.second);
    const auto rows = static_cast<double>(batch.second.numel());
    accelerator.backward(loss * rows, rows);
  }
  auto& loader() { return std::get<2>(handles); }

  Accelerator accelerator;
  int world, rank;
  std::vector<Pair> batches;
  Noted net{};
  torch::optim::SGD sgd;
  decltype(std::declval<Accelerator&>().prepare(
      std::declval<Noted&>(),
      std::declval<torch::optim::SGD&>(),
      std::declval<std::vector<Pair>&>())) handles;
};

TEST(Buffers, AreRankZerosFromTheFirstForwardOfAWindow) {
  NotedRun run(BufferPolicy::broadcast);
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

// Ranks 1, 2, ... have a window more: what rank 0 holds is stale, and it waits
// where data ends.
TEST(Buffers, AreThoseOfTheFirstRankThatHasABatch) {
  NotedRun run(BufferPolicy::broadcast, 1);
  const int64_t turns = run.rank == 0 && run.world > 1 ? 1 : 2;
  for (int64_t turn = 0; turn < turns; ++turn) {
    run.write(static_cast<double>(10 * turn + run.rank));
    auto window = run.accelerator.accumulate(run.net);
    EXPECT_EQ(run.note(), run.world == 1 ? 10 * turn : 11 * turn);
    run.backward(run.batches[static_cast<size_t>(turn)]);
  }
  run.accelerator.join_uneven_inputs();
  EXPECT_EQ(run.note(), run.world == 1 ? 10 : 11);
}

TEST(Buffers, AreEqualInAnEvaluationInsideAWindow) {
  NotedRun run(BufferPolicy::average);
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
  NotedRun run(BufferPolicy::average);
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
  NotedRun run(BufferPolicy::average, 1, 1);
  int turn = 0;
  for (const auto& batch : run.loader()) {
    auto window = run.accelerator.accumulate(run.net);
    run.write(run.rank + 1);
    run.backward(batch);
    // In the last turn rank 0 alone has rows.
    EXPECT_DOUBLE_EQ(run.note(), ++turn == 3 ? 1 : (run.world + 1) / 2.0);
  }
  EXPECT_EQ(turn, 3);
}

} // namespace hasten::accelerator_test
