// The averager against torch's operators on all ranks' tensors, which every rank can compute
// itself.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/local_sgd/averager.h"
#include "hasten/parallel/comm_hook.h"
#include "support/communicator.h"
#include "support/on_device.h"
#include "support/watched_communicator.h"

namespace hasten::averager_test {

using at::Tensor;
using testing_support::fresh_communicator;
using List = Averager::NamedTensorList;

Tensor numbers(std::vector<int64_t> sizes, int rank, int turn = 0) {
  int64_t seed = 1000 + 10 * rank + turn;
  for (const int64_t size : sizes) {
    seed = 31 * seed + size;
  }
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(seed);
  return on_device::randn(sizes, generator, torch::kFloat);
}

// A rank's tensors have all dtypes. One is larger than a slice, one has another order in memory,
// and one is tied.
List rank_list(int rank) {
  List list;
  list.emplace_back("large", numbers({300, 700}, rank));
  list.emplace_back("bias", numbers({7}, rank));
  list.emplace_back("double", numbers({33, 5}, rank).to(torch::kDouble));
  list.emplace_back("half", numbers({65}, rank).to(torch::kBFloat16));
  list.emplace_back("image",
                    numbers({2, 3, 5, 4}, rank).contiguous(torch::MemoryFormat::ChannelsLast));
  list.emplace_back("scalar", numbers({}, rank));
  list.emplace_back("tied", list[1].second);
  return list;
}

// The sum of weight * tensor over ranks, divided by the sum of weights, by torch's operators.
Tensor plain_mean(size_t entry, const std::vector<double>& weights) {
  Tensor sum;
  double total = 0;
  for (size_t rank = 0; rank < weights.size(); ++rank) {
    const Tensor mine = rank_list(static_cast<int>(rank))[entry].second;
    const Tensor term = mine.to(torch::kDouble) * weights[rank];
    sum = sum.defined() ? sum + term : term;
    total += weights[rank];
  }
  return sum / total;
}

void expect_mean(const List& list, const std::vector<double>& weights) {
  for (size_t i = 0; i < list.size(); ++i) {
    const Tensor wanted = plain_mean(i, weights);
    const double tolerance = list[i].second.scalar_type() == torch::kBFloat16 ? 8e-3 : 1e-6;
    EXPECT_LE((list[i].second.to(torch::kDouble) - wanted).abs().max().item<double>(),
              tolerance * (1 + wanted.abs().max().item<double>()))
        << list[i].first;
  }
}

std::string what_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Averager, EveryTensorIsTheRanksMeanWhereItLies) {
  const auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  std::vector<Tensor> means;
  for (const bool transactional : {true, false}) {
    List list = rank_list(communicator->rank());
    std::vector<const void*> places;
    for (const auto& [name, tensor] : list) {
      places.push_back(tensor.data_ptr());
    }
    const Tensor view = list[0].second.view({-1});
    const auto version = list[0].second._version();
    Averager averager(communicator, list, {.transactional = transactional, .slice_mb = 0.1});
    averager.average();
    expect_mean(list, std::vector<double>(static_cast<size_t>(world), 1));
    for (size_t i = 0; i < list.size(); ++i) {
      EXPECT_EQ(list[i].second.data_ptr(), places[i]);
    }
    EXPECT_TRUE(torch::equal(view.view({300, 700}), list[0].second));
    if (world > 1) {
      EXPECT_GT(list[0].second._version(), version); // autograd must know
    }
    // Equal bit for bit on all ranks.
    for (const auto& [name, tensor] : list) {
      Tensor first = tensor.contiguous().clone();
      communicator->broadcast(first, 0, name);
      EXPECT_TRUE(torch::equal(first, tensor)) << name;
      if (transactional) {
        means.push_back(first);
      }
    }
    for (size_t i = 0; i < list.size(); ++i) { // also bit for bit
      EXPECT_TRUE(torch::equal(list[i].second, means[i])) << list[i].first;
    }
  }
}

/// A group that loses a peer after each vote, when the spread would be sent.
std::shared_ptr<Communicator> losing_the_spread() {
  auto watched = std::make_shared<testing_support::WatchedCommunicator>(fresh_communicator());
  watched->before = [](std::string_view name) {
    if (name == "spread of an average") {
      throw CommunicationError("comm::all_reduce", "a peer is gone");
    }
  };
  return watched;
}

