#include "hasten/data/loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>

#include "hasten/base/error.h"
#include "hasten/core/random.h"

namespace hasten {

// Samples of given lengths. A batch has the sample indices as "row" [B].
struct LengthsDataset : Dataset {
  std::vector<int64_t> lengths{};
  int64_t size() const override { return static_cast<int64_t>(lengths.size()); }
  int64_t length(int64_t index) const override { return lengths[index]; }
  Batch collate(const std::vector<int64_t>& indices) const override {
    return {.tensors = {{"row", at::tensor(at::IntArrayRef(indices))}}, .indices = indices};
  }
};

// Lognormal lengths like those of reviews: median 60 tokens, cut at 256.
LengthsDataset lognormal_lengths(int64_t rows) {
  LengthsDataset dataset;
  OrderRng rng(7, 0);
  const auto uniform = [&] { return (rng.below(1 << 30) + 1) / 1073741825.0; };
  for (int64_t i = 0; i < rows; ++i) {
    const double normal =
        std::sqrt(-2 * std::log(uniform())) * std::cos(2 * std::numbers::pi * uniform());
    dataset.lengths.push_back(
        std::clamp<int64_t>(std::llround(std::exp(std::log(60.0) + 0.7 * normal)), 3, 256));
  }
  return dataset;
}

using Batches = std::vector<std::vector<int64_t>>;

std::vector<Batches> batches_of_ranks(const Dataset& dataset, LoaderOptions options, int epoch,
                                      int world_size) {
  std::vector<Batches> all;
  for (int rank = 0; rank < world_size; ++rank) {
    all.push_back(rank_batches(dataset, options, epoch, rank, world_size));
  }
  return all;
}

int64_t longest_of(const LengthsDataset& dataset, const std::vector<int64_t>& batch) {
  int64_t longest = 0;
  for (const int64_t row : batch) {
    longest = std::max(longest, dataset.lengths[row]);
  }
  return longest;
}

double padding_waste(const LengthsDataset& dataset, LoaderOptions options) {
  double real = 0;
  double padded = 0;
  for (const auto& batches : batches_of_ranks(dataset, options, 0, 2)) {
    for (const auto& batch : batches) {
      padded +=
          static_cast<double>(longest_of(dataset, batch) * static_cast<int64_t>(batch.size()));
      for (const int64_t row : batch) {
        real += static_cast<double>(dataset.lengths[row]);
      }
    }
  }
  return 1 - real / padded;
}

TEST(DataLoader, EveryRowOccursOnceOverAllRanks) {
  for (const int64_t rows : {0, 1, 3, 8, 97, 256}) {
    const auto dataset = lognormal_lengths(rows);
    for (const int world_size : {1, 2, 3, 4}) {
      for (const int kind : {0, 1, 2, 3}) {
        const LoaderOptions options{
            .batch_size = 4, .shuffle = (kind & 1) != 0, .group_by_length = (kind & 2) != 0};
        const auto ranks = batches_of_ranks(dataset, options, 1, world_size);
        std::multiset<int64_t> seen;
        for (const auto& batches : ranks) {
          ASSERT_EQ(batches.size(), ranks[0].size());
          for (size_t i = 0; i < batches.size(); ++i) {
            if (i + 1 < batches.size()) {
              ASSERT_EQ(batches[i].size(), 4u);
            }
            seen.insert(batches[i].begin(), batches[i].end());
          }
        }
        std::multiset<int64_t> expected;
        for (int64_t row = 0; row < rows; ++row) {
          expected.insert(row);
        }
        EXPECT_EQ(seen, expected) << rows << " rows on " << world_size;
      }
    }
  }
}

TEST(DataLoader, GlobalBatchesDoNotDependOnTheWorld) {
  const auto dataset = lognormal_lengths(203);
  for (const bool group : {false, true}) {
    const auto one = rank_batches(dataset, {.batch_size = 12, .group_by_length = group}, 3, 0, 1);
    for (const int world_size : {2, 3, 4}) {
      const auto ranks = batches_of_ranks(
          dataset, {.batch_size = 12 / world_size, .group_by_length = group}, 3, world_size);
      for (size_t i = 0; i < one.size(); ++i) {
        std::multiset<int64_t> joined;
        for (const auto& batches : ranks) {
          joined.insert(batches[i].begin(), batches[i].end());
        }
        EXPECT_EQ(joined, std::multiset<int64_t>(one[i].begin(), one[i].end()));
      }
    }
  }
}

TEST(DataLoader, OrderFollowsSeedAndEpochAlone) {
  const auto dataset = lognormal_lengths(300);
  const auto order = [&](uint64_t seed, uint64_t epoch) {
    return rank_batches(dataset, {.seed = seed}, epoch, 1, 2);
  };
  EXPECT_EQ(order(1, 0), order(1, 0));
  EXPECT_NE(order(1, 0), order(1, 1));
  EXPECT_NE(order(1, 0), order(2, 0));
}

TEST(DataLoader, GroupingByLengthLeavesLittlePadding) {
  const auto dataset = lognormal_lengths(3000);
  EXPECT_GT(padding_waste(dataset, {.batch_size = 16, .group_by_length = false}), 0.4);
  EXPECT_LT(padding_waste(dataset, {.batch_size = 16}), 0.1);
  EXPECT_LT(padding_waste(dataset, {.batch_size = 16, .shuffle = false}), 0.02);
}

TEST(DataLoader, TheLongestRowIsInTheFirstBatch) {
  for (int epoch = 0; epoch < 20; ++epoch) {
    auto dataset = lognormal_lengths(101);
    dataset.lengths[epoch] = 1000;
    const auto ranks = batches_of_ranks(dataset, {.batch_size = 5}, epoch, 2);
    EXPECT_EQ(std::max(longest_of(dataset, ranks[0][0]), longest_of(dataset, ranks[1][0])), 1000);
  }
}

TEST(DataLoader, BatchesOfOneEpochAreNotSortedByLength) {
  const auto dataset = lognormal_lengths(2000);
  const auto batches = rank_batches(dataset, {.batch_size = 10}, 0, 0, 1);
  int64_t longer = 0;
  for (size_t i = 2; i < batches.size(); ++i) {
    longer += longest_of(dataset, batches[i]) > longest_of(dataset, batches[i - 1]);
  }
  EXPECT_GT(longer, 60);
  EXPECT_LT(longer, 140);
}

TEST(DataLoader, RanksOfOneStepHaveSimilarWork) {
  const auto dataset = lognormal_lengths(1600);
  const auto ranks = batches_of_ranks(dataset, {.batch_size = 8}, 0, 4);
  std::vector<double> tokens(4);
  for (size_t step = 0; step < ranks[0].size(); ++step) {
    double least = 1e9;
    double most = 0;
    for (int rank = 0; rank < 4; ++rank) {
      double sum = 0;
      for (const int64_t row : ranks[rank][step]) {
        sum += static_cast<double>(dataset.lengths[row]);
      }
      tokens[rank] += sum;
      least = std::min(least, sum);
      most = std::max(most, sum);
    }
    EXPECT_LT(most, 1.25 * least + 20) << "step " << step;
  }
  EXPECT_LT(*std::max_element(tokens.begin(), tokens.end()),
            1.01 * *std::min_element(tokens.begin(), tokens.end()));
}

TEST(DataLoader, DropLastLeavesOutOtherRowsEachEpoch) {
  const auto dataset = lognormal_lengths(100);
  const LoaderOptions options{.batch_size = 8, .drop_last = true};
  std::set<int64_t> dropped;
  for (int epoch = 0; epoch < 50; ++epoch) {
    std::set<int64_t> seen;
    for (const auto& batches : batches_of_ranks(dataset, options, epoch, 3)) {
      EXPECT_EQ(batches.size(), 4u);
      for (const auto& batch : batches) {
        EXPECT_EQ(batch.size(), 8u);
        seen.insert(batch.begin(), batch.end());
      }
    }
    EXPECT_EQ(seen.size(), 96u);
    for (int64_t row = 0; row < 100; ++row) {
      if (seen.count(row) == 0) {
        dropped.insert(row);
      }
    }
  }
  EXPECT_GT(dropped.size(), 60u);
}

TEST(DataLoader, WithoutShuffleAndGroupingTurnsGoRound) {
  const auto dataset = lognormal_lengths(5);
  const LoaderOptions options{.batch_size = 2, .shuffle = false, .group_by_length = false};
  EXPECT_EQ(rank_batches(dataset, options, 0, 0, 2), (Batches{{0, 2}, {4}}));
  EXPECT_EQ(rank_batches(dataset, options, 0, 1, 2), (Batches{{1, 3}, {}}));
}

TEST(DataLoader, IterationGivesTheBatchesOfItsRankAndEpoch) {
  auto dataset = std::make_shared<LengthsDataset>(lognormal_lengths(21));
  DataLoader loader(dataset, {.batch_size = 4});
  loader.shard(1, 2);
  loader.set_epoch(5);
  Batches seen;
  for (const Batch& batch : loader) {
    seen.push_back(batch.indices);
    EXPECT_EQ(batch["row"].size(0), rows(batch));
  }
  EXPECT_EQ(seen, rank_batches(*dataset, {.batch_size = 4}, 5, 1, 2));
  EXPECT_EQ(static_cast<int64_t>(seen.size()), loader.size());
  EXPECT_EQ(loader.size(), 3);
}

TEST(DataLoader, WrongArgumentsAreNamed) {
  const auto dataset = lognormal_lengths(5);
  EXPECT_THROW(rank_batches(dataset, {.batch_size = 0}, 0, 0, 1), InputError);
  EXPECT_THROW(rank_batches(dataset, {}, 0, 2, 2), InputError);
  EXPECT_THROW(DataLoader(nullptr, {}), InputError);
}

TEST(Batch, AMissingTensorIsAnErrorThatListsThoseThereAre) {
  const Batch batch{.tensors = {{"labels", at::zeros({1})}}, .indices = {0}};
  try {
    batch["label"];
    FAIL();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("one of: labels"), std::string::npos);
  }
}

