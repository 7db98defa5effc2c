// The protocol of shared memory, with threads as ranks over plain memory, so that ThreadSanitizer
// sees both sides.
#include "shm/transfer_queue.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <thread>
#include <tuple>

namespace hasten::detail {

using std::chrono::milliseconds;

/// The memory of all ranks of a group.
class Memory {
 public:
  explicit Memory(int world) {
    for (int i = 0; i < world; ++i) {
      blocks_.emplace_back(
          static_cast<char*>(std::aligned_alloc(64, (Stages::kBytes + 63) / 64 * 64)));
      std::memset(blocks_.back().get(), 0, Stages::kBytes);
    }
  }
  std::vector<char*> all() const {
    std::vector<char*> begins;
    for (const auto& block : blocks_) {
      begins.push_back(block.get());
    }
    return begins;
  }

 private:
  struct Free {
    void operator()(char* block) const { std::free(block); }
  };
  std::vector<std::unique_ptr<char, Free>> blocks_{};
};

static std::vector<int> ranks_of(int world) {
  std::vector<int> ranks;
  for (int i = 0; i < world; ++i) {
    ranks.push_back(i);
  }
  return ranks;
}

using AsRank = std::function<void(int rank, TransferQueue& queue)>;

/// Runs `f` as each rank, in a thread each.
static void as_ranks(int world, const AsRank& f) {
  const Memory memory(world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      TransferQueue queue(rank, memory.all(), ranks_of(world));
      f(rank, queue);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

using Item = TransferQueue::Item;
using Kind = Collective::Kind;

/// An operation with its own tensors, whose result is known.
struct Operation {
  Kind kind = Kind::all_reduce;
  size_t count = 0;
  int root = 0;
  int rank = 0;
  int world = 1;
  at::Tensor output{};
  std::shared_ptr<Item> item{};
  std::exception_ptr error{};

  static float value(int rank, size_t row, size_t i) {
    return static_cast<float>(rank + 1) + static_cast<float>(row * 7 + i % 1000);
  }

  Operation(Kind which, size_t n, int from, int of, int ranks)
      : kind(which), count(n), root(from), rank(of), world(ranks) {}

  void start(TransferQueue& queue) {
    const auto columns = static_cast<int64_t>(count);
    const bool moves_rows =
        kind == Kind::all_to_all || kind == Kind::reduce_scatter || kind == Kind::scatter;
    const bool all = kind == Kind::all_gather || kind == Kind::gather || kind == Kind::all_to_all;
    const at::Tensor input = at::empty({moves_rows ? world : 1, columns});
    for (int64_t row = 0; row < input.size(0); ++row) {
      for (size_t i = 0; i < count; ++i) {
        input.mutable_data_ptr<float>()[row * columns + static_cast<int64_t>(i)] =
            value(rank, static_cast<size_t>(row), i);
      }
    }
    const bool in_place =
        kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::broadcast;
    output = in_place ? input : at::full({all ? world : 1, columns}, -1.0);
    item = queue.start(
        {.what = {.kind = kind,
                  .output = output,
                  .input = in_place                          ? at::Tensor()
                           : all && kind != Kind::all_to_all ? input[0]
                                                             : input,
                  .root = root},
         .text = std::to_string(static_cast<int>(kind)) + " of " + std::to_string(count)});
    item->on_end([this](const std::exception_ptr& e) { error = e; });
  }

  float expected(size_t row_of_output, size_t i) const {
    const auto sum = [&](size_t row) {
      float total = 0;
      for (int r = 0; r < world; ++r) {
        total += value(r, row, i);
      }
      return total;
    };
    switch (kind) {
      case Kind::all_reduce:
      case Kind::reduce:
        return sum(0);
      case Kind::reduce_scatter:
        return sum(static_cast<size_t>(rank));
      case Kind::broadcast:
        return value(root, 0, i);
      case Kind::scatter:
        return value(root, static_cast<size_t>(rank), i);
      case Kind::all_gather:
      case Kind::gather:
        return value(static_cast<int>(row_of_output), 0, i);
      case Kind::all_to_all:
        return value(static_cast<int>(row_of_output), static_cast<size_t>(rank), i);
    }
    return 0;
  }

  size_t wrong() const {
    size_t found = error != nullptr;
    const bool gets = (kind != Kind::reduce && kind != Kind::gather) || rank == root;
    for (size_t row = 0; gets && row < static_cast<size_t>(output.size(0)); ++row) {
      for (size_t i = 0; i < count; ++i) {
        found += output.const_data_ptr<float>()[row * count + i] != expected(row, i);
      }
    }
    return found;
  }
};

static void drive_to_end(TransferQueue& queue, const Item& item) {
  for (int i = 0; i < 1200 && !item.has_ended(); ++i) {
    queue.drive(item, milliseconds(50));
  }
  EXPECT_TRUE(item.has_ended());
}

TEST(TransferQueue, EveryCollectiveOfAnySizeEndsWithItsResultHoweverManyAreUnderWay) {
  for (const int world : {2, 3, 4}) {
    as_ranks(world, [&](int rank, TransferQueue& queue) {
      std::mt19937 random(17); // the same operations on all ranks
      const std::vector<size_t> sizes{0, 1, 3, 1000, 9000, 65'536, 70'001, 300'000};
      std::deque<std::unique_ptr<Operation>> under_way;
      for (int i = 0; i < 60; ++i) {
        under_way.push_back(std::make_unique<Operation>(
            static_cast<Kind>(random() % 8), sizes[random() % sizes.size()],
            static_cast<int>(random() % static_cast<unsigned>(world)), rank, world));
        under_way.back()->start(queue);
        const size_t most = random() % 6;
        if (random() % 3 == 0) { // not in their order
          drive_to_end(queue, *under_way.back()->item);
        }
        while (under_way.size() > most) {
          drive_to_end(queue, *under_way.front()->item);
          EXPECT_EQ(under_way.front()->wrong(), 0U)
              << world << " ranks, kind " << static_cast<int>(under_way.front()->kind) << ", "
              << under_way.front()->count;
          under_way.pop_front();
        }
      }
      for (const auto& operation : under_way) {
        drive_to_end(queue, *operation->item);
        EXPECT_EQ(operation->wrong(), 0U);
      }
    });
  }
}

/// A rank's groups of all ranks, each with memory of its own.
struct Groups {
  Groups(int rank, int world, const std::vector<std::unique_ptr<Memory>>& memory) {
    for (const auto& one : memory) {
      queues.push_back(std::make_unique<TransferQueue>(rank, one->all(), ranks_of(world)));
    }
  }
  std::vector<std::unique_ptr<TransferQueue>> queues{};
};

/// Runs `f` as each rank, in a thread each.
static void with_groups(int world, size_t count, const std::function<void(int, Groups&)>& f) {
  std::vector<std::unique_ptr<Memory>> memory;
  for (size_t i = 0; i < count; ++i) {
    memory.push_back(std::make_unique<Memory>(world));
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      Groups groups(rank, world, memory);
      f(rank, groups);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(TransferQueue, RanksMayWaitForTheTransfersOfTwoGroupsInOppositeOrders) {
  for (const int count : {16, 17, 100}) {
    with_groups(2, 2, [&](int rank, Groups& groups) {
      std::vector<std::vector<std::unique_ptr<Operation>>> started(2);
      for (int i = 0; i < 2 * count; ++i) {
        const auto group = static_cast<size_t>(i % 2);
        started[group].push_back(std::make_unique<Operation>(Kind::all_reduce, 3, 0, rank, 2));
        started[group].back()->start(*groups.queues[group]);
      }
      for (const size_t turn : {size_t{0}, size_t{1}}) {
        const size_t group = rank == 0 ? turn : 1 - turn;
        for (const auto& operation : started[group]) {
          drive_to_end(*groups.queues[group], *operation->item);
          EXPECT_EQ(operation->wrong(), 0U);
        }
      }
    });
  }
}

// However many transfers it has started. A ring has room for four of the broadcasts.
TEST(TransferQueue, NobodyWaitsForARankThatComputes) {
  for (const auto& [kind, elements, count] :
       std::vector<std::tuple<Kind, size_t, int>>{{Kind::all_reduce, 3, 16},
                                                  {Kind::all_reduce, 3, 17},
                                                  {Kind::all_reduce, 3, 100},
                                                  {Kind::broadcast, 65'536, 9},
                                                  {Kind::all_reduce, 400'000, 3}}) {
    std::atomic<bool> over{false};
    as_ranks(2,
             [&, kind = kind, elements = elements, count = count](int rank, TransferQueue& queue) {
               std::vector<std::unique_ptr<Operation>> started;
               for (int i = 0; i < count; ++i) {
                 started.push_back(std::make_unique<Operation>(kind, elements, 0, rank, 2));
                 started.back()->start(queue);
               }
               for (int i = 0; rank == 1 && i < 60'000 && !over; ++i) { // it computes
                 std::this_thread::sleep_for(milliseconds(1));
               }
               EXPECT_TRUE(rank == 0 || over) << count << " of " << elements;
               for (const auto& operation : started) {
                 drive_to_end(queue, *operation->item);
                 EXPECT_EQ(operation->wrong(), 0U);
               }
               over = true;
             });
  }
}

TEST(TransferQueue, RandomOperationsOnSeveralGroupsEndWhateverTheOrderOfTheWaits) {
  const char* const rounds_text = std::getenv("HASTEN_RANDOM_ROUNDS");
  const char* const seed_text = std::getenv("HASTEN_RANDOM_SEED");
  const int rounds = rounds_text != nullptr ? std::atoi(rounds_text) : 20;
  const unsigned seed =
      seed_text != nullptr ? static_cast<unsigned>(std::atoll(seed_text)) : std::random_device{}();
  SCOPED_TRACE("HASTEN_RANDOM_SEED=" + std::to_string(seed));
  std::atomic<int> wrong{0};
  for (const int world : {2, 3, 4}) {
    with_groups(world, 3, [&](int rank, Groups& groups) {
      std::mt19937 plans(seed); // the same operations on all ranks
      std::mt19937 own(seed + 1 + static_cast<unsigned>(rank));
      const std::vector<size_t> sizes{0, 1, 3, 3, 1000, 9000, 65'536, 70'001};
      for (int round = 0; round < rounds && wrong == 0; ++round) {
        std::vector<std::pair<size_t, std::unique_ptr<Operation>>> started;
        const bool burst = plans() % 2 == 0; // of small ones
        for (unsigned left = plans() % (burst ? 150 : 60); left > 0; --left) {
          const size_t group = plans() % 3;
          const auto kind = static_cast<Kind>(plans() % 8);
          const size_t size = sizes[plans() % (left % 8 == 0 && !burst ? 8 : 5)];
          started.emplace_back(
              group, std::make_unique<Operation>(
                         kind, size, static_cast<int>(plans() % static_cast<unsigned>(world)), rank,
                         world));
          started.back().second->start(*groups.queues[group]);
          if (own() % 20 == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(own() % 500));
          }
        }
        std::ranges::shuffle(started, own);
        for (const auto& [group, operation] : started) {
          drive_to_end(*groups.queues[group], *operation->item);
          wrong += operation->wrong() > 0 ? 1 : 0;
        }
      }
    });
    EXPECT_EQ(wrong, 0) << world << " ranks";
  }
}

TEST(TransferQueue, MemoryThatARankHasFreedIsUnmappedWithTheNextTransferOfAnySize) {
  as_ranks(3, [&](int rank, TransferQueue& queue) {
    at::Tensor tensor = shared_zeros(100'000, at::kFloat);
    const std::weak_ptr<const SharedMemory> memory =
        find_shared(static_cast<const char*>(tensor.const_data_ptr()))->memory;
    auto item = queue.start({.what = {.output = tensor}});
    drive_to_end(queue, *item);
    EXPECT_TRUE(item->transfer.is_direct());
    item.reset();
    tensor = at::Tensor();
    EXPECT_FALSE(memory.expired()); // its peers have mapped it
    for (int i = 0; i < 2; ++i) { // after the second one all have read the first one
      Operation small(Kind::all_reduce, 3, 0, rank, 3);
      small.start(queue);
      drive_to_end(queue, *small.item);
    }
    EXPECT_TRUE(memory.expired());
  });
}

TEST(TransferQueue, DataInSharedMemoryIsReadInPlaceUnlessARankHasItElsewhere) {
  constexpr std::array kKinds{Kind::all_reduce, Kind::all_gather, Kind::reduce_scatter};
  for (const int world : {2, 3, 4}) {
    as_ranks(world, [&](int rank, TransferQueue& queue) {
      std::mt19937 random(23); // the same on all ranks
      const auto ranks = static_cast<int64_t>(world);
      std::deque<at::Tensor> kept;
      int found_in_place = 0;
      for (int i = 0; i < 12; ++i) {
        const Kind kind = kKinds[random() % 3];
        const auto count = static_cast<int64_t>(70'000 + random() % 500'000);
        const bool elsewhere = random() % 4 == 0 && rank == 1;
        const auto skipped = static_cast<int64_t>(random() % 100) * rank; // not at the beginning
        const int64_t given = kind == Kind::reduce_scatter ? ranks * count : count;
        const at::Tensor all =
            elsewhere ? at::zeros({skipped + given}) : shared_zeros(skipped + given, at::kFloat);
        const at::Tensor input = all.narrow(0, skipped, given);
        input.copy_(at::arange(given) % 1000 + rank);
        const at::Tensor output = kind == Kind::all_reduce   ? input
                                  : kind == Kind::all_gather ? at::zeros({ranks * count})
                                                             : at::zeros({count});
        const bool found =
            find_shared(static_cast<const char*>(input.const_data_ptr())).has_value();
        EXPECT_EQ(found, !elsewhere);
        const auto item = queue.start({.what = {.kind = kind,
                                                .output = output.view({-1, count}),
                                                .input = input.view({-1, count})},
                                       .text = std::to_string(i)});
        Operation after(Kind::all_reduce, 3, 0, rank, world);
        after.start(queue);
        drive_to_end(queue, *item);
        found_in_place += item->transfer.is_direct() ? 1 : 0;
        const at::Tensor own = at::arange(given) % 1000;
        const at::Tensor sum = own * world + world * (world - 1) / 2.0;
        if (kind == Kind::all_gather) {
          for (int64_t r = 0; r < ranks; ++r) {
            EXPECT_TRUE(output.narrow(0, r * count, count).equal(own + r)) << i;
          }
        } else {
          EXPECT_TRUE(output.equal(kind == Kind::all_reduce ? sum : sum.view({ranks, count})[rank]))
              << i;
        }
        drive_to_end(queue, *after.item);
        EXPECT_EQ(after.wrong(), 0U);
        kept.push_back(all); // some memory is used again, some is freed meanwhile
        while (kept.size() > random() % 3) {
          kept.pop_front();
        }
      }
      EXPECT_GT(found_in_place, 3);
      EXPECT_LT(found_in_place, 12);
    });
  }
}

TEST(TransferQueue, ATransferThatProgressesInTheThreadEndsWithoutAnybodyWhoWaits) {
  as_ranks(2, [](int rank, TransferQueue& queue) {
    Operation operation(Kind::all_reduce, 10, 0, rank, 2);
    operation.start(queue);
    queue.progress_in_thread();
    for (int i = 0; i < 10'000 && !operation.item->has_ended(); ++i) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_TRUE(operation.item->has_ended());
    EXPECT_EQ(operation.wrong(), 0U);
  });
}

TEST(TransferQueue, ALargeTransferEndsWithoutAnybodyWhoWaits) {
  as_ranks(3, [](int rank, TransferQueue& queue) {
    Operation operation(Kind::all_reduce, 500'000, 0, rank, 3);
    operation.start(queue);
    for (int i = 0; i < 10'000 && !operation.item->has_ended(); ++i) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_EQ(operation.wrong(), 0U);
  });
}

TEST(TransferQueue, ValuesOfAnyLengthReachAllRanks) {
  as_ranks(3, [](int rank, TransferQueue& queue) {
    for (const size_t size :
         {size_t{0}, size_t{5}, size_t{262'136}, size_t{262'137}, size_t{900'000}}) {
      const auto values = std::make_shared<std::vector<std::string>>(3);
      const auto own = static_cast<size_t>(rank);
      (*values)[own] = std::string(rank == 1 ? size : own, static_cast<char>('a' + rank));
      const auto item = queue.start({.text = "values", .values = values});
      Operation after(Kind::broadcast, 3, 1, rank, 3); // its stages come after all of the values'
      after.start(queue);
      drive_to_end(queue, *after.item);
      EXPECT_TRUE(item->has_ended());
      EXPECT_EQ((*values)[0], "");
      EXPECT_EQ((*values)[1], std::string(size, 'b'));
      EXPECT_EQ((*values)[2], "cc");
      EXPECT_EQ(after.wrong(), 0U);
    }
  });
}

TEST(TransferQueue, RanksInDifferentOperationsAllFailAndNameTwo) {
  for (const size_t other : {size_t{4}, size_t{400'000}}) {
    as_ranks(3, [&](int rank, TransferQueue& queue) {
      Operation operation(Kind::all_reduce, rank == 2 ? other : 3, 0, rank, 3);
      operation.start(queue);
      drive_to_end(queue, *operation.item);
      std::string text;
      try {
        if (operation.error) {
          std::rethrow_exception(operation.error);
        }
      } catch (const RanksDiffer& error) {
        text = error.what();
      }
      EXPECT_EQ(text, "rank 2 has 0 of " + std::to_string(other) + ", rank 0 has 0 of 3");
    });
  }
}

TEST(TransferQueue, AStoppedOneEndsItsTransfersWithAnError) {
  const Memory memory(2);
  TransferQueue queue(0, memory.all(), ranks_of(2));
  Operation small(Kind::all_reduce, 3, 0, 0, 2);
  Operation large(Kind::all_reduce, 400'000, 0, 0, 2);
  small.start(queue);
  large.start(queue);
  queue.stop();
  EXPECT_TRUE(small.error);
  EXPECT_TRUE(large.error);
  EXPECT_THROW(Operation(Kind::broadcast, 1, 0, 0, 2).start(queue), std::runtime_error);
}

} // namespace hasten::detail