TEST(Averager, APeerThatIsLostAfterTheVoteLeavesTheRoundWhole) {
  const auto communicator = losing_the_spread();
  const int world = communicator->world_size();
  const std::vector<double> equal(static_cast<size_t>(world), 1);
  for (const bool delayed : {false, true}) {
    SCOPED_TRACE(delayed ? "start and finish" : "average");
    List list = rank_list(communicator->rank());
    Averager averager(communicator, list, {.slice_mb = 0.1});
    if (delayed) {
      averager.start();
      averager.finish();
    } else {
      averager.average();
    }
    expect_mean(list, equal);
    if (world > 1) {
      EXPECT_THROW(averager.report(), CommunicationError);
    }
    EXPECT_EQ(averager.recover(), RoundOutcome::none); // the round is not done again
    EXPECT_EQ(averager.report().round, 1);
    EXPECT_TRUE(std::isnan(averager.report().spread));
    expect_mean(list, equal);
  }
}

TEST(Averager, WeightsAreDividedByThoseWhoContribute) {
  const auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  for (const bool transactional : {true, false}) {
    std::vector<double> weights;
    for (int rank = 0; rank < world; ++rank) {
      weights.push_back(rank == 0 && world > 1 ? 0 : 1.5 * rank + 1);
    }
    List list = rank_list(communicator->rank());
    Averager averager(communicator, list, {.transactional = transactional, .slice_mb = 0.1});
    averager.average(weights[static_cast<size_t>(communicator->rank())]);
    expect_mean(list, weights);
    const Tensor before = list[0].second.clone();
    averager.average(0); // every rank has weight 0
    EXPECT_TRUE(torch::equal(list[0].second, before));
  }
}

TEST(Averager, SpreadIsTheRootMeanSquareDistanceToTheMean) {
  const auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  const std::vector<double> equal(static_cast<size_t>(world), 1);
  double squares = 0;
  double norm = 0;
  for (size_t i = 0; i + 1 < rank_list(0).size(); ++i) { // the last tensor is tied; it counts once
    const Tensor mean = plain_mean(i, equal);
    norm += mean.square().sum().item<double>();
    for (int rank = 0; rank < world; ++rank) {
      squares +=
          (rank_list(rank)[i].second.to(torch::kDouble) - mean).square().sum().item<double>();
    }
  }
  List list = rank_list(communicator->rank());
  Averager averager(communicator, list, {.slice_mb = 0.1});
  averager.average();
  const AverageReport& report = averager.report();
  EXPECT_EQ(report.round, 1);
  EXPECT_NEAR(report.spread, std::sqrt(squares / world), 1e-3);
  if (world > 1) {
    EXPECT_NEAR(report.norm, std::sqrt(norm), 1e-2);
    EXPECT_EQ(report.bytes, static_cast<int64_t>(2.0 * (world - 1) / world *
                                                 (4.0 * (300 * 700 + 7 + 65 + 120 + 1) + 8 * 165)));
  }
  averager.average();
  EXPECT_LT(averager.report().spread, 1e-3 * std::sqrt(squares + 1));
}

// For all sizes, slices and fragments: every element is in one piece, all pieces of a slice are in
// one fragment, and fragments are contiguous parts of the list.
TEST(Averager, EveryElementIsInExactlyOneSlice) {
  const auto communicator = Communicator::create(World{});
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(5);
  const auto random = [&](int64_t below) {
    return on_device::randint(0, below, {1}, generator, torch::kLong).item<int64_t>();
  };
  for (int turn = 0; turn < 100; ++turn) {
    List list;
    std::vector<std::vector<int>> seen;
    for (int64_t i = 1 + random(12); i > 0; --i) {
      const int64_t numel = random(4) == 0 ? random(3) : random(900);
      const auto dtype = random(4) == 0   ? torch::kDouble
                         : random(3) == 0 ? torch::kHalf
                                          : torch::kFloat;
      list.emplace_back(std::to_string(i), on_device::zeros({numel}, dtype));
      if (numel > 0) {
        seen.emplace_back(static_cast<size_t>(numel), 0);
      }
    }
    AveragerOptions options;
    options.transactional = random(3) > 0;
    options.slice_mb = static_cast<double>(1 + random(4000)) / (1 << 20);
    options.fragments = options.transactional ? 1 + random(5) : 1;
    const Averager averager(communicator, list, options);
    int64_t last_tensor_fragment = 0;
    std::vector<int64_t> fragment_of(seen.size(), -1);
    for (const auto& slice : averager.slices()) {
      int64_t elements = 0;
      for (const auto& piece : slice) {
        EXPECT_EQ(piece.fragment, slice[0].fragment);
        auto& counts = seen.at(static_cast<size_t>(piece.tensor));
        for (int64_t e = piece.begin; e < piece.begin + piece.count; ++e) {
          ++counts.at(static_cast<size_t>(e));
        }
        elements += piece.count;
        fragment_of[static_cast<size_t>(piece.tensor)] = piece.fragment;
      }
      EXPECT_LE(elements, std::max<int64_t>(1, options.slice_mb * (1 << 20) / 4));
    }
    for (const auto& counts : seen) {
      for (const int count : counts) {
        ASSERT_EQ(count, 1) << "turn " << turn;
      }
    }
    for (const int64_t fragment : fragment_of) {
      EXPECT_GE(fragment, last_tensor_fragment);
      EXPECT_LT(fragment, averager.fragments());
      last_tensor_fragment = fragment;
    }
  }
}

