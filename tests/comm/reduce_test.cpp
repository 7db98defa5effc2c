#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "hasten/base/error.h"
#include "hasten/comm/communicator.h"
#include "support/communicator.h"
#include "support/on_device.h"

namespace hasten {

using testing_support::fresh_communicator;

// The values of rank r: r + 1, r + 2, …, integers that are exact in every dtype and order.
static torch::Tensor reduced_values(int rank, torch::ScalarType type) {
  return on_device::arange(rank + 1, rank + 4).to(type);
}

static torch::Tensor reduced(int world, torch::ScalarType type, ReduceOp op) {
  std::vector<torch::Tensor> all;
  for (int rank = 0; rank < world; ++rank) {
    all.push_back(reduced_values(rank, torch::kDouble));
  }
  const torch::Tensor stacked = torch::stack(all);
  const torch::Tensor result = op == ReduceOp::SUM       ? stacked.sum(0)
                               : op == ReduceOp::AVG     ? stacked.mean(0)
                               : op == ReduceOp::MAX     ? stacked.amax(0)
                               : op == ReduceOp::PRODUCT ? stacked.prod(0)
                                                         : stacked.amin(0);
  return result.to(type);
}

static const ReduceOp kReduceOps[] = {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MAX, ReduceOp::MIN,
                                      ReduceOp::PRODUCT};

static const torch::ScalarType kReducedTypes[] = {torch::kFloat, torch::kDouble, torch::kHalf,
                                                  torch::kBFloat16, torch::kLong};

TEST(AllReduce, ProductsAreThoseOfAllRanksInEveryDtype) {
  const auto comm = fresh_communicator();
  for (const auto type : kReducedTypes) {
    torch::Tensor tensor = reduced_values(comm->rank(), type);
    comm->all_reduce(tensor, ReduceOp::PRODUCT, "products");
    EXPECT_TRUE(torch::equal(tensor, reduced(comm->world_size(), type, ReduceOp::PRODUCT)))
        << tensor;
  }
}

TEST(Reduce, TheRootAloneGetsTheResultAndTheOthersKeepTheirs) {
  const auto comm = fresh_communicator();
  for (const auto type : kReducedTypes) {
    for (const ReduceOp op : kReduceOps) {
      if (op == ReduceOp::AVG && type == torch::kLong) {
        continue;
      }
      for (int root = 0; root < comm->world_size(); ++root) {
        torch::Tensor tensor = reduced_values(comm->rank(), type);
        comm->reduce_async(tensor, root, op, "to one").wait();
        EXPECT_TRUE(torch::equal(tensor, comm->rank() == root
                                             ? reduced(comm->world_size(), type, op)
                                             : reduced_values(comm->rank(), type)))
            << tensor << " on rank " << comm->rank() << " to " << root;
      }
    }
  }
}

TEST(Reduce, WhatARankWritesAfterTheReturnIsNotSent) {
  const auto comm = fresh_communicator();
  torch::Tensor before = on_device::ones({1 << 22});
  for (const bool behind : {false, true}) { // a transfer that still moves
    for (const int64_t count : {3, 5000, 65'536, 400'000, 1 << 22}) {
      torch::Tensor tensor = on_device::ones({count});
      Work first;
      if (behind) {
        first = comm->all_reduce_async(before, ReduceOp::AVG, "before");
      }
      Work work = comm->reduce_async(tensor, 0, ReduceOp::SUM, "to one");
      if (comm->rank() != 0) {
        tensor.fill_(1000);
      }
      first.wait();
      work.wait();
      EXPECT_TRUE(tensor.eq(comm->rank() == 0 ? comm->world_size() : 1000).all().item<bool>())
          << count << " elements: " << tensor.min().item<float>() << " to "
          << tensor.max().item<float>();
    }
  }
}

TEST(Reduce, WhatCannotBeReducedIsRefused) {
  const auto comm = fresh_communicator();
  const auto reduce = [&](const torch::Tensor& tensor, int root, ReduceOp op) {
    comm->reduce_async(tensor, root, op, "x").wait();
  };
  const torch::Tensor good = on_device::ones({4});
  EXPECT_THROW(reduce(good, comm->world_size(), ReduceOp::SUM), InputError);
  EXPECT_THROW(reduce(good, -1, ReduceOp::SUM), InputError);
  EXPECT_THROW(reduce(good.slice(0, 0, 4, 2), 0, ReduceOp::SUM), InputError);
  EXPECT_THROW(reduce(good.to(torch::kBool), 0, ReduceOp::SUM), InputError);
  EXPECT_THROW(reduce(good.to(torch::kLong), 0, ReduceOp::AVG), InputError);
}

TEST(Scatter, EachRankGetsItsRowOfTheRoots) {
  const auto comm = fresh_communicator();
  const int world = comm->world_size();
  for (const auto type : {torch::kFloat, torch::kBFloat16, torch::kBool}) {
    for (int root = 0; root < world; ++root) {
      torch::Tensor rows;
      if (comm->rank() == root) {
        rows = on_device::arange(world * 6).view({world, 2, 3}).remainder(5).to(type);
      }
      torch::Tensor mine = on_device::zeros({2, 3}, type);
      comm->scatter_async(mine, rows, root, "rows").wait();
      EXPECT_TRUE(torch::equal(
          mine,
          on_device::arange(world * 6).view({world, 2, 3})[comm->rank()].remainder(5).to(type)))
          << mine;
    }
  }
}

TEST(Scatter, RowsThatDoNotFitAreRefusedOnTheRoot) {
  const auto comm = fresh_communicator();
  torch::Tensor mine = on_device::zeros({3});
  const auto scatter = [&](const torch::Tensor& rows, int root) {
    comm->scatter_async(mine, rows, root, "x").wait();
  };
  const int64_t world = comm->world_size();
  EXPECT_THROW(scatter(on_device::ones({world, 4}), comm->rank()), InputError);
  EXPECT_THROW(scatter(on_device::ones({world + 1, 3}), comm->rank()), InputError);
  EXPECT_THROW(scatter(on_device::ones({world, 3}, torch::kDouble), comm->rank()), InputError);
  EXPECT_THROW(scatter({}, comm->rank()), InputError);
  EXPECT_THROW(scatter(on_device::ones({world, 3}), comm->world_size()), InputError);
}

} // namespace hasten
