#include "hasten/core/memory.h"

#include <ATen/native/Resize.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/core/memory_rehearsal.h"

namespace hasten {

class MemoryMeter : public testing::Test {
 protected:
  MemoryMeter() {
    install_memory_meter();
    reset_peak_memory();
    before_ = memory_stats();
  }
  int64_t live() const { return memory_stats().live_bytes - before_.live_bytes; }
  int64_t peak() const { return memory_stats().peak_bytes - before_.live_bytes; }

  MemoryStats before_;
};

TEST_F(MemoryMeter, CountsLiveAndPeakBytesExactly) {
  torch::Tensor a = torch::empty({1000}, torch::kFloat);
  EXPECT_EQ(live(), 4000);
  {
    const torch::Tensor b = torch::empty({3, 5}, torch::kDouble);
    EXPECT_EQ(live(), 4120);
  }
  EXPECT_EQ(live(), 4000);
  EXPECT_EQ(peak(), 4120);
  EXPECT_EQ(memory_stats().allocations - before_.allocations, 2);
  a.reset();
  EXPECT_EQ(live(), 0);
  reset_peak_memory();
  EXPECT_EQ(peak(), 0);
}

TEST_F(MemoryMeter, MemoryOfTheAllocatorBeforeIsFreedByItAndNotCounted) {
  {
    const c10::DataPtr old = c10::GetDefaultCPUAllocator()->allocate(4096);
    EXPECT_EQ(live(), 0);
  }
  EXPECT_EQ(live(), 0);
}

TEST_F(MemoryMeter, MemoryIsAlignedAndUsable) {
  for (const int64_t bytes : {1, 63, 64, 65, 4097, 1 << 20}) {
    const torch::Tensor t = torch::full({bytes}, 7, torch::kByte);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(t.data_ptr()) % 64, 0U);
    EXPECT_EQ(t.sum().item<int64_t>(), 7 * bytes);
  }
}

TEST_F(MemoryMeter, EmptyTensorsCostNothing) {
  const torch::Tensor t = torch::empty({0});
  EXPECT_EQ(live(), 0);
  EXPECT_EQ(memory_stats().allocations, before_.allocations);
}

TEST_F(MemoryMeter, FollowsStorageResizes) {
  torch::Tensor t = torch::arange(8, torch::kFloat);
  auto* storage = t.storage().unsafeGetStorageImpl();
  at::native::resize_bytes_cpu(storage, 0);
  EXPECT_EQ(live(), 0);
  at::native::resize_bytes_cpu(storage, 32);
  EXPECT_EQ(live(), 32);
  t.resize_({16});
  t.fill_(1);
  EXPECT_EQ(live(), 64);
  EXPECT_EQ(t.sum().item<float>(), 16);
}

