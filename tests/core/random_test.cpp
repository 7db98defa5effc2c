#include "hasten/core/random.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace hasten {

// Runs must be reproducible on other machines and in later versions, so these values must never
// change. They are XXH64 of the name, 0, and three little-endian words.
TEST(Random, StreamSeedsAreTheSameOnEveryMachineAndInEveryVersion) {
  EXPECT_EQ(stream_seed("init", 42), 13338146122554366008ULL);
  EXPECT_EQ(stream_seed("order", 42, 3), 7561155688655681465ULL);
  EXPECT_EQ(stream_seed("dropout", 42, 1), 10745573764851449571ULL);
  EXPECT_EQ(stream_seed("worker", 1, 2, 3), 8898658726996395166ULL);
}

TEST(Random, StreamSeedsDifferInNameAndInEveryCoordinate) {
  std::vector<uint64_t> seeds;
  for (const char* name : {"init", "order", "orde", ""}) {
    for (uint64_t i = 0; i < 3; ++i) {
      for (uint64_t j = 0; j < 3; ++j) {
        for (uint64_t k = 0; k < 3; ++k) {
          seeds.push_back(stream_seed(name, i, j, k));
        }
      }
    }
  }
  std::sort(seeds.begin(), seeds.end());
  EXPECT_EQ(std::unique(seeds.begin(), seeds.end()), seeds.end());
}

TEST(Random, SetSeedMakesEqualWeightsWhateverWasDrawnBefore) {
  set_seed(7);
  const torch::nn::Linear first(5, 3);
  torch::rand(11);
  set_seed(7);
  const torch::nn::Linear second(5, 3);
  EXPECT_TRUE(torch::equal(first->weight, second->weight));
  set_seed(8);
  const torch::nn::Linear third(5, 3);
  EXPECT_FALSE(torch::equal(first->weight, third->weight));
}

TEST(Random, DropoutDiffersByRankAndIsRepeatable) {
  const torch::Tensor ones = torch::ones(256);
  const auto mask = [&](int rank) {
    seed_dropout(7, rank);
    return torch::dropout(ones, 0.5, true);
  };
  EXPECT_TRUE(torch::equal(mask(0), mask(0)));
  EXPECT_FALSE(torch::equal(mask(0), mask(1)));
  set_seed(7);
  EXPECT_FALSE(torch::equal(torch::dropout(ones, 0.5, true), mask(0)));
}

TEST(OrderRng, ShufflesAreTheSameOnEveryMachine) {
  std::vector<int> order(10);
  std::iota(order.begin(), order.end(), 0);
  OrderRng rng(42, 3);
  rng.shuffle(order.data(), order.size());
  EXPECT_EQ(order, (std::vector<int>{0, 4, 7, 9, 3, 1, 8, 5, 6, 2}));
  EXPECT_EQ(rng.next(), 12829723619009552442ULL);
}

TEST(OrderRng, EpochsHaveDifferentOrders) {
  EXPECT_NE(OrderRng(1, 0).next(), OrderRng(1, 1).next());
  EXPECT_NE(OrderRng(1, 0).next(), OrderRng(2, 0).next());
}

// Chi-squared over the cells. A correct generator fails with a probability of 1e-6.
TEST(OrderRng, EveryValueBelowTheBoundIsEquallyLikely) {
  OrderRng rng(5, 0);
  constexpr int kCells = 7, kDraws = 70'000;
  std::vector<int> counts(kCells);
  for (int i = 0; i < kDraws; ++i) {
    ++counts[rng.below(kCells)];
  }
  double chi_squared = 0;
  for (const int count : counts) {
    const double off = count - double(kDraws) / kCells;
    chi_squared += off * off / (double(kDraws) / kCells);
  }
  EXPECT_LT(chi_squared, 38.3); // 6 degrees of freedom
}

// A plain remainder would return the lower half twice as often.
TEST(OrderRng, HugeBoundsHaveNoModuloBias) {
  OrderRng rng(5, 1);
  const uint64_t bound = 3ULL << 62; // 3/4 of the range
  int low = 0;
  for (int i = 0; i < 3000; ++i) {
    low += rng.below(bound) < bound / 3;
  }
  EXPECT_NEAR(low, 1000, 130); // five standard deviations
}

TEST(OrderRng, EveryPermutationIsEquallyLikely) {
  std::vector<int> counts(27);
  OrderRng rng(9, 0);
  for (int i = 0; i < 6000; ++i) {
    int order[] = {0, 1, 2};
    rng.shuffle(order, 3);
    ++counts[static_cast<size_t>(9 * order[0] + 3 * order[1] + order[2])];
  }
  for (const int code : {5, 7, 11, 15, 19, 21}) {
    EXPECT_NEAR(counts[static_cast<size_t>(code)], 1000, 150);
  }
}

} // namespace hasten