TEST(DataLoader, TheCursorOfAResumedEpochCountsFromTheEpochsBeginning) {
  const auto dataset = std::make_shared<LengthsDataset>(lognormal_lengths(19));
  DataLoader loader(dataset, {.batch_size = 4});
  loader.set_cursor(8);
  std::vector<int64_t> cursors;
  for (auto batch = loader.begin(); batch != loader.end(); ++batch) {
    cursors.push_back(loader.cursor());
  }
  EXPECT_EQ(cursors, (std::vector<int64_t>{12, 16, 19}));
}

TEST(DataLoader, WorkersGiveTheSameBatchesInTheSameOrderAndPlaces) {
  const auto dataset = std::make_shared<LengthsDataset>(lognormal_lengths(103));
  using Place = std::pair<std::vector<int64_t>, int64_t>;
  const auto epoch = [&](int64_t workers, int64_t start) {
    DataLoader loader(dataset, {.batch_size = 4, .num_workers = workers, .prefetch_factor = 3});
    loader.set_epoch(1);
    loader.set_cursor(start);
    std::vector<Place> places;
    for (auto batch = loader.begin(); batch != loader.end(); ++batch) {
      places.emplace_back(batch->indices, loader.cursor());
    }
    return places;
  };
  for (const int64_t start : {0, 40}) {
    const auto expected = epoch(0, start);
    for (const int64_t workers : {1, 4}) {
      EXPECT_EQ(epoch(workers, start), expected) << workers;
    }
  }
  DataLoader left(dataset, {.batch_size = 4, .num_workers = 2});
  for (const Batch& batch : left) {
    EXPECT_EQ(batch.rows(), 4);
    break; // the workers end with the iterator
  }
  EXPECT_THROW(DataLoader(dataset, {.num_workers = -1}), InputError);
  EXPECT_THROW(DataLoader(dataset, {.prefetch_factor = 0}), InputError);
}

} // namespace hasten
