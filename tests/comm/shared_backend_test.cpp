// The back end as a program of c10d uses it, without a Communicator.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/comm/shared_memory_backend.h"
#include "hasten/core/memory.h"
#include "support/communicator.h"
#include "support/world.h"

namespace hasten::shared_backend_test {

using torch::Tensor;
using Tensors = std::vector<Tensor>;

static c10::intrusive_ptr<c10d::Backend> fresh_backend() {
  const World& world = testing_support::test_world();
  auto backend =
      make_shared_memory_backend(c10::make_intrusive<c10d::PrefixStore>(
                                     testing_support::case_name(), testing_support::test_store()),
                                 world.rank, world.world_size);
  testing_support::at_case_end([backend] { backend->barrier()->wait(); });
  return backend;
}

/// Row `row` of what `rank` gives, in values that every dtype has.
static Tensor given(int rank, int row, c10::ScalarType type, int64_t count) {
  return ((torch::arange(count) + 3 * rank + row) % 5).to(type);
}

static const std::vector<int64_t> kCounts{0, 1, 1000, 200'000};

TEST(SharedBackend, EveryCollectiveOfC10dGivesItsResultInEveryDtype) {
  const auto backend = fresh_backend();
  const int size = backend->getSize();
  const int rank = backend->getRank();
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt,
                          at::kShort, at::kChar, at::kByte, at::kBool}) {
    for (const int64_t count : kCounts) {
      SCOPED_TRACE(std::string(c10::toString(type)) + " " + std::to_string(count));
      const auto sum_of = [&](int row) {
        Tensor sum = torch::zeros({count}, at::kLong);
        for (int r = 0; r < size; ++r) {
          sum += given(r, row, type, count).to(at::kLong);
        }
        return sum.to(type);
      };
      Tensors all, rows;
      for (int r = 0; r < size; ++r) {
        all.push_back(given(r, 0, type, count));
        rows.push_back(given(rank, r, type, count));
      }
      const auto empty = [&] { return torch::empty({count}, type); };
      const auto empties = [&] {
        Tensors made;
        for (int r = 0; r < size; ++r) {
          made.push_back(empty());
        }
        return made;
      };
      const int root = size - 1;

      Tensors one{rows[0].clone()};
      backend->allreduce(one)->wait();
      EXPECT_TRUE(torch::equal(one[0], sum_of(0)));
      one = {rows[0].clone()};
      backend->allreduce(one, {.reduceOp = c10d::ReduceOp::MAX})->wait();
      EXPECT_TRUE(
          torch::equal(one[0], count == 0 ? empty() : std::get<0>(torch::stack(all).max(0))));
      one = {rows[0].clone()};
      backend->reduce(one, {.rootRank = root})->wait();
      EXPECT_TRUE(torch::equal(one[0], rank == root ? sum_of(0) : rows[0]));
      one = {rows[0].clone()};
      backend->broadcast(one, {.rootRank = root})->wait();
      EXPECT_TRUE(torch::equal(one[0], all.back()));

      Tensors own{rows[0]};
      std::vector<Tensors> lists{empties()};
      backend->allgather(lists, own)->wait();
      EXPECT_TRUE(torch::equal(torch::stack(lists[0]), torch::stack(all)));
      Tensor joined = torch::empty({size, count}, type);
      backend->_allgather_base(joined, own[0])->wait();
      EXPECT_TRUE(torch::equal(joined, torch::stack(all)));
      lists = rank == root ? std::vector<Tensors>{empties()} : std::vector<Tensors>{};
      backend->gather(lists, own, {.rootRank = root})->wait();
      EXPECT_TRUE(rank != root || torch::equal(torch::stack(lists[0]), torch::stack(all)));
      Tensors got{empty()};
      lists = rank == root ? std::vector<Tensors>{rows} : std::vector<Tensors>{};
      backend->scatter(got, lists, {.rootRank = root})->wait();
      EXPECT_TRUE(torch::equal(got[0], given(root, rank, type, count)));
      lists = {rows};
      got = {empty()};
      backend->reduce_scatter(got, lists)->wait();
      EXPECT_TRUE(torch::equal(got[0], sum_of(rank)));
      Tensor input = torch::stack(rows);
      got[0].zero_();
      backend->_reduce_scatter_base(got[0], input)->wait();
      EXPECT_TRUE(torch::equal(got[0], sum_of(rank)));
      std::vector<int64_t> even;
      backend->alltoall_base(joined, input, even, even)->wait();
      Tensors exchanged = empties();
      backend->alltoall(exchanged, rows)->wait();
      for (int r = 0; r < size; ++r) {
        EXPECT_TRUE(torch::equal(joined[r], given(r, rank, type, count)));
        EXPECT_TRUE(torch::equal(exchanged[static_cast<size_t>(r)], joined[r]));
      }
    }
  }
}

