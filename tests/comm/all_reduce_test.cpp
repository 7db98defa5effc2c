#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <thread>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/comm/communicator.h"
#include "support/communicator.h"
#include "support/on_device.h"
#include "support/world.h"

namespace hasten {

using testing_support::fresh_communicator;

// Ranks have 1, 2, … W times the same values, so sums and maxima are exact.
static torch::Tensor ramp_of_rank(int rank, torch::ScalarType type) {
  return (on_device::arange(1, 8, torch::kDouble) * (rank + 1)).to(type);
}

TEST(AllReduce, SumAddsTheTensorsOfAllRanks) {
  const auto comm = fresh_communicator();
  const int world = comm->world_size();
  for (const auto type : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16,
                          torch::kLong, torch::kInt, torch::kChar, torch::kByte}) {
    torch::Tensor tensor = ramp_of_rank(comm->rank(), type);
    comm->all_reduce(tensor, ReduceOp::SUM, c10::toString(type));
    const int total = world * (world + 1) / 2;
    EXPECT_TRUE(torch::equal(tensor, (on_device::arange(1, 8, torch::kDouble) * total).to(type)))
        << tensor;
  }
}

TEST(AllReduce, MaxAndMinTakeTheExtremesOfAllRanks) {
  const auto comm = fresh_communicator();
  for (const auto type : {torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kLong}) {
    torch::Tensor tensor = ramp_of_rank(comm->rank(), type);
    comm->all_reduce(tensor, ReduceOp::MAX, "max");
    EXPECT_TRUE(torch::equal(tensor, ramp_of_rank(comm->world_size() - 1, type)));
    tensor = ramp_of_rank(comm->rank() + 1, type);
    comm->all_reduce(tensor, ReduceOp::MIN, "min");
    EXPECT_TRUE(torch::equal(tensor, ramp_of_rank(1, type)));
  }
}

// The sum is divided once and rounded once.
TEST(AllReduce, MeanIsTheSumDividedByTheWorldSizeToTheLastBit) {
  const auto comm = fresh_communicator();
  for (const auto type : {torch::kFloat, torch::kDouble}) {
    torch::Tensor sum = on_device::rand({1000}, torch::kDouble).to(type);
    torch::Tensor mean = sum.clone();
    comm->all_reduce(sum, ReduceOp::SUM, "sum");
    comm->all_reduce(mean, ReduceOp::AVG, "mean");
    EXPECT_TRUE(torch::equal(mean, sum / comm->world_size()));
  }
}

// 256 + 1 is 256 in bfloat16, whose values there differ by 2.
TEST(AllReduce, SixteenBitSumsAreRoundedOnceAtTheEnd) {
  const auto comm = fresh_communicator({.name = testing_support::case_name(), .sum_in_fp32 = true});
  torch::Tensor tensor = on_device::full({3}, comm->rank() == 0 ? 256 : 1, torch::kBFloat16);
  comm->all_reduce(tensor, ReduceOp::SUM, "bf16");
  EXPECT_TRUE(
      torch::equal(tensor, on_device::full({3}, 255 + comm->world_size()).to(torch::kBFloat16)));
  // The largest half is 65504: the sum overflows it, the mean does not.
  torch::Tensor large = on_device::full({3}, 60000, torch::kHalf);
  comm->all_reduce(large, ReduceOp::AVG, "fp16");
  EXPECT_TRUE(torch::equal(large, on_device::full({3}, 60000, torch::kHalf)));
}

