#include <gtest/gtest.h>
#include <sched.h>
#include <torch/torch.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "hasten/base/error.h"
#include "hasten/comm/communicator.h"
#include "support/communicator.h"
#include "support/environment.h"
#include "support/on_device.h"
#include "support/world.h"

namespace hasten {

using testing_support::fresh_communicator;

static std::string message_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const CommunicationError& error) {
    return error.what();
  }
  return "no error";
}

static void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

// Threads of this process, by whether they block SIGPIPE.
static std::map<std::string, bool> threads_without_sigpipe() {
  std::map<std::string, bool> blocked;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(entry.path() / "status");
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("SigBlk:", 0) == 0) {
        const auto mask = std::stoull(line.substr(7), nullptr, 16);
        blocked[entry.path().filename()] = (mask >> (SIGPIPE - 1) & 1) != 0;
      }
    }
  }
  return blocked;
}

// A rank that compares an operation waits for the others before it begins.
TEST(Group, OperationsDoneBeforeAreNotComparedHoweverManyThereAre) {
  if (testing_support::test_world().world_size != 2) {
    GTEST_SKIP() << "slow on many ranks";
  }
  constexpr int64_t kOperations = 5000;
  const auto comm = fresh_communicator();
  const auto other = comm->duplicate({.name = "signals"});
  const torch::Tensor numbers = on_device::ones({kOperations});
  for (int64_t n = 1; n <= kOperations; ++n) {
    comm->all_reduce(numbers.narrow(0, 0, n), ReduceOp::MAX, "sizes");
  }
  std::vector<Work> handles;
  for (const int turn : {0, 1}) {
    for (int64_t n = 1; comm->rank() == turn && n <= kOperations; n += 500) {
      handles.push_back(comm->all_reduce_async(numbers.narrow(0, 0, n), ReduceOp::MAX, "sizes"));
    }
    other->barrier("rank 0 has begun");
  }
  for (Work& handle : handles) {
    handle.wait();
  }
  other->close();
  comm->close();
}

// The death of a peer while this rank writes to it is an error and does not end this process.
TEST(Group, ThreadsThatWriteToPeersTakeNoSigpipe) {
  const auto before = threads_without_sigpipe();
  const auto comm = fresh_communicator({.name = testing_support::case_name(), .backend = "gloo"});
  torch::Tensor a = on_device::ones({5});
  comm->all_reduce(a, ReduceOp::SUM, "a");
  size_t started = 0;
  for (const auto& [thread, blocked] : threads_without_sigpipe()) {
    if (before.count(thread) == 0) {
      ++started;
      EXPECT_TRUE(blocked) << thread;
    }
  }
  EXPECT_GE(started, comm->world_size() > 1 ? 2U : 0U);
  comm->close();
}

// See Note [Spinning] of thread_scopes.h.
TEST(Group, GlooThreadsInterruptNobody) {
  const sched_param parameters{};
  if (::sched_setscheduler(0, SCHED_BATCH, &parameters) != 0 ||
      ::sched_setscheduler(0, SCHED_OTHER, &parameters) != 0) {
    GTEST_SKIP() << "the kernel refuses SCHED_BATCH";
  }
  const auto comm = fresh_communicator({.name = testing_support::case_name(), .backend = "gloo"});
  comm->barrier("all are connected");
  int gloo = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(entry.path() / "comm") >> name;
    if (name.find("gloo") != std::string::npos) {
      ++gloo;
      const int thread = std::stoi(entry.path().filename());
      EXPECT_EQ(::sched_getscheduler(thread), SCHED_BATCH) << name;
    }
  }
  // The reader, and the thread that ran the barrier. Others may not have a name yet.
  EXPECT_EQ(gloo >= 2, comm->world_size() > 1) << gloo;
  EXPECT_EQ(::sched_getscheduler(0), SCHED_OTHER);
}