TEST(Averager, FragmentsLeaveTheOthersAlone) {
  const auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  List list = rank_list(communicator->rank());
  Averager averager(communicator, list, {.fragments = 2});
  ASSERT_EQ(averager.fragments(), 2);
  averager.average(1, 0, 1);
  EXPECT_TRUE(torch::equal(list[0].second, rank_list(communicator->rank())[0].second));
  averager.average(1, 0, 0);
  expect_mean(list, std::vector<double>(static_cast<size_t>(world), 1));
}

TEST(Averager, ANewAnchorHasTheValuesOfAllFragments) {
  List list{{"a", numbers({40}, 0)}, {"b", numbers({40}, 1)}};
  Averager averager(fresh_communicator(), list,
                    {.comm_hook = std::make_shared<Bf16CompressHook>(), .fragments = 2});
  ASSERT_EQ(averager.fragments(), 2);
  averager.average(1, 0, 0);
  for (auto& [name, tensor] : list) {
    tensor.add_(1);
  }
  averager.reset_anchor();
  NamedTensors tensors;
  nlohmann::json values;
  averager.save_state(tensors, values);
  EXPECT_TRUE(
      torch::equal(tensors.at("anchor.0"), torch::cat({list[0].second, list[1].second}).cpu()));
}

TEST(Averager, WhatWasDoneBetweenStartAndFinishIsKept) {
  const auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  const int rank = communicator->rank();
  const Tensor mean = plain_mean(0, std::vector<double>(static_cast<size_t>(world), 1));
  for (const bool resumed : {false, true}) {
    List list = rank_list(rank);
    Averager averager(communicator, list, {.slice_mb = 0.1});
    averager.start();
    EXPECT_TRUE(averager.started());
    const Tensor progress = numbers({300, 700}, rank, 1);
    list[0].second.add_(progress);
    if (resumed) { // the same with a second averager that loads the state
      NamedTensors tensors;
      nlohmann::json values;
      averager.save_state(tensors, values);
      for (auto& [name, tensor] : tensors) {
        tensor = tensor.clone();
      }
      Averager second(communicator, list, {.slice_mb = 0.1});
      second.load_state(tensors, values);
      EXPECT_TRUE(second.started());
      second.finish();
      EXPECT_EQ(second.report().round, 1);
    } else {
      averager.finish();
    }
    const double apart =
        (list[0].second.to(torch::kDouble) - (mean + progress)).abs().max().item<double>();
    EXPECT_LT(apart, 2e-6) << resumed;
    if (resumed) {
      list = rank_list(rank); // the first averager's round has no effect on the test
      averager.finish();
    }
  }
}

TEST(Averager, ADelayedAverageCountsEachRanksWeight) {
  const auto communicator = fresh_communicator();
  std::vector<double> weights;
  for (int rank = 0; rank < communicator->world_size(); ++rank) {
    weights.push_back(1.5 * rank + 2);
  }
  List list = rank_list(communicator->rank());
  Averager averager(communicator, list, {.slice_mb = 0.1});
  averager.start(weights[static_cast<size_t>(communicator->rank())]);
  averager.finish();
  expect_mean(list, weights);
}

// Values near 1000 that have changed by about 1. The change is sent in 16 bits, so the error is
// 2^-9 of the change, not of the value.
TEST(Averager, AHookCompressesTheChangesSinceTheLastAverage) {
  const auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  const int rank = communicator->rank();
  const Tensor start = numbers({50, 20}, 99) + 1000;
  List list{{"x", start.clone()}};
  Averager averager(communicator, list,
                    {.slice_mb = 0.001, .comm_hook = std::make_shared<Bf16CompressHook>()});
  Tensor common = start.to(torch::kDouble);
  for (int round = 0; round < 2; ++round) {
    Tensor mean = torch::zeros_like(common);
    double total = 0;
    for (int other = 0; other < world; ++other) {
      const double weight = other + 1;
      mean += weight * (common + numbers({50, 20}, other, round));
      total += weight;
    }
    mean /= total;
    list[0].second.add_(numbers({50, 20}, rank, round));
    averager.average(rank + 1);
    EXPECT_LE((list[0].second - mean).abs().max().item<double>(), 5 * 0x1p-8 + 1e-3);
    common = list[0].second.to(torch::kDouble);
  }
}