TEST_F(MemoryMeter, CountsEveryThreadAndTheirSimultaneousPeak) {
  constexpr int kThreads = 4;
  std::atomic<int> holding{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 200; ++j) {
        torch::empty({100}, torch::kByte);
      }
      const torch::Tensor held = torch::empty({1000}, torch::kByte);
      ++holding;
      while (holding < kThreads) {
        std::this_thread::yield();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(live(), 0);
  EXPECT_EQ(peak(), kThreads * 1000);
  EXPECT_EQ(memory_stats().allocations - before_.allocations, kThreads * 201);
}

TEST_F(MemoryMeter, FreesOnAnotherThreadAreCounted) {
  torch::Tensor t = torch::empty({512}, torch::kByte);
  std::thread([moved = std::move(t)]() mutable { moved.reset(); }).join();
  EXPECT_EQ(live(), 0);
}

TEST_F(MemoryMeter, CountsWhatBackwardAllocates) {
  const torch::Tensor x = torch::ones({1000}, torch::requires_grad().dtype(torch::kFloat));
  x.mul(2).sum().backward();
  EXPECT_EQ(live(), 8000); // x and its gradient
  EXPECT_GE(peak(), 8000);
}

TEST_F(MemoryMeter, ALimitRefusesWhatWouldExceedItAndNothingElse) {
  const int64_t base = memory_stats().live_bytes;
  {
    const MemoryLimit limit(base + 4000);
    const torch::Tensor fits = torch::empty({1000}, torch::kFloat);
    try {
      torch::empty({1}, torch::kFloat);
      FAIL() << "not refused";
    } catch (const std::exception& error) {
      EXPECT_TRUE(is_out_of_memory(error)) << error.what();
      EXPECT_NE(std::string(error.what()).find("out of memory: 4 bytes"), std::string::npos)
          << error.what();
    }
    EXPECT_EQ(live(), 4000) << "a refusal counts nothing";
    bool refused = false;
    std::thread([&] {
      try {
        torch::empty({1}, torch::kFloat);
      } catch (const c10::OutOfMemoryError&) {
        refused = true;
      }
    }).join();
    EXPECT_TRUE(refused) << "of any thread";
  }
  EXPECT_NO_THROW(torch::empty({5000}, torch::kFloat));
  EXPECT_EQ(live(), 0);
}

TEST_F(MemoryMeter, OfNestedLimitsTheLeastHolds) {
  const int64_t base = memory_stats().live_bytes;
  auto outer = std::make_unique<MemoryLimit>(base + 1000);
  const auto inner = std::make_unique<MemoryLimit>(base + 3000);
  EXPECT_THROW(torch::empty({2000}, torch::kByte), c10::OutOfMemoryError);
  outer.reset();
  EXPECT_NO_THROW(torch::empty({2000}, torch::kByte));
  EXPECT_THROW(torch::empty({3001}, torch::kByte), c10::OutOfMemoryError);
  EXPECT_THROW(MemoryLimit(0), InputError);
}

// A step that fails in forward or backward frees all its memory.
TEST_F(MemoryMeter, AStepThatRanOutOfMemoryLeavesNothingBehind) {
  torch::nn::Sequential net(torch::nn::Linear(64, 64), torch::nn::Tanh(),
                            torch::nn::Linear(64, 64));
  const torch::Tensor x = torch::randn({256, 64});
  const int64_t before = live();
  reset_peak_memory();
  net->forward(x).square().sum().backward();
  const int64_t needed = peak() - before;
  for (const torch::Tensor& p : net->parameters()) {
    p.mutable_grad().reset();
  }
  ASSERT_EQ(live(), before);
  int64_t failures = 0;
  for (int64_t tenths = 1; tenths < 10; ++tenths) {
    const MemoryLimit limit(memory_stats().live_bytes + needed * tenths / 10);
    EXPECT_THROW(net->forward(x).square().sum().backward(), c10::OutOfMemoryError);
    ++failures;
    for (const torch::Tensor& p : net->parameters()) {
      p.mutable_grad().reset();
    }
    EXPECT_EQ(live(), before) << tenths;
  }
  EXPECT_EQ(failures, 9);
}

TEST_F(MemoryMeter, ARehearsalCountsWhatAStepTakesAndTakesNothing) {
  torch::nn::Embedding embedding(50, 64);
  torch::nn::Sequential net(torch::nn::Linear(64, 64), torch::nn::Tanh(),
                            torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})),
                            torch::nn::Linear(64, 64));
  const int64_t before = live();
  const auto step = [&](int64_t rows) {
    net->zero_grad(true);
    embedding->zero_grad(true);
    const int64_t base = memory_stats().live_bytes;
    reset_peak_memory();
    const torch::Tensor ids = torch::ones({rows}, torch::kLong);
    net->forward(embedding->forward(ids)).square().sum().backward();
    return memory_stats().peak_bytes - base;
  };
  int64_t rehearsed = 0;
  {
    const MemoryRehearsal rehearsal;
    EXPECT_TRUE(in_memory_rehearsal());
    EXPECT_EQ(memory_stats().live_bytes, 0);
    rehearsed = step(1024);
    EXPECT_GT(step(int64_t{1} << 36), int64_t{1} << 42) << "more than any machine has";
    const torch::Tensor ones = torch::ones({1000}, torch::kFloat);
    EXPECT_EQ(ones.sum().item<float>(), 0);
    EXPECT_EQ(ones.data_ptr(), nullptr);
    net->zero_grad(true);
    embedding->zero_grad(true);
  }
  EXPECT_FALSE(in_memory_rehearsal());
  EXPECT_EQ(live(), before);
  const int64_t real = step(1024);
  EXPECT_NEAR(static_cast<double>(rehearsed) / static_cast<double>(real), 1, 0.03);
}

TEST(OutOfMemory, IsTorchsAllocatorsToo) {
  try {
    torch::empty({int64_t{1} << 60}, torch::kByte);
    FAIL() << "an exabyte";
  } catch (const std::exception& error) {
    EXPECT_TRUE(is_out_of_memory(error)) << error.what();
  }
  EXPECT_TRUE(is_out_of_memory(std::bad_alloc()));
  EXPECT_FALSE(is_out_of_memory(std::runtime_error("out of memory")));
}

TEST(ResidentMemory, FollowsWhatTheProcessTouches) {
  const int64_t before = resident_bytes();
  EXPECT_GT(before, 10 << 20);
  constexpr int64_t kBytes = 64 << 20;
  {
    const torch::Tensor touched = torch::ones({kBytes}, torch::kByte);
    EXPECT_GE(resident_bytes() - before, kBytes * 9 / 10);
  }
  EXPECT_GE(peak_resident_bytes(), before + kBytes * 9 / 10);
}

} // namespace hasten
