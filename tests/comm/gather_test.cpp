#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>

#include "hasten/base/error.h"
#include "hasten/comm/communicator.h"
#include "support/communicator.h"
#include "support/on_device.h"

namespace hasten {

using testing_support::fresh_communicator;

TEST(Broadcast, EveryRankGetsTheSourcesValuesInEveryDtype) {
  const auto comm = fresh_communicator();
  for (const auto type : {torch::kFloat, torch::kBFloat16, torch::kBool, torch::kShort,
                          torch::kLong, torch::kComplexFloat}) {
    for (int source = 0; source < comm->world_size(); ++source) {
      torch::Tensor tensor = on_device::tensor({comm->rank() % 2, comm->rank(), 7}).to(type);
      comm->broadcast(tensor, source, "values");
      EXPECT_TRUE(torch::equal(tensor, on_device::tensor({source % 2, source, 7}).to(type)));
    }
  }
  torch::Tensor tensor = on_device::ones({2});
  EXPECT_THROW(comm->broadcast(tensor, comm->world_size(), "x"), InputError);
  EXPECT_THROW(comm->broadcast(tensor.expand({2, 2}), 0, "x"), InputError);
}

TEST(Gather, OneRankGetsEveryRanksTensor) {
  const auto comm = fresh_communicator();
  const int world = comm->world_size();
  for (int root = 0; root < world; ++root) {
    const torch::Tensor mine = on_device::full({3, 2}, 10 + comm->rank());
    torch::Tensor all;
    if (comm->rank() == root) {
      all = on_device::zeros({world, 3, 2}, mine.options());
    }
    comm->gather_async(all, mine, root, "to one").wait();
    for (int rank = 0; comm->rank() == root && rank < world; ++rank) {
      EXPECT_EQ(all[rank].min().item<int>(), 10 + rank);
      EXPECT_EQ(all[rank].max().item<int>(), 10 + rank);
    }
  }
}

TEST(AllGather, RowsComeInRankOrder) {
  const auto comm = fresh_communicator();
  for (const auto type : {torch::kFloat, torch::kBool, torch::kLong}) {
    const torch::Tensor mine =
        on_device::tensor({{comm->rank(), 1}, {0, comm->rank() + 1}}).to(type);
    torch::Tensor all = on_device::zeros({comm->world_size(), 2, 2}, type);
    comm->all_gather_async(all, mine, "rows").wait();
    for (int rank = 0; rank < comm->world_size(); ++rank) {
      EXPECT_TRUE(torch::equal(all[rank], on_device::tensor({{rank, 1}, {0, rank + 1}}).to(type)));
    }
  }
}

TEST(AllGather, OutputsOfAnotherShapeOrDtypeAreRefused) {
  const auto comm = fresh_communicator();
  const torch::Tensor mine = on_device::ones({2});
  const auto gather = [&](torch::Tensor output) {
    comm->all_gather_async(std::move(output), mine, "x").wait();
  };
  EXPECT_THROW(gather(on_device::ones({comm->world_size() * 2})), InputError);
  EXPECT_THROW(gather(on_device::ones({comm->world_size(), 2}, torch::kDouble)), InputError);
}

// Row t of rank f's input: {f, t}.
TEST(AllToAll, EachRankGetsItsRowOfEveryRanks) {
  const auto comm = fresh_communicator();
  const int world = comm->world_size();
  for (const auto type : {torch::kFloat, torch::kBFloat16, torch::kBool, torch::kLong}) {
    torch::Tensor mine = on_device::empty({world, 2}, torch::kLong);
    torch::Tensor wanted = on_device::empty({world, 2}, torch::kLong);
    for (int other = 0; other < world; ++other) {
      mine[other] = on_device::tensor({comm->rank(), other});
      wanted[other] = on_device::tensor({other, comm->rank()});
    }
    mine = mine.to(type);
    const torch::Tensor before = mine.clone();
    torch::Tensor got = on_device::zeros({world, 2}, type);
    Work handle = comm->all_to_all_async(got, mine, "rows");
    handle.wait();
    EXPECT_TRUE(torch::equal(got, wanted.to(type))) << got;
    EXPECT_TRUE(torch::equal(mine, before));
    EXPECT_TRUE(handle.done());
  }
  // Several operations run at the same time, some of them with empty rows.
  std::vector<torch::Tensor> results;
  std::vector<Work> handles;
  for (const int64_t width : {0, 1, 3000}) {
    results.push_back(on_device::zeros({world, width}));
    handles.push_back(comm->all_to_all_async(
        results.back(), on_device::full({world, width}, static_cast<float>(comm->rank())), "many"));
  }
  for (Work& handle : handles) {
    handle.wait();
  }
  for (const torch::Tensor& result : results) {
    EXPECT_TRUE(torch::equal(
        result, on_device::arange(world).to(torch::kFloat).unsqueeze(1).expand_as(result)));
  }
}

TEST(AllToAll, TensorsWithoutARowForEachRankAreRefused) {
  const auto comm = fresh_communicator();
  const int world = comm->world_size();
  const auto exchange = [&](torch::Tensor output, torch::Tensor input) {
    comm->all_to_all_async(std::move(output), std::move(input), "x").wait();
  };
  const auto rows = [](int64_t count) { return on_device::ones({count, 2}); };
  EXPECT_THROW(exchange(rows(world + 1), rows(world + 1)), InputError);
  EXPECT_THROW(exchange(rows(world), rows(world).to(torch::kLong)), InputError);
  EXPECT_THROW(exchange(rows(world), on_device::ones({world, 3})), InputError);
  EXPECT_THROW(exchange(on_device::ones({}), on_device::ones({})), InputError);
  EXPECT_THROW(exchange(rows(world), on_device::ones({world, 4}).slice(1, 0, 4, 2)), InputError);
}

TEST(AllGatherRows, RanksMayHaveDifferentNumbersOfRowsAndNone) {
  const auto comm = fresh_communicator();
  for (const int extra : {0, 1}) { // rank 0 without rows, and with one
    const torch::Tensor mine =
        on_device::full({comm->rank() + extra, 2, 3}, comm->rank(), torch::kLong);
    const torch::Tensor all = comm->all_gather_rows(mine, "ragged");
    std::vector<torch::Tensor> parts;
    for (int rank = 0; rank < comm->world_size(); ++rank) {
      parts.push_back(on_device::full({rank + extra, 2, 3}, rank, torch::kLong));
    }
    EXPECT_TRUE(torch::equal(all, torch::cat(parts)));
  }
  const torch::Tensor mine = on_device::full({4}, comm->rank(), torch::kHalf);
  const torch::Tensor all = comm->all_gather_rows(mine, "equal");
  EXPECT_EQ(all.numel(), 4 * comm->world_size());
  EXPECT_EQ(all[-1].item<int>(), comm->world_size() - 1);
  EXPECT_THROW(comm->all_gather_rows(on_device::tensor(1), "scalar"), InputError);
}

TEST(AllGatherRows, AnotherRowShapeOnOneRankIsAnErrorOnAll) {
  const auto comm = fresh_communicator();
  if (comm->world_size() == 1) {
    return;
  }
  try {
    comm->all_gather_rows(on_device::ones({2, comm->rank() == 1 ? 4 : 3}), "logits");
    ADD_FAILURE() << "no error";
  } catch (const CommunicationError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("all_gather_rows \"logits\": rank 1 has rows of Float [4], "
                        "rank 0 has rows of Float [3]"),
              std::string::npos)
        << text;
  }
}