TEST(AllReduce, RanksHoldTheSameBitsAfterwards) {
  const auto comm = fresh_communicator();
  torch::Tensor tensor = on_device::randn({100'003});
  comm->all_reduce(tensor, ReduceOp::SUM, "noise");
  torch::Tensor all = on_device::empty({comm->world_size(), tensor.numel()});
  comm->all_gather_async(all, tensor, "compare").wait();
  for (int i = 0; i < comm->world_size(); ++i) {
    EXPECT_TRUE(torch::equal(all[i], tensor));
  }
}

TEST(AllReduce, ScalarsEmptyTensorsAndParametersWork) {
  const auto comm = fresh_communicator();
  torch::Tensor scalar = on_device::tensor(2.5);
  comm->all_reduce(scalar, ReduceOp::SUM, "scalar");
  EXPECT_EQ(scalar.item<double>(), 2.5 * comm->world_size());
  torch::Tensor empty = on_device::empty({0, 3});
  comm->all_reduce(empty, ReduceOp::AVG, "empty");
  EXPECT_EQ(empty.numel(), 0);
  torch::Tensor parameter =
      on_device::full({4}, comm->rank(), torch::requires_grad().dtype(torch::kHalf));
  comm->all_reduce(parameter, ReduceOp::MAX, "parameter");
  EXPECT_EQ(parameter.sum().item<double>(), 4 * (comm->world_size() - 1));
  EXPECT_TRUE(parameter.is_leaf());
}

TEST(AllReduce, ViewsOfOneBufferAreReducedInPlace) {
  const auto comm = fresh_communicator();
  torch::Tensor buffer = on_device::full({10}, comm->rank() + 1.0);
  comm->all_reduce(buffer.narrow(0, 2, 3), ReduceOp::SUM, "view");
  const double total = comm->world_size() * (comm->world_size() + 1) / 2;
  EXPECT_EQ(buffer[2].item<double>(), total);
  EXPECT_EQ(buffer[4].item<double>(), total);
  EXPECT_EQ(buffer[1].item<double>(), comm->rank() + 1.0);
  EXPECT_EQ(buffer[5].item<double>(), comm->rank() + 1.0);
}

TEST(AllReduce, WrongTensorsAreRefusedBeforeAnythingIsSent) {
  const auto comm = fresh_communicator();
  const auto reduce = [&](torch::Tensor tensor, ReduceOp op) {
    comm->all_reduce(std::move(tensor), op, "wrong");
  };
  EXPECT_THROW(reduce(on_device::ones({3, 4}).t(), ReduceOp::SUM), InputError);
  EXPECT_THROW(reduce(on_device::ones({4}).slice(0, 0, 4, 2), ReduceOp::SUM), InputError);
  EXPECT_THROW(reduce(on_device::ones({3}, torch::kLong), ReduceOp::AVG), InputError);
  EXPECT_THROW(reduce(on_device::ones({3}, torch::kBool), ReduceOp::SUM), InputError);
  EXPECT_THROW(reduce(on_device::ones({3}, torch::kShort), ReduceOp::MAX), InputError);
  EXPECT_THROW(reduce(torch::Tensor(), ReduceOp::SUM), InputError);
  try {
    reduce(on_device::ones({3, 4}).t(), ReduceOp::SUM);
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("sizes=[4, 3]"), std::string::npos) << error.what();
  }
  torch::Tensor tensor = on_device::ones({3});
  comm->all_reduce(tensor, ReduceOp::SUM, "right");
  EXPECT_EQ(tensor[0].item<int>(), comm->world_size());
}

TEST(AllReduce, HandlesMayBeWaitedForInAnyOrderTwiceAndElsewhere) {
  const auto comm = fresh_communicator();
  std::vector<torch::Tensor> tensors;
  std::vector<Work> handles;
  for (int i = 0; i < 20; ++i) {
    tensors.push_back(on_device::full({1 + 50 * i}, double(comm->rank() + i)));
    handles.push_back(
        comm->all_reduce_async(tensors.back(), ReduceOp::AVG, "bucket " + std::to_string(i)));
  }
  std::thread([&] { handles[3].wait(); }).join();
  for (int i = 19; i >= 0; --i) {
    Work& handle = handles[static_cast<size_t>(i)];
    handle.wait();
    handle.wait(); // a second wait() does not divide again
    EXPECT_TRUE(handle.done());
    const double mean = i + (comm->world_size() - 1) / 2.0;
    EXPECT_FLOAT_EQ(tensors[static_cast<size_t>(i)][0].item<float>(), float(mean));
  }
}

TEST(AllReduce, WaitingForALateRankIsCountedOnce) {
  const auto comm = fresh_communicator();
  comm->barrier("start");
  const double before = seconds_waited();
  const auto start = std::chrono::steady_clock::now();
  if (comm->rank() == comm->world_size() - 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  torch::Tensor tensor = on_device::ones({8});
  Work work = comm->all_reduce_async(tensor, ReduceOp::SUM, "late");
  work.wait();
  work.wait(); // has ended
  const double waited = seconds_waited() - before;
  if (comm->rank() < comm->world_size() - 1) {
    EXPECT_GT(waited, 0.15);
  }
  EXPECT_LE(waited,
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

TEST(AllReduce, HandlesWithoutAnOperationAreDone) {
  Work handle;
  EXPECT_FALSE(handle);
  EXPECT_TRUE(handle.done());
  handle.wait();
}

TEST(AllReduce, DoneTurnsTrueByItself) {
  const auto comm = fresh_communicator();
  Work handle = comm->all_reduce_async(on_device::ones({10}), ReduceOp::SUM, "polled");
  for (int i = 0; i < 2000 && !handle.done(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_TRUE(handle.done());
}

} // namespace hasten
