// Every rank finds the same size, and attempts leave no memory or state. Worlds 1 to 4.
#include "hasten/accelerator/find_batch_size.h"

#include <c10/util/Exception.h>

#include <new>

#include "accelerator/plain_steps.h"
#include "hasten/core/memory.h"
#include "support/on_device.h"

namespace hasten::accelerator_test {

// One forward and backward of a net with wide activations.
struct Attempts {
  Attempts() {
    install_memory_meter();
    net = torch::nn::Sequential(torch::nn::Linear(16, 512), torch::nn::Tanh(),
                                torch::nn::Linear(512, 1));
    on_device::moved(net);
  }
  void operator()(int64_t rows) {
    tried.push_back(rows);
    for (const Tensor& p : net->parameters()) {
      p.mutable_grad().reset();
    }
    reset_peak_memory(testing_support::run_device());
    net->forward(on_device::ones({rows, 16})).sum().backward();
    peaks.push_back(memory_stats(testing_support::run_device()).peak_bytes);
    for (const Tensor& p : net->parameters()) {
      p.mutable_grad().reset();
    }
  }
  int64_t needed(int64_t rows) {
    Attempts other;
    const int64_t before = memory_stats(testing_support::run_device()).live_bytes;
    other(rows);
    return other.peaks.back() - before;
  }
  torch::nn::Sequential net{nullptr};
  std::vector<int64_t> tried{};
  std::vector<int64_t> peaks{}; // of the attempts that fitted
};

TEST(FindBatchSize, HalvesUntilAStepFitsAndLeavesNothingBehind) {
  auto accelerator = accelerator_of();
  Attempts attempts;
  const int64_t room = attempts.needed(16);
  attempts.tried.clear();
  const int64_t before = memory_stats(testing_support::run_device()).live_bytes;
  const int64_t size = find_executable_batch_size(
      std::ref(attempts), {.starting_batch_size = 100, .memory_limit_bytes = before + room},
      &accelerator);
  EXPECT_EQ(size, 12);
  EXPECT_EQ(attempts.tried, (std::vector<int64_t>{100, 50, 25, 12}));
  EXPECT_EQ(memory_stats(testing_support::run_device()).live_bytes, before);
  EXPECT_LE(attempts.peaks.back(), before + room);
  accelerator.end_training();
}

TEST(FindBatchSize, OneRanksShortageLowersAll) {
  auto accelerator = accelerator_of();
  const bool last = accelerator.is_last_process();
  std::vector<int64_t> tried;
  const int64_t size = find_executable_batch_size(
      [&](int64_t rows) {
        tried.push_back(rows);
        if (rows == 32 && accelerator.is_main_process()) {
          throw std::bad_alloc();
        }
        if (rows > 4 && last) {
          on_device::empty({int64_t{1} << 60}, torch::kByte);
        }
      },
      {.starting_batch_size = 32}, &accelerator);
  EXPECT_EQ(size, 4);
  EXPECT_EQ(tried, (std::vector<int64_t>{32, 16, 8, 4})) << "on every rank";
  accelerator.end_training();
}

TEST(FindBatchSize, OnlyDivisorsOfTheEffectiveBatchAreTried) {
  std::vector<int64_t> tried;
  const auto fits = [&](int64_t most) {
    tried.clear();
    return find_executable_batch_size(
        [&](int64_t rows) {
          tried.push_back(rows);
          if (rows > most) {
            throw std::bad_alloc();
          }
        },
        {.starting_batch_size = 30, .effective_batch_size = 60});
  };
  EXPECT_EQ(fits(30), 30);
  EXPECT_EQ(fits(7), 6); // 30, 15, 7 is no divisor of 60
  EXPECT_EQ(tried, (std::vector<int64_t>{30, 15, 6}));
  EXPECT_EQ(fits(1), 1);
  EXPECT_EQ(tried, (std::vector<int64_t>{30, 15, 6, 3, 1}));
}

TEST(FindBatchSize, WhereNotEvenOneRowFitsTheRankIsNamed) {
  auto accelerator = accelerator_of();
  const int culprit = accelerator.num_processes() - 1;
  const auto find = [&] {
    find_executable_batch_size(
        [&](int64_t) {
          if (accelerator.process_index() == culprit) {
            throw std::bad_alloc();
          }
        },
        {.starting_batch_size = 2}, &accelerator);
  };
  const std::string text = message_of(find);
  expect_says(text, "no batch size fits into memory, not even 1 sample");
  if (culprit > 0) {
    expect_says(text, "rank " + std::to_string(culprit) + ": std::bad_alloc");
  }
  accelerator.end_training();
}

TEST(FindBatchSize, OtherErrorsComeOutAndReachThePeers) {
  auto accelerator = accelerator_of();
  const int culprit = accelerator.num_processes() - 1;
  try {
    find_executable_batch_size(
        [&](int64_t) {
          if (accelerator.process_index() == culprit) {
            throw std::runtime_error("row 7 is bad");
          }
        },
        {}, &accelerator);
    FAIL() << "found";
  } catch (const std::runtime_error& error) {
    expect_says(error.what(), "row 7 is bad");
    EXPECT_EQ(dynamic_cast<const CommunicationError*>(&error) == nullptr,
              accelerator.process_index() == culprit);
  }
  expect_says(
      message_of([] { find_executable_batch_size([](int64_t) {}, {.starting_batch_size = 0}); }),
      "starting_batch_size=0. Expected 1 or more");
}

TEST(FindBatchSize, AccumulationMayBeSetBetweenWindows) {
  auto accelerator = accelerator_of({.gradient_accumulation_steps = 1});
  const int world = accelerator.num_processes();
  auto batches = even_batches(6 * world);
  Net net = net_of_rank(accelerator);
  torch::optim::SGD own(net->parameters(), 0.1);
  auto [model, optimizer, loader] = accelerator.prepare(net, own, batches);
  std::vector<std::vector<Pair>> steps(4);
  for (const int64_t turn : {0, 1, 2, 3, 4, 5}) {
    for (const Pair& batch : global_batch_of(batches, world, turn)) {
      steps[static_cast<size_t>(turn < 2 ? turn : turn / 2 + 1)].push_back(batch);
    }
  }
  int64_t turn = 0;
  for (const auto& batch : loader) {
    {
      auto window = accelerator.accumulate(model);
      if (turn == 2) {
        expect_says(message_of([&] { accelerator.set_gradient_accumulation_steps(3); }),
                    "steps=3 inside a window");
      }
      accelerator.backward(mean_loss(model, batch));
      optimizer.step();
      optimizer.zero_grad();
    }
    if (++turn == 2) {
      accelerator.set_gradient_accumulation_steps(2);
    } else if (turn == 3) {
      EXPECT_THROW(accelerator.set_gradient_accumulation_steps(3), InputError);
    }
  }
  accelerator.end_training();
  EXPECT_EQ(accelerator.options().gradient_accumulation_steps, 2);
  EXPECT_LE(largest_difference(*net, *plain_steps(steps, 0.1)), 1e-12);
}

// A rank that runs out of memory in a backward leaves no rank waiting.
TEST(FindBatchSize, AnAttemptMayBeABackwardUnderNoSync) {
  auto accelerator = accelerator_of();
  const bool last = accelerator.process_index() + 1 == accelerator.num_processes();
  Net net = net_of_rank(accelerator);
  auto model = accelerator.prepare(net);
  const int64_t size = find_executable_batch_size(
      [&, &model = model](int64_t rows) {
        auto quiet = accelerator.no_sync(model);
        Tensor out = net->forward(on_device::ones({rows, 5}, torch::kDouble));
        out.register_hook([&](const Tensor&) {
          if (last && rows > 3) {
            throw std::bad_alloc();
          }
        });
        accelerator.backward(out.sum());
        for (const Tensor& parameter : net->parameters()) {
          parameter.mutable_grad().reset();
        }
      },
      {.starting_batch_size = 8}, &accelerator);
  EXPECT_EQ(size, 2);
  accelerator.backward(net->forward(on_device::ones({2, 5}, torch::kDouble)).sum());
  accelerator.end_training();
}

} // namespace hasten::accelerator_test