TEST(GatherJson, ValuesOfAllRanksArriveInOrderAndUnchanged) {
  const auto comm = fresh_communicator();
  for (int i = 0; i < 30; ++i) {
    const auto all = comm->all_gather_object(
        {{"rank", comm->rank()}, {"i", i}, {"loss", std::nan("")}}, "values");
    ASSERT_EQ(all.size(), static_cast<size_t>(comm->world_size()));
    for (int rank = 0; rank < comm->world_size(); ++rank) {
      const nlohmann::json& value = all[static_cast<size_t>(rank)];
      EXPECT_EQ(value.at("rank"), rank);
      EXPECT_EQ(value.at("i"), i);
      EXPECT_TRUE(std::isnan(value.at("loss").get<double>()));
    }
  }
}

TEST(BroadcastJson, EveryRankGetsRankZerosValue) {
  const auto comm = fresh_communicator();
  EXPECT_EQ(comm->broadcast_object({"of", comm->rank()}, "value"), (nlohmann::json{"of", 0}));
}

TEST(Barrier, NobodyLeavesBeforeTheLastHasEntered) {
  const auto comm = fresh_communicator();
  comm->barrier("start");
  const bool last = comm->rank() == comm->world_size() - 1;
  const auto start = std::chrono::steady_clock::now();
  if (last) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  comm->barrier("late");
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(250))
      << (comm->world_size() == 1);
}

// Row t of rank f's input is 100 f + t, and a 16-bit sum would lose the last digits.
TEST(ReduceScatter, EachRankGetsTheSumOfItsRowOfEveryRank) {
  const auto comm = fresh_communicator();
  const int world = comm->world_size();
  for (const auto type : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
    const torch::Tensor rows = (on_device::arange(world, torch::kDouble).unsqueeze(1) +
                                100 * comm->rank() + on_device::zeros({1, 3}, torch::kDouble))
                                   .to(type);
    const auto sum_type = type == torch::kBFloat16 ? torch::kFloat : type;
    torch::Tensor wanted = on_device::zeros({3}, sum_type);
    for (int rank = 0; rank < world; ++rank) {
      wanted += on_device::full({3}, 100.0 * rank + comm->rank()).to(type);
    }
    for (const bool scratch : {false, true}) {
      torch::Tensor sum = on_device::full({3, 1}, -1, sum_type);
      Work handle =
          comm->reduce_scatter_async(sum, rows, "rows", scratch ? rows.clone() : torch::Tensor());
      handle.wait();
      handle.wait(); // a second wait() does not sum again
      EXPECT_TRUE(torch::equal(sum.view({3}), wanted)) << sum << wanted;
    }
  }
}

TEST(ReduceScatter, OutputsOfAnotherSizeAndIntegersAreRefused) {
  const auto comm = fresh_communicator();
  const int world = comm->world_size();
  const auto reduce = [&](torch::Tensor output, torch::Tensor input) {
    comm->reduce_scatter_async(std::move(output), std::move(input), "x").wait();
  };
  EXPECT_THROW(reduce(on_device::ones({3}), on_device::ones({world, 2})), InputError);
  EXPECT_THROW(reduce(on_device::ones({2}), on_device::ones({world + 1, 2})), InputError);
  EXPECT_THROW(
      reduce(on_device::ones({2}, torch::kLong), on_device::ones({world, 2}, torch::kLong)),
      InputError);
}

} // namespace hasten
