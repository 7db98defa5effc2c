// The loop catches the exception of a batch. That batch adds nothing, and no other batch is lost,
// even if it was a rank's last batch. Worlds 1 to 4, fp64.
#include <stdexcept>

#include "accelerator/plain_steps.h"
#include "accelerator/sharded_rig.h"

namespace hasten::accelerator_test {

// How a loop continues: after the try block, or with the next batch.
enum class Caught { goes_on, next };

constexpr int64_t kTurnsARank = 5;

// The last batch throws, on the last rank or on every rank.
struct CaughtRun {
  int64_t k = 3;
  Caught caught = Caught::goes_on;
  bool everywhere = false;

  bool is_bad(int64_t turn, int rank, int world) const {
    return turn == kTurnsARank - 1 && (everywhere || rank == world - 1);
  }
};

Net train_caught(const CaughtRun& run) {
  auto accelerator = accelerator_of({.gradient_accumulation_steps = run.k});
  const int world = accelerator.num_processes();
  auto batches = even_batches(kTurnsARank * world);
  Net net = net_of_rank(accelerator);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.3).momentum(0.9));
  Decay decay(sgd);
  auto [model, optimizer, loader, scheduler] = accelerator.prepare(net, sgd, batches, decay);
  for (int epoch = 0; epoch < 2; ++epoch) {
    int64_t turn = 0;
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      try {
        const Tensor loss = mean_loss(model, batch);
        if (run.is_bad(turn++, accelerator.process_index(), world)) {
          throw std::runtime_error("a bad batch");
        }
        accelerator.backward(loss);
      } catch (const std::runtime_error&) {
        if (run.caught == Caught::next) {
          continue;
        }
      }
      accelerator.clip_grad_norm_(model, 0.2);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
    }
  }
  accelerator.end_training();
  return net;
}

Net plain_caught(const CaughtRun& run, int world) {
  const auto batches = even_batches(kTurnsARank * world);
  Net net = net_of_seed(1);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.3).momentum(0.9));
  Decay decay(sgd);
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::vector<Pair> good;
    for (int64_t turn = 0; turn < kTurnsARank; ++turn) {
      for (int rank = 0; rank < world; ++rank) {
        if (!run.is_bad(turn, rank, world)) {
          good.push_back(batches[static_cast<size_t>(turn * world + rank)]);
        }
      }
      if ((turn + 1) % run.k == 0 || turn + 1 == kTurnsARank) {
        if (good.empty()) {
          continue; // no step
        }
        sgd.zero_grad();
        mean_loss(net, joined(good)).backward();
        torch::nn::utils::clip_grad_norm_(net->parameters(), 0.2);
        sgd.step();
        decay.step();
        good.clear();
      }
    }
  }
  return net;
}

TEST(CaughtBatch, ALastOneLeavesTheWindowsOthersAsTheyAre) {
  for (const auto caught : {Caught::goes_on, Caught::next}) {
    for (const bool everywhere : {false, true}) {
      for (const int64_t k : {1, 3, 4, 5}) { // with 1 and 4 it is alone in its window
        SCOPED_TRACE(testing::Message() << (caught == Caught::next ? "next batch" : "goes on")
                                        << (everywhere ? ", on every rank" : ", on one rank")
                                        << ", accumulation " << k);
        if (k == 5 && caught == Caught::next) {
          continue; // an error, because that rank has not stepped before: see the next test
        }
        const CaughtRun run{k, caught, everywhere};
        const Net net = train_caught(run);
        const Net plain = plain_caught(run, testing_support::test_world().world_size);
        EXPECT_LE(largest_difference(*net, *plain), 1e-12);
      }
    }
  }
}

// The loop does not call anything that would complete or drop the window.
TEST(CaughtBatch, WhereARankHasNeverSteppedItIsAnErrorEverywhere) {
  for (const bool everywhere : {false, true}) {
    expect_says(message_of<std::exception>([&] {
                  train_caught({.k = 5, .caught = Caught::next, .everywhere = everywhere});
                }),
                "the last batch of the data had no backward");
  }
}

// The other ranks wait for this rank in forward or backward. All ranks get an error with its name.
TEST(CaughtBatch, OfAModelThatCommunicatesInForwardItIsAnErrorEverywhere) {
  using namespace sharded_test;
  for (const auto caught : {Caught::goes_on, Caught::next}) {
    Accelerator accelerator(options_of({.strategy = Strategy::fsdp, .accumulation = 2}),
                            testing_support::fresh_communicator());
    const int world = accelerator.num_processes();
    if (world == 1) {
      continue;
    }
    Stack stack = make_stack({}, accelerator.process_index());
    torch::optim::SGD sgd(stack->parameters(), 0.1);
    auto data = sharded_test::batches(4 * world);
    auto [model, optimizer, loader] = accelerator.prepare(stack, sgd, data);
    const std::string said = message_of<std::exception>([&, &model = model, &loader = loader] {
      int turn = 0;
      for (const auto& rows : loader) {
        auto window = accelerator.accumulate(model);
        const Tensor loss = loss_of(stack, rows);
        if (++turn < 4 || accelerator.process_index() + 1 < world) {
          accelerator.backward(loss);
        } else if (caught == Caught::next) {
          continue;
        }
        optimizer.step();
        optimizer.zero_grad();
      }
    });
    expect_says(said, "the last batch of a window had no backward");
  }
}

} // namespace hasten::accelerator_test