TEST(SharedBackend, CoalescedCallsAndFuturesEndWithAllResults) {
  const auto backend = fresh_backend();
  const int size = backend->getSize();
  Tensors some{torch::ones({3}), torch::full({100'000}, 2.0)};
  const auto work = backend->allreduce_coalesced(some);
  const auto future = work->getFuture(); // ends by itself
  std::atomic<bool> ended_in_callback{false};
  future->addCallback([&](c10::ivalue::Future&) { ended_in_callback = work->isSuccess(); });
  while (!future->completed()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(work->isCompleted());
  EXPECT_TRUE(work->isSuccess());
  work->wait();
  EXPECT_TRUE(ended_in_callback);
  EXPECT_EQ(some[0][2].item<int>(), size);
  EXPECT_EQ(some[1][99'999].item<int>(), 2 * size);
}

TEST(SharedBackend, WhatItCannotMoveIsRefusedBeforeAnythingIsSent) {
  const auto backend = fresh_backend();
  Tensors some{torch::ones({4, 3}).t()};
  EXPECT_THROW(backend->allreduce(some), InputError); // not contiguous
  some = {torch::ones({2}, at::kComplexFloat)};
  EXPECT_THROW(backend->allreduce(some), InputError);
  some = {torch::ones({2}, at::kLong)};
  EXPECT_THROW(backend->allreduce(some, {.reduceOp = c10d::ReduceOp::AVG}), InputError);
  some = {torch::ones({2})};
  EXPECT_THROW(backend->allreduce(some, {.reduceOp = c10d::ReduceOp::BXOR}), InputError);
  EXPECT_THROW(backend->broadcast(some, {.rootRank = backend->getSize()}), InputError);
  Tensor output = torch::empty({backend->getSize(), 3});
  EXPECT_THROW(backend->_allgather_base(output, some[0]), InputError);
  std::vector<int64_t> splits{1, 2}, even;
  EXPECT_THROW(backend->alltoall_base(output, output, splits, even), InputError);
  backend->allreduce(some)->wait();
  EXPECT_EQ(some[0][0].item<int>(), backend->getSize());
}

TEST(SharedBackend, ALateRankEndsAWaitAtItsTimeout) {
  const auto backend = fresh_backend();
  if (backend->getSize() > 1 && backend->getRank() == 0) {
    c10d::BarrierOptions options;
    options.timeout = std::chrono::milliseconds(100);
    const auto late = backend->barrier(options);
    EXPECT_THROW(late->wait(), CommunicationError);
    EXPECT_TRUE(late->wait(std::chrono::seconds(60))); // it goes on
  } else {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    backend->barrier()->wait();
  }
}

TEST(SharedBackend, GroupsOfTheCommunicatorHaveItWhereAllRanksAreOnOneHost) {
  if (detail::ranks_of_host(*testing_support::fresh_communicator()).size() <
      static_cast<size_t>(testing_support::test_world().world_size)) {
    return;
  }
  const auto comm = testing_support::fresh_communicator({.name = "of one host", .backend = "shm"});
  EXPECT_EQ(comm->options().backend, "shm");
  const auto other = comm->duplicate({.name = "over TCP", .backend = "gloo"});
  EXPECT_EQ(other->options().backend, comm->world_size() > 1 ? "shm" : "gloo");
  other->close();
}

TEST(SharedBackend, WhereOneRankLacksTheMemoryTheGroupTalksOverGloo) {
  if (testing_support::test_world().world_size == 1) {
    return;
  }
  const auto comm = Communicator::create(testing_support::fresh_world(), {});
  std::optional<MemoryLimit> limit;
  if (comm->rank() == 0) {
    limit.emplace(memory_stats().live_bytes + (512 << 10));
  }
  const auto other = comm->duplicate({.name = "with little memory"});
  EXPECT_EQ(other->options().backend, "gloo");
  Tensor sum = torch::ones({3});
  other->all_reduce(sum, ReduceOp::SUM, "sum");
  EXPECT_EQ(sum[0].item<int>(), comm->world_size());
  other->close();
  comm->close();
}

TEST(SharedBackend, AllocatedTensorsAreReducedInPlaceAndCountAsTensors) {
  if (testing_support::test_world().world_size == 1) {
    return;
  }
  install_memory_meter();
  const auto backend = fresh_backend();
  const int size = backend->getSize();
  const int rank = backend->getRank();
  ASSERT_TRUE(backend->supportsTensorAlloc(0));
  const auto memory_files = [] {
    std::ifstream maps("/proc/self/maps");
    int found = 0;
    for (std::string line; std::getline(maps, line);) {
      found += line.find("/memfd:hasten") != std::string::npos ? 1 : 0;
    }
    return found;
  };
  const int rings = memory_files();
  constexpr int64_t kCount = 400'000;
  const int64_t before = memory_stats().live_bytes;
  Tensors own{backend->allocateTensor(size * kCount, torch::kFloat)};
  EXPECT_EQ(memory_stats().live_bytes - before, size * kCount * 4);
  Tensors part{own[0].narrow(0, 1000, kCount)};
  for (int i = 1; i < 4; ++i) {
    part[0].fill_(rank + i);
    own[0].narrow(0, 0, 1000).fill_(-1);
    backend->allreduce(part)->wait();
    EXPECT_TRUE(part[0].eq(size * (size - 1) / 2 + size * i).all().item<bool>());
    EXPECT_TRUE(own[0].narrow(0, 0, 1000).eq(-1).all().item<bool>());
  }
  for (int r = 0; r < size; ++r) {
    own[0].narrow(0, r * kCount, kCount).fill_(rank + 10 * r);
  }
  Tensor row = torch::zeros({kCount});
  backend->_reduce_scatter_base(row, own[0], {})->wait();
  EXPECT_TRUE(row.eq(size * (size - 1) / 2 + 10 * rank * size).all().item<bool>());
  Tensor all = torch::zeros({size * kCount});
  part[0].fill_(rank);
  backend->_allgather_base(all, part[0], {})->wait();
  EXPECT_TRUE(all.equal(torch::arange(size).repeat_interleave(kCount).to(torch::kFloat)));
  row = all = part[0] = own[0] = Tensor();
  EXPECT_EQ(memory_stats().live_bytes, before);
  // Memory that has gone is unmapped everywhere with the next large transfer.
  EXPECT_EQ(memory_files(), rings + size - 1);
  part[0] = torch::ones({kCount});
  backend->allreduce(part)->wait();
  EXPECT_EQ(memory_files(), rings);
}

TEST(SharedBackend, AMemoryLimitHoldsForAllocatedTensors) {
  const auto backend = fresh_backend();
  install_memory_meter();
  const MemoryLimit limit(memory_stats().live_bytes + (1 << 20));
  EXPECT_THROW(backend->allocateTensor(1 << 20, torch::kFloat), c10::OutOfMemoryError);
  EXPECT_NO_THROW(backend->allocateTensor(1 << 17, torch::kFloat));
}

} // namespace hasten::shared_backend_test