TEST(Averager, RanksInDifferentRoundsGetAnErrorAndKeepTheirNumbers) {
  CommunicatorOptions options; // otherwise the check of shapes throws first
  options.check_shapes = ShapeCheck::never;
  options.backend = "gloo"; // "shm" compares every operation
  const auto communicator = fresh_communicator(options);
  if (communicator->world_size() == 1) {
    return;
  }
  const int rank = communicator->rank();
  List list{{"a", numbers({40, 40}, rank)}, {"b", numbers({40, 40}, rank, 1)}};
  Averager averager(communicator, list, {.fragments = 2});
  ASSERT_EQ(averager.fragments(), 2);
  const auto text = what_of([&] { averager.average(1, 0, rank == 0 ? 0 : 1); });
  EXPECT_NE(text.find("ranks are in different synchronisations"), std::string::npos) << text;
  EXPECT_TRUE(torch::equal(list[0].second, numbers({40, 40}, rank)));
  EXPECT_TRUE(torch::equal(list[1].second, numbers({40, 40}, rank, 1)));
}

TEST(Averager, AlphaKeepsAShareOfTheOwnParametersInALateCommit) {
  const auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  const int rank = communicator->rank();
  List list = rank_list(rank);
  Averager averager(communicator, list, {.slice_mb = 0.1, .alpha = 0.25});
  const List own = rank_list(rank);
  averager.start();
  for (size_t i = 0; i < list.size() - 1; ++i) { // the last is tied
    list[i].second.mul_(2);
  }
  averager.finish();
  for (size_t i = 0; i < list.size() - 1; ++i) {
    const Tensor wanted =
        world == 1 ? own[i].second * 2
                   : 0.25 * (own[i].second * 2).to(torch::kDouble) +
                         0.75 * plain_mean(i, std::vector<double>(static_cast<size_t>(world), 1));
    EXPECT_TRUE(torch::allclose(list[i].second.to(torch::kDouble), wanted.to(torch::kDouble),
                                i == 3 ? 0.01 : 1e-6, // bfloat16
                                i == 3 ? 0.01 : 1e-6))
        << list[i].first;
  }
}

TEST(Averager, ListsThatDifferAreNamedOnEveryRank) {
  const auto communicator = fresh_communicator();
  if (communicator->world_size() == 1) {
    return;
  }
  const bool last = communicator->rank() == communicator->world_size() - 1;
  const auto text = what_of([&] {
    List list{{"a", on_device::zeros({3})}};
    list.emplace_back("b", last ? on_device::zeros({2, 2}) : on_device::zeros({4}));
    Averager averager(communicator, list);
  });
  EXPECT_NE(text.find("rank " + std::to_string(communicator->world_size() - 1) +
                      "'s list has tensor \"b\" as [2, 2] Float"),
            std::string::npos)
      << text;
  const auto settings = what_of([&] {
    Averager averager(communicator, {{"a", on_device::zeros({3})}}, {.slice_mb = last ? 2.0 : 1.0});
  });
  EXPECT_NE(settings.find("the settings"), std::string::npos) << settings;
}

TEST(Averager, RefusesWhatItCannotAverage) {
  const auto communicator = Communicator::create(World{});
  const auto refused = [&](const List& list, AveragerOptions options = {}) {
    return what_of([&] { Averager(communicator, list, options); });
  };
  EXPECT_NE(refused({{"n", on_device::zeros({2}, torch::kLong)}}).find("tensor \"n\""),
            std::string::npos);
  EXPECT_NE(refused({{"g", on_device::zeros({4, 4}).slice(1, 0, 4, 2)}}).find("gaps"),
            std::string::npos);
  EXPECT_NE(refused({}, {.slice_mb = 0}).find("slice_mb=0"), std::string::npos);
  Averager averager(communicator, {{"a", on_device::zeros({2})}});
  EXPECT_NE(what_of([&] { averager.average(-1); }).find("weight=-1"), std::string::npos);
  EXPECT_NE(what_of([&] { averager.average(std::nan("")); }).find("weight="), std::string::npos);
  EXPECT_NE(what_of([&] { averager.finish(); }).find("without start()"), std::string::npos);
  List moved{{"m", on_device::zeros({2})}};
  Averager other(communicator, moved);
  moved[0].second.resize_({3});
  EXPECT_NE(what_of([&] { other.average(); }).find("\"m\" is [3]"), std::string::npos);
}

} // namespace hasten::averager_test