TEST(Group, DuplicatesHaveAnOrderOfOperationsOfTheirOwn) {
  CommunicatorOptions options;
  options.check_shapes = ShapeCheck::never;
  const auto comm = fresh_communicator(options);
  const auto other = comm->duplicate(comm->options()); // of the same name
  torch::Tensor a = on_device::ones({5});
  torch::Tensor b = on_device::ones({70'000}) * 2;
  // Even ranks begin with one group, odd ones with the other.
  Work first, second;
  if (comm->rank() % 2 == 0) {
    first = comm->all_reduce_async(a, ReduceOp::SUM, "a");
    second = other->all_reduce_async(b, ReduceOp::SUM, "b");
  } else {
    second = other->all_reduce_async(b, ReduceOp::SUM, "b");
    first = comm->all_reduce_async(a, ReduceOp::SUM, "a");
  }
  first.wait();
  second.wait();
  EXPECT_EQ(a[0].item<int>(), comm->world_size());
  EXPECT_EQ(b[0].item<int>(), 2 * comm->world_size());
  other->close();
  comm->barrier("the first goes on");
}

// Two threads of each rank wait for peers in their groups. The wait in one group must not delay the
// other group.
TEST(Group, ThreadsWithAGroupEachDoNotHoldEachOtherUp) {
  const auto comm = fresh_communicator();
  const auto other = comm->duplicate({.name = "other"});
  const int world = comm->world_size();
  const bool even = comm->rank() % 2 == 0;
  Communicator& own = even ? *comm : *other;
  Communicator& helpers = even ? *other : *comm;
  std::thread helper([&] {
    EXPECT_EQ(std::ssize(helpers.all_gather_object(1, "values")), world);
    torch::Tensor tensor = on_device::ones({5});
    helpers.all_reduce(tensor, ReduceOp::SUM, "tensors");
    EXPECT_EQ(tensor[0].item<int>(), world);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(std::ssize(own.all_gather_object(1, "values")), world);
  torch::Tensor tensor = on_device::ones({5});
  own.all_reduce(tensor, ReduceOp::SUM, "tensors");
  helper.join();
  EXPECT_EQ(tensor[0].item<int>(), world);
}

// Even and odd ranks are two groups with the same name.
TEST(Group, PartsOfAWorldTalkAmongThemselves) {
  const auto comm = fresh_communicator();
  const int world = comm->world_size();
  std::vector<int> mine;
  for (int rank = comm->rank() % 2; rank < world; rank += 2) {
    mine.push_back(rank);
  }
  const auto part = comm->new_group(mine, {.name = "part"});
  EXPECT_EQ(part->world_size(), std::ssize(mine));
  EXPECT_EQ(mine[static_cast<size_t>(part->rank())], comm->rank());
  torch::Tensor tensor = on_device::full({70'000}, comm->rank());
  part->all_reduce(tensor, ReduceOp::SUM, "among themselves");
  int sum = 0;
  for (const int rank : mine) {
    sum += rank;
  }
  EXPECT_EQ(tensor[69'999].item<int>(), sum);
  const auto everyone = part->all_gather_object(comm->rank(), "ranks");
  EXPECT_EQ(everyone, std::vector<nlohmann::json>(mine.begin(), mine.end()));
  // Ranks that made other groups before do not wait for each other.
  for (int i = 0; i < comm->rank() % 2; ++i) {
    part->duplicate({.name = "part"})->close();
  }
  comm->duplicate({.name = "part"})->barrier("with everyone");
  const auto again = part->duplicate({.name = "part"});
  EXPECT_EQ(again->world_size(), part->world_size());
  EXPECT_EQ(again->all_gather_object(comm->rank(), "ranks"), everyone);
  again->close();
  comm->barrier("the world goes on");
  EXPECT_THROW(comm->new_group({comm->rank() + 1}, {.name = "x"}), InputError);
  EXPECT_THROW(comm->new_group({comm->rank(), comm->rank()}, {.name = "x"}), InputError);
  part->close();
}

TEST(Group, ClosedGroupsRefuseOperationsAndCloseAgain) {
  const auto comm = fresh_communicator();
  torch::Tensor tensor = on_device::ones({3});
  comm->all_reduce(tensor, ReduceOp::SUM, "before");
  comm->close();
  comm->close();
  expect_part(message_of([&] { comm->barrier("after"); }),
              "barrier \"after\": the group is closed");
}

TEST(Group, ThoseThatAllRanksHaveClosedLeaveNoThread) {
  const auto comm = fresh_communicator();
  const auto threads = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
  };
  const auto before = threads();
  for (int i = 0; i < 20; ++i) {
    auto group = comm->duplicate({.name = "group " + std::to_string(i)});
    group->barrier("meet");
    if (i % 2 == 0) {
      group->close();
    }
  }
  comm->barrier("all have closed them");
  comm->duplicate({.name = "last"})->close(); // looks for those that others closed later
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (threads() > before + 4 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_LE(threads(), before + 4);
}

TEST(Group, CloseWaitsForOperationsUnderWay) {
  const auto comm = fresh_communicator();
  torch::Tensor tensor = on_device::full({2'000'000}, comm->rank() + 1.0);
  Work handle = comm->all_reduce_async(tensor, ReduceOp::SUM, "large");
  comm->close();
  handle.wait();
  EXPECT_EQ(tensor[-1].item<int>(), comm->world_size() * (comm->world_size() + 1) / 2);
}

TEST(Group, WorldsFollowOneAnotherInOneProcess) {
  for (int i = 0; i < 3; ++i) {
    const auto comm = Communicator::create(testing_support::fresh_world(), {.name = "again"});
    torch::Tensor tensor = on_device::ones({3});
    comm->all_reduce(tensor, ReduceOp::SUM, "sum");
    EXPECT_EQ(tensor[0].item<int>(), comm->world_size());
    comm->close();
  }
}

TEST(Group, DestructionWithoutCloseIsSilentAndQuick) {
  const auto start = std::chrono::steady_clock::now();
  {
    auto comm = Communicator::create(testing_support::fresh_world(), {});
    comm->barrier("meet");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(Group, AbandonedGroupsThrowTheReasonOnEveryRankForEver) {
  const auto comm = fresh_communicator();
  comm->barrier("meet");
  const int culprit = comm->world_size() - 1;
  if (comm->rank() == culprit) {
    comm->abort("the loss is not a number");
  }
  const std::string reason =
      "rank " + std::to_string(culprit) + " failed: the loss is not a number";
  torch::Tensor tensor = on_device::ones({3});
  const std::string first = message_of([&] {
    while (true) {
      comm->all_reduce(tensor, ReduceOp::SUM, "step");
    }
  });
  expect_part(first, "all_reduce \"step\": " + reason);
  expect_part(message_of([&] { comm->barrier("later"); }), reason);
  expect_part(message_of([&] { comm->all_gather_object(1, "later"); }), reason);
}

TEST(Group, TheKindOfAFailureReachesEveryRank) {
  const auto comm = fresh_communicator();
  comm->barrier("meet");
  if (comm->rank() == comm->world_size() - 1) {
    comm->abort(std::bad_alloc());
  }
  try {
    comm->barrier("later");
    ADD_FAILURE() << "no error";
  } catch (const CommunicationError& error) {
    EXPECT_EQ(error.kind(), ErrorKind::out_of_memory) << error.what();
  }
}

static const testing_support::EnvironmentValues kChecksAsTheOptionsSay = {
    {"HASTEN_COMM_CHECK", std::nullopt}};

static CommunicatorOptions patient_options() {
  CommunicatorOptions options;
  options.timeout = std::chrono::seconds(20);
  return options;
}

// Gloo would end the process.
TEST(GroupCheck, ATensorOfAnotherShapeIsAnErrorThatNamesBothRanks) {
  const testing_support::ScopedEnvironment environment(kChecksAsTheOptionsSay);
  const auto comm = fresh_communicator(patient_options());
  torch::Tensor right = on_device::ones({3});
  comm->all_reduce(right, ReduceOp::SUM, "right");
  EXPECT_EQ(right[0].item<int>(), comm->world_size());
  if (comm->world_size() == 1) {
    return;
  }
  torch::Tensor wrong = on_device::ones({comm->rank() == 1 ? 4 : 3});
  const std::string first = message_of([&] { comm->all_reduce(wrong, ReduceOp::SUM, "wrong"); });
  expect_part(first,
              "all_reduce \"wrong\": rank 1 has sum of Float [4], rank 0 has sum of Float [3]");
  EXPECT_EQ(message_of([&] { comm->barrier("later"); }), first);
}

TEST(GroupCheck, AnotherOperationIsAnErrorThatNamesBothRanks) {
  const testing_support::ScopedEnvironment environment(kChecksAsTheOptionsSay);
  const auto comm = fresh_communicator(patient_options());
  if (comm->world_size() == 1) {
    return;
  }
  torch::Tensor tensor = on_device::ones({3});
  const std::string message = message_of([&] {
    if (comm->rank() == 1) {
      comm->broadcast(tensor, 0, "x");
    } else {
      comm->all_reduce(tensor, ReduceOp::SUM, "x");
    }
  });
  expect_part(message, "rank 1 has broadcast \"x\"");
  expect_part(message, "rank 0 has all_reduce \"x\"");
}

// The others do not compare, because they have done the operation before.
TEST(GroupCheck, WhatIsNewOnOneRankAloneIsAnErrorOnAll) {
  const testing_support::ScopedEnvironment environment(kChecksAsTheOptionsSay);
  for (const bool goes_on : {false, true}) {
    const auto comm = fresh_communicator(patient_options());
    if (comm->world_size() == 1) {
      return;
    }
    torch::Tensor tensor = on_device::ones({3});
    torch::Tensor longer = on_device::ones({300});
    const auto known = [&] {
      if (goes_on) { // rank 0 does not wait for the others here
        comm->broadcast(tensor, 0, "x");
      } else {
        comm->all_reduce(tensor, ReduceOp::SUM, "x");
      }
    };
    known();
    comm->barrier("met");
    const std::string message = message_of([&] {
      if (comm->rank() == 1) {
        comm->all_reduce(longer, ReduceOp::SUM, "x");
      } else {
        known();
        comm->barrier("met");
      }
    });
    expect_part(message, "all_reduce \"x\"");
    expect_part(message, "sum of Float [300]");
    EXPECT_EQ(message.find("timed out"), std::string::npos) << message;
  }
}

// Operations are not compared again unless ShapeCheck::always is set.
TEST(GroupCheck, WithTheOptionEveryOperationIsCompared) {
  const testing_support::ScopedEnvironment environment(kChecksAsTheOptionsSay);
  CommunicatorOptions options = patient_options();
  options.check_shapes = ShapeCheck::always;
  const auto comm = fresh_communicator(options);
  if (comm->world_size() == 1) {
    return;
  }
  torch::Tensor one = on_device::ones({3});
  torch::Tensor other = on_device::ones({4});
  comm->all_reduce(one, ReduceOp::SUM, "x");
  comm->all_reduce(other, ReduceOp::SUM, "x");
  expect_part(
      message_of([&] { comm->all_reduce(comm->rank() == 1 ? one : other, ReduceOp::SUM, "x"); }),
      "rank 1 has sum of Float [3], rank 0 has sum of Float [4]");
}

} // namespace hasten
