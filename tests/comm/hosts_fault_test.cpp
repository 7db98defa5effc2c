// Groups whose ranks are on several hosts: spawn() makes processes believe that they are.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "hasten/comm/communicator.h"
#include "hasten/core/memory.h"
#include "support/spawn.h"

namespace hasten::hosts_fault_test {

using at::Tensor;
using std::chrono::milliseconds;
using testing_support::FaultKind;
using testing_support::RankReport;
using testing_support::spawn;
using Kind = Collective::Kind;

static std::shared_ptr<Communicator> comm_of(const testing_support::FaultRank& rank,
                                             ShapeCheck check = ShapeCheck::first) {
  return Communicator::create(rank.world(),
                              {.timeout = milliseconds(60'000), .check_shapes = check});
}

/// `hosts`: the host of each rank, "0,0,1,1".
static std::vector<RankReport> on_hosts(const std::string& hosts, const std::string& function,
                                        const testing_support::Fault& fault = {}) {
  return spawn(
      static_cast<int>(hosts.size() + 1) / 2, function, fault,
      {.deadline = std::chrono::seconds(90), .environment = {{"HASTEN_TEST_HOSTS", hosts}}});
}

static void expect_no_error(const std::vector<RankReport>& ranks) {
  for (const RankReport& rank : ranks) {
    EXPECT_EQ(rank.error, "");
    EXPECT_EQ(rank.end.code, 0);
  }
}

static void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

/// Row `row` of what `rank` gives, in values that are exact in every dtype.
static Tensor given(int rank, int row, c10::ScalarType type, int64_t count) {
  static const Tensor pattern = torch::arange(1'000'000) % 3 + 1;
  return pattern.narrow(0, (2 * rank + row + rank * row) % 3, count).to(type);
}

static Tensor reduced(const std::vector<Tensor>& all, ReduceOp op) {
  const Tensor wide = torch::stack(all).to(at::kDouble);
  const Tensor result = op == ReduceOp::SUM       ? wide.sum(0)
                        : op == ReduceOp::AVG     ? wide.mean(0)
                        : op == ReduceOp::PRODUCT ? wide.prod(0)
                        : wide.size(1) == 0       ? wide[0]
                        : op == ReduceOp::MAX     ? wide.amax(0)
                                                  : wide.amin(0);
  return result.to(all[0].scalar_type());
}

/// Runs one operation, in memory of the group or not, and compares it with what one rank computes.
static void run_once(Communicator& comm, Kind kind, ReduceOp op, c10::ScalarType type,
                     int64_t count, bool allocated) {
  const int size = comm.world_size(), rank = comm.rank(), root = size - 1;
  const auto place = [&](const Tensor& values) {
    return allocated ? comm.allocate_tensor(values.numel(), values.options())
                           .view(values.sizes())
                           .copy_(values)
                     : values.clone();
  };
  std::vector<Tensor> firsts, of_rank, for_rank; // [rank] row 0 of each, rows of this, for this
  for (int r = 0; r < size; ++r) {
    firsts.push_back(given(r, 0, type, count));
    of_rank.push_back(given(rank, r, type, count));
    for_rank.push_back(given(r, rank, type, count));
  }
  const Tensor one = place(firsts[static_cast<size_t>(rank)]), many = place(torch::stack(of_rank));
  Tensor input = one, output = one, expected;
  switch (kind) {
    case Kind::all_reduce:
    case Kind::reduce:
      input = Tensor();
      expected = kind == Kind::all_reduce || rank == root ? reduced(firsts, op) : one.clone();
      break;
    case Kind::broadcast:
      input = Tensor();
      expected = firsts[static_cast<size_t>(root)];
      break;
    case Kind::all_gather:
    case Kind::gather:
      output = place(torch::zeros({size, count}, type));
      expected = kind == Kind::all_gather || rank == root ? torch::stack(firsts) : output.clone();
      break;
    case Kind::scatter:
      input = many;
      expected = given(root, rank, type, count);
      break;
    case Kind::all_to_all:
      input = many;
      output = place(torch::zeros({size, count}, type));
      expected = torch::stack(for_rank);
      break;
    case Kind::reduce_scatter:
      input = many;
      expected = reduced(for_rank, ReduceOp::SUM);
  }
  comm.start({.kind = kind, .name = "x", .output = output, .input = input, .op = op, .root = root})
      .wait();
  EXPECT_TRUE(torch::equal(output, expected))
      << "kind " << static_cast<int>(kind) << ", op " << static_cast<int>(op) << ", " << count
      << " of " << c10::toString(type);
}

HASTEN_RANK_FUNCTION(HostsRunEverything) {
  const auto comm = comm_of(rank, ShapeCheck::never);
  rank.report("backend", comm->options().backend);
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt,
                          at::kChar, at::kByte}) {
    const bool floats = at::isFloatingType(type);
    for (const int64_t count : {0, 1, 5'000, 20'003}) {
      for (const auto op :
           {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MAX, ReduceOp::MIN, ReduceOp::PRODUCT}) {
        for (const auto kind : {Kind::all_reduce, Kind::reduce}) {
          if (floats || op != ReduceOp::AVG) {
            run_once(*comm, kind, op, type, count, count == 5'000);
          }
        }
      }
      for (const auto kind : {Kind::broadcast, Kind::all_gather, Kind::gather, Kind::scatter,
                              Kind::all_to_all, Kind::reduce_scatter}) {
        if (floats || kind != Kind::reduce_scatter) {
          run_once(*comm, kind, {}, type, count, count == 20'003);
        }
      }
    }
  }
  for (const auto kind : {Kind::all_reduce, Kind::reduce, Kind::broadcast, Kind::all_gather,
                          Kind::reduce_scatter}) { // in several steps
    for (const bool allocated : {false, true}) {
      run_once(*comm, kind, ReduceOp::SUM, at::kFloat, 700'002, allocated);
    }
  }
  comm->barrier("end");
  const auto numbers = comm->all_gather_object(comm->rank(), "ranks");
  for (int i = 0; i < comm->world_size(); ++i) {
    EXPECT_EQ(numbers[static_cast<size_t>(i)], i);
  }
  comm->close();
}

TEST(Hosts, EveryCollectiveHasTheResultOfOneRankAloneInEveryDtype) {
  for (const char* hosts : {"0,0,1,1", "0,1,1,0", "0,1,2,0,1,2"}) {
    SCOPED_TRACE(hosts);
    const auto ranks = on_hosts(hosts, "HostsRunEverything");
    expect_no_error(ranks);
    EXPECT_EQ(ranks[0].values["backend"], "shm+gloo");
  }
}

HASTEN_RANK_FUNCTION(HostsSumNoise) {
  const auto comm = comm_of(rank);
  torch::manual_seed(rank.world().rank);
  for (const int64_t count : {1'000, 2'100'003}) {
    const Tensor noise = torch::randn({count});
    Tensor first;
    for (int i = 0; i < 3; ++i) {
      Tensor sum = i == 1 ? comm->allocate_tensor(count, at::kFloat).copy_(noise) : noise.clone();
      std::this_thread::sleep_for(milliseconds(rank.world().rank * 7 * i));
      comm->all_reduce(sum, ReduceOp::SUM, "noise");
      first = first.defined() ? first : sum;
      EXPECT_TRUE(torch::equal(sum, first)); // whatever the timing
      Tensor mean = noise.clone();
      comm->all_reduce(mean, ReduceOp::AVG, "mean");
      EXPECT_TRUE(torch::equal(mean, sum / comm->world_size())); // divided once
    }
    Tensor all = torch::empty({comm->world_size(), count});
    comm->all_gather_async(all, first, "sums").wait();
    for (int i = 0; i < comm->world_size(); ++i) {
      EXPECT_TRUE(torch::equal(all[i], first));
    }
    // 256 + 1 is 256 in bfloat16, whose values there differ by 2.
    Tensor narrow = torch::full({count}, rank.world().rank == 0 ? 256 : 1, at::kBFloat16);
    comm->all_reduce(narrow, ReduceOp::SUM, "bf16");
    const Tensor once = torch::full({count}, 255 + comm->world_size()).to(at::kBFloat16);
    EXPECT_TRUE(torch::equal(narrow, once));
  }
  comm->close();
}

TEST(Hosts, SumsHaveTheSameBitsOnAllRanksAndAreDividedAndRoundedOnce) {
  expect_no_error(on_hosts("0,0,1,1", "HostsSumNoise"));
  expect_no_error(on_hosts("0,1,2,0,1,2", "HostsSumNoise"));
}

HASTEN_RANK_FUNCTION(HostsCountBytes) {
  const auto comm = comm_of(rank);
  const Tensor tensor = torch::ones({(48 << 20) / 4});
  comm->barrier("start");
  const int64_t before = tcp_bytes_sent();
  comm->all_reduce(tensor, ReduceOp::SUM, "counted");
  comm->barrier("received");
  rank.report("bytes", tcp_bytes_sent() - before);
  comm->close();
}

TEST(Hosts, AnAllReduceSendsTheIdealBytesBetweenHosts) {
  for (const std::string hosts : {"0,0,1,1", "0,1,0,1", "0,0,1,1,2,2"}) {
    const auto ranks = on_hosts(hosts, "HostsCountBytes");
    expect_no_error(ranks);
    double sent = 0;
    for (const RankReport& rank : ranks) {
      sent += rank.values["bytes"].get<double>();
    }
    const double count = static_cast<double>(ranks.size()) / 2; // of hosts
    const double ideal = 2 * (count - 1) * (48 << 20); // of all hosts
    EXPECT_GE(sent, ideal);
    EXPECT_LE(sent, 1.07 * ideal + 1e6 * count) << hosts;
  }
}

HASTEN_RANK_FUNCTION(HostsChooseByTheirMembers) {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) {
    if (line.find("go through gloo") != std::string_view::npos) {
      lines.emplace_back(line);
    }
  });
  const auto comm = comm_of(rank);
  std::vector<std::string> names{comm->options().backend,
                                 comm->duplicate({.name = "second"})->options().backend};
  Tensor sum = torch::ones({100'000});
  if (comm->world_size() == 4) { // hosts 0,1,0,1
    const int number = comm->rank();
    const std::vector<int> here{number % 2, number % 2 + 2};
    const auto beside = comm->new_group(here, {.name = "of a host"});
    const auto across =
        comm->new_group({number / 2 * 2, number / 2 * 2 + 1}, {.name = "across hosts"});
    for (const auto& group : {beside, across}) {
      names.push_back(group->options().backend);
      group->all_reduce(sum, ReduceOp::SUM, "sum");
    }
    EXPECT_EQ(detail::ranks_of_host(*comm), here);
  } else {
    comm->all_reduce(sum, ReduceOp::SUM, "sum");
  }
  EXPECT_EQ(sum[99'999].item<int>(), comm->world_size());
  rank.report("backends", names);
  rank.report("lines", lines);
  comm->close();
  set_log_sink({});
}

TEST(Hosts, GroupsChooseByTheHostsOfTheirMembers) {
  using Names = std::vector<std::string>;
  auto ranks = on_hosts("0,1,0,1", "HostsChooseByTheirMembers");
  expect_no_error(ranks);
  EXPECT_EQ(ranks[1].values["backends"].get<Names>(),
            (Names{"shm+gloo", "shm+gloo", "shm", "gloo"}));
  EXPECT_EQ(ranks[0].values["lines"].get<Names>(), Names());
  ranks = on_hosts("0,1", "HostsChooseByTheirMembers"); // one rank on each, as it has to be
  EXPECT_EQ(ranks[0].values["backends"].get<Names>(), (Names{"gloo", "gloo"}));
  EXPECT_EQ(ranks[0].values["lines"].get<Names>(), Names());
  ranks = on_hosts("0,0,1", "HostsChooseByTheirMembers");
  expect_no_error(ranks);
  EXPECT_EQ(ranks[0].values["backends"].get<Names>(), (Names{"gloo", "gloo"}));
  const auto lines = ranks[0].values["lines"].get<Names>();
  ASSERT_EQ(lines.size(), 1U);
  expect_part(lines[0], "because the hosts have different numbers of ranks: 2, 1");
}

HASTEN_RANK_FUNCTION(HostsLeaveNoMemory) {
  install_memory_meter();
  const int64_t before = memory_stats().live_bytes;
  {
    const auto comm = comm_of(rank);
    const Tensor tensor = comm->allocate_tensor(1 << 20, at::kFloat);
    comm->all_reduce(tensor, ReduceOp::SUM, "sum");
    comm->broadcast(torch::ones({3}), 0, "small");
    comm->close();
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (memory_stats().live_bytes > before && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(milliseconds(10)); // a thread ends the connections
  }
  EXPECT_EQ(memory_stats().live_bytes, before);
}

TEST(Hosts, AClosedGroupLeavesNoMemory) {
  expect_no_error(on_hosts("0,0,1,1", "HostsLeaveNoMemory"));
}

HASTEN_RANK_FUNCTION(HostsLoseARankInTheMiddle) {
  const auto comm = comm_of(rank);
  const Tensor tensor = torch::ones({4 << 20});
  comm->all_reduce(tensor, ReduceOp::MAX, "bucket");
  Work work = comm->all_reduce_async(tensor, ReduceOp::MAX, "bucket");
  if (rank.is_faulty()) {
    std::this_thread::sleep_for(milliseconds(3));
  }
  rank.fault_here();
  work.wait();
  for (;;) {
    comm->all_reduce(tensor, ReduceOp::MAX, "bucket");
  }
}

TEST(Hosts, ARankKilledOrFrozenInTheMiddleIsNamedOnAllHosts) {
  using testing_support::Fault;
  for (const Fault& fault : {Fault{FaultKind::kill, 0},
                             {FaultKind::kill, 1},
                             {FaultKind::kill, 3},
                             {FaultKind::freeze, 2}}) {
    const auto ranks = on_hosts("0,0,1,1", "HostsLoseARankInTheMiddle", fault);
    const bool killed = fault.kind == FaultKind::kill;
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (std::cmp_not_equal(i, fault.rank)) {
        expect_part(ranks[i].error,
                    "rank " + std::to_string(fault.rank) + (killed ? " died" : " "));
        EXPECT_LT(ranks[i].seconds_after_fault, 7) << ranks[i].error;
      }
    }
  }
}

HASTEN_RANK_FUNCTION(HostsWaitThreeSeconds) {
  const auto comm = Communicator::create(rank.world(), {.timeout = milliseconds(3'000)});
  const Tensor tensor = torch::ones({200'000});
  comm->all_reduce(tensor, ReduceOp::SUM, "bucket");
  rank.fault_here();
  comm->all_reduce(tensor, ReduceOp::SUM, "bucket");
}

TEST(Hosts, ALateRankIsNamedOnAllHostsAtTheTimeout) {
  const auto ranks = on_hosts("0,0,1,1", "HostsWaitThreeSeconds",
                              {.kind = FaultKind::late, .rank = 3, .delay = milliseconds(9'000)});
  for (size_t i = 0; i < 3; ++i) {
    expect_part(ranks[i].error, "rank 3 has not entered it");
    EXPECT_LT(ranks[i].seconds_after_fault, 7) << ranks[i].error;
  }
}

HASTEN_RANK_FUNCTION(HostsShrink) {
  const auto comm = Communicator::create(
      rank.world(), {.timeout = milliseconds(20'000), .heartbeat_timeout = milliseconds(1'000)});
  const Tensor tensor = torch::ones({200'000});
  try {
    comm->all_reduce(tensor, ReduceOp::MAX, "bucket");
    rank.fault_here();
    for (;;) {
      comm->all_reduce(tensor, ReduceOp::MAX, "bucket");
    }
  } catch (const CommunicationError&) {
  }
  ASSERT_TRUE(comm->shrink());
  comm->all_reduce(tensor, ReduceOp::SUM, "after");
  EXPECT_EQ(tensor[199'999].item<int>(), comm->world_size());
  rank.report("backend", comm->options().backend);
  comm->close();
}

TEST(Hosts, WhatIsLeftOfAWorldChoosesAgain) {
  const auto left = [](const char* hosts) {
    const auto ranks = on_hosts(hosts, "HostsShrink", {.kind = FaultKind::kill, .rank = 3});
    EXPECT_EQ(ranks[0].error, "");
    return ranks[0].values["backend"];
  };
  EXPECT_EQ(left("0,0,1,1,1"), "shm+gloo");
  EXPECT_EQ(left("0,0,1,1"), "gloo");
}

HASTEN_RANK_FUNCTION(HostsAreInDifferentOperations) {
  const auto comm = comm_of(rank);
  const Tensor tensor = torch::ones({50'000});
  comm->all_reduce(tensor, ReduceOp::SUM, "sum");
  comm->broadcast(tensor, 0, "weights");
  if (rank.world().rank % 2 == 1) { // one rank of each host, in an operation that is not new
    comm->broadcast(tensor, 0, "weights");
  } else {
    comm->all_reduce(tensor, ReduceOp::SUM, "sum");
  }
}

HASTEN_RANK_FUNCTION(HostsHaveDifferentShapes) {
  const auto comm = comm_of(rank);
  const bool differs = rank.world().rank >= 2; // a whole host
  comm->all_reduce(torch::ones({differs ? 60'000 : 50'000}), ReduceOp::SUM, "sum");
}

TEST(Hosts, RanksInDifferentOperationsAreNamedOnAll) {
  for (const RankReport& rank : on_hosts("0,0,1,1", "HostsAreInDifferentOperations")) {
    expect_part(rank.error, "has broadcast \"weights\"");
    expect_part(rank.error, "has all_reduce \"sum\"");
  }
  for (const RankReport& rank : on_hosts("0,0,1,1", "HostsHaveDifferentShapes")) {
    expect_part(rank.error, "rank 2 has sum of Float [60000], rank 0 has sum of Float [50000]");
  }
}

} // namespace hasten::hosts_fault_test
