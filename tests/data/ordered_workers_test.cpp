#include "hasten/data/ordered_workers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>

namespace hasten {

using std::chrono::milliseconds;

TEST(OrderedWorkers, KeepTheOrderWhateverTheirNumberAndTheTimeValuesTake) {
  for (const int workers : {1, 2, 5}) {
    OrderedWorkers<int64_t> ahead(
        [](int64_t i) {
          std::this_thread::sleep_for(milliseconds((i * 7) % 5));
          return i * i;
        },
        40, workers, 6);
    for (int64_t i = 0; i < 40; ++i) {
      EXPECT_EQ(ahead.next(), i * i);
    }
    EXPECT_EQ(ahead.next(), std::nullopt);
    EXPECT_EQ(ahead.next(), std::nullopt);
  }
}

TEST(OrderedWorkers, WorkAtOnceAndNoFurtherAheadThanTheirDepth) {
  std::atomic<int> begun{0};
  std::atomic<bool> open{false};
  OrderedWorkers<int64_t> ahead(
      [&](int64_t i) {
        ++begun;
        while (!open) {
          std::this_thread::yield();
        }
        return i;
      },
      50, 3, 4);
  const auto until = std::chrono::steady_clock::now() + milliseconds(5000);
  while (begun < 3 && std::chrono::steady_clock::now() < until) {
    std::this_thread::yield();
  }
  EXPECT_EQ(begun, 3); // three calls at once
  open = true;
  EXPECT_EQ(ahead.next(), 0);
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(begun, 5); // 0 was taken, 1 ... 4 wait
}

TEST(OrderedWorkers, AnExceptionComesAtItsValuesTurnAndIsTheEnd) {
  OrderedWorkers<int64_t> ahead(
      [](int64_t i) -> int64_t {
        if (i == 2) {
          throw std::runtime_error("bad row");
        }
        return i;
      },
      100, 4, 8);
  EXPECT_EQ(ahead.next(), 0);
  EXPECT_EQ(ahead.next(), 1);
  EXPECT_THROW(ahead.next(), std::runtime_error);
  EXPECT_EQ(ahead.next(), std::nullopt);
}

} // namespace hasten
