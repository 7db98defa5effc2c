#include "hasten/data/prefetch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>

namespace hasten {

using std::chrono::milliseconds;

TEST(Prefetcher, KeepsTheOrderAndReadsNoFurtherThanItsDepth) {
  std::atomic<int> made{0};
  Prefetcher<int> ahead(
      [&]() -> std::optional<int> { return made < 50 ? std::optional<int>(made++) : std::nullopt; },
      3);
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(ahead.next(), i);
    if (i == 10) {
      std::this_thread::sleep_for(milliseconds(50));
      EXPECT_EQ(made, 14); // 0 … 10 were taken, 3 wait
    }
  }
  EXPECT_EQ(ahead.next(), std::nullopt);
  EXPECT_EQ(ahead.next(), std::nullopt);
}

TEST(Prefetcher, RunsWhileTheCallerWorks) {
  std::atomic<int> made{0};
  Prefetcher<int> ahead([&]() -> std::optional<int> { return made++; }, 2);
  const auto until = std::chrono::steady_clock::now() + milliseconds(5000);
  while (made < 2 && std::chrono::steady_clock::now() < until) {
    std::this_thread::yield();
  }
  EXPECT_EQ(made, 2); // although next() was not called
}

TEST(Prefetcher, CarriesAnExceptionOverBehindTheValuesBeforeIt) {
  int made = 0;
  Prefetcher<int> ahead(
      [&]() -> std::optional<int> {
        if (made == 2) {
          throw std::runtime_error("bad row");
        }
        return made++;
      },
      8);
  EXPECT_EQ(ahead.next(), 0);
  EXPECT_EQ(ahead.next(), 1);
  EXPECT_THROW(ahead.next(), std::runtime_error);
  EXPECT_EQ(ahead.next(), std::nullopt);
}

TEST(Prefetcher, StopsInTheMiddleAndLeavesNoThread) {
  std::atomic<int> made{0};
  {
    Prefetcher<int> ahead([&]() -> std::optional<int> { return made++; }, 4);
    EXPECT_EQ(ahead.next(), 0);
  }
  const int then = made;
  EXPECT_LE(then, 6);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(made, then);
}

} // namespace hasten
