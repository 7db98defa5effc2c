// The state of an averager. A run that is saved at any moment of a round continues bit for bit.
// Also large numbers of rounds. Worlds 1 to 4.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/local_sgd/averager.h"
#include "hasten/parallel/comm_hook.h"
#include "support/communicator.h"
#include "support/on_device.h"

namespace hasten::averager_state_test {

using at::Tensor;
using testing_support::fresh_communicator;
using Options = std::function<AveragerOptions()>;

struct Saved {
  NamedTensors tensors{};
  nlohmann::json values{};
};

Saved saved(const Averager& averager) {
  Saved state;
  averager.save_state(state.tensors, state.values);
  for (auto& [name, tensor] : state.tensors) {
    tensor = tensor.clone();
  }
  state.values = nlohmann::json::parse(state.values.dump());
  return state;
}

// Four rounds over a rank's tensors, by start() and finish() if `late`. moment() counts its calls.
// At call number `stop` an averager with the saved state replaces the averager, twice.
struct Rounds {
  Rounds(std::shared_ptr<Communicator> group, Options make, bool late, int stop)
      : communicator(std::move(group)), options(std::move(make)), stop_at(stop) {
    for (const int64_t size : {700, 30, 9}) {
      list.emplace_back("p" + std::to_string(size), on_device::full({size}, 0.5, at::kFloat));
    }
    averager = std::make_unique<Averager>(communicator, list, options());
    for (int turn = 0; turn < 4; ++turn) {
      const int64_t parts = averager->fragments();
      const int64_t part = parts > 1 ? turn % parts : Averager::kAll;
      move(turn);
      moment();
      if (!late) {
        averager->average(communicator->rank() + 1, 0.1, part);
      } else {
        averager->start(communicator->rank() + 1, 0.1, part);
        moment();
        move(100 + turn);
        moment();
        averager->finish();
      }
      moment();
    }
  }

  // This rank's local change.
  void move(int turn) {
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(
        static_cast<uint64_t>(1000 * communicator->rank() + turn));
    for (auto& [name, tensor] : list) {
      tensor.add_(on_device::randn(tensor.sizes(), generator, at::kFloat));
    }
  }

  void moment() {
    if (moments++ != stop_at) {
      return;
    }
    for (int time = 0; time < 2; ++time) {
      const Saved state = saved(*averager);
      averager = std::make_unique<Averager>(communicator, list, options());
      averager->load_state(state.tensors, state.values);
    }
  }

  std::shared_ptr<Communicator> communicator;
  Options options;
  int stop_at;
  int moments = 0;
  Averager::NamedTensorList list{};
  std::unique_ptr<Averager> averager{};
};

TEST(AveragerState, SavedAtAnyMomentOfAnyKindOfRoundItGoesOnBitForBit) {
  const auto communicator = fresh_communicator();
  const std::vector<std::function<std::shared_ptr<OuterStep>()>> outers{
      [] { return nullptr; }, [] { return std::make_shared<DiLoCo>(); },
      [] {
        return std::make_shared<OuterOptimizer>(
            [](auto parameters) {
              return std::make_shared<torch::optim::Adam>(parameters,
                                                          torch::optim::AdamOptions(0.1));
            },
            "adam 0.1");
      }};
  for (const SyncStrategy sync : {SyncStrategy::driver, SyncStrategy::all_reduce}) {
    for (size_t outer = 0; outer < outers.size(); ++outer) {
      for (const int64_t fragments : {1, 2}) {
        for (const bool late : {false, true}) {
          SCOPED_TRACE(testing::Message()
                       << (sync == SyncStrategy::driver ? "driver" : "all") << " outer=" << outer
                       << " fragments=" << fragments << " late=" << late);
          const Options options = [&] {
            return AveragerOptions{
                .slice_mb = 0.001, .outer = outers[outer](), .sync = sync, .fragments = fragments};
          };
          const Rounds whole(communicator, options, late, /*stop=*/-1);
          for (int stop = 0; stop < whole.moments; ++stop) {
            const Rounds resumed(communicator, options, late, stop);
            for (size_t i = 0; i < whole.list.size(); ++i) {
              EXPECT_TRUE(torch::equal(whole.list[i].second, resumed.list[i].second))
                  << "moment " << stop << ", " << whole.list[i].first;
            }
          }
        }
      }
    }
  }
}

// Messages in flight at the load of a state are dropped, because they may arrive afterwards.
TEST(AveragerState, ALoadedStateReplacesARoundUnderWay) {
  const auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  Averager::NamedTensorList list{{"x", on_device::full({5000}, rank, at::kFloat)}};
  Averager averager(communicator, list, {.slice_mb = 0.001});
  averager.start();
  const Saved state = saved(averager);
  averager.finish();
  const Tensor wanted = list[0].second.clone();
  list[0].second.fill_(77 * rank);
  averager.start();
  list[0].second.fill_(rank);
  averager.load_state(state.tensors, state.values);
  averager.finish();
  EXPECT_TRUE(torch::equal(list[0].second, wanted));
  EXPECT_EQ(averager.report().round, 1);
}

// Each rank resumes from a state of its own, saved on either side of the commit.
TEST(AveragerState, ARankThatResumesInARoundThatAnotherHasCommittedCommitsIt) {
  const auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  Averager::NamedTensorList list{{"x", on_device::full({5000}, rank, at::kFloat)}};
  Averager averager(communicator, list, {.slice_mb = 0.001});
  averager.start(rank + 1);
  const Saved open = saved(averager);
  const Tensor before = list[0].second.clone();
  averager.finish();
  const Saved done = saved(averager);
  const Tensor wanted = list[0].second.clone();
  Averager resumed(communicator, list, {.slice_mb = 0.001});
  resumed.load_state(rank == 0 ? done.tensors : open.tensors,
                     rank == 0 ? done.values : open.values);
  list[0].second.copy_(rank == 0 ? wanted : before);
  EXPECT_EQ(resumed.recover(), rank == 0 ? RoundOutcome::none : RoundOutcome::committed);
  EXPECT_TRUE(torch::equal(list[0].second, wanted));
  EXPECT_FALSE(resumed.started());
}

TEST(AveragerState, ARoundUnderWayOfOtherRanksOrFragmentsIsRefused) {
  const auto communicator = fresh_communicator();
  Averager::NamedTensorList list{{"x", on_device::zeros({3})}};
  Averager averager(communicator, list);
  averager.start();
  const Saved state = saved(averager);
  averager.finish();
  const auto refused = [&](const char* name, int64_t value) -> std::string {
    Saved other = state;
    other.values[name] = value;
    try {
      averager.load_state(other.tensors, other.values);
    } catch (const InputError& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  const int world = communicator->world_size();
  for (const auto& [name, value, says] : std::vector<std::tuple<const char*, int64_t, const char*>>{
           {"ranks", world + 1, "an open synchronisation of"},
           {"fragment", 1, "fragment=1"},
           {"fragment", -2, "fragment=-2"}}) {
    const std::string text = refused(name, value);
    EXPECT_NE(text.find(says), std::string::npos) << text;
  }
}

// The squares of such numbers need more than the 53 bits of a double.
TEST(AveragerState, RoundsAreTheSameRoundHoweverManyThereHaveBeen) {
  const auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  Averager::NamedTensorList list{{"x", on_device::zeros({3})}};
  Averager averager(communicator, list);
  for (const int64_t rounds :
       {int64_t{65535}, int64_t{1482914}, int64_t{1482915}, int64_t{94906267}, int64_t{1} << 40}) {
    Saved state = saved(averager);
    state.values["rounds"] = rounds;
    averager.load_state(state.tensors, state.values);
    for (int turn = 0; turn < 3; ++turn) {
      list[0].second.fill_(communicator->rank());
      ASSERT_NO_THROW(averager.average()) << rounds + turn;
      EXPECT_EQ(list[0].second[0].item<double>(), (world - 1) / 2.0);
    }
    EXPECT_EQ(averager.report().round, rounds + 3);
  }
}

TEST(AveragerState, WhatIsNotMeasuredIsNotANumber) {
  const auto communicator = fresh_communicator();
  if (communicator->world_size() == 1) {
    return; // no driver
  }
  for (const bool late : {false, true}) {
    Averager::NamedTensorList list{{"x", on_device::full({3}, communicator->rank(), at::kFloat)}};
    Averager driven(communicator, list,
                    {.outer = std::make_shared<DiLoCo>(), .sync = SyncStrategy::driver});
    Averager plain(communicator, list, {.sync = SyncStrategy::driver});
    const auto round = [&](Averager& averager, double weight) {
      if (late) {
        averager.start(weight);
        averager.finish();
      } else {
        averager.average(weight);
      }
      return averager.report();
    };
    EXPECT_GT(round(plain, 1).spread, 0);
    EXPECT_GT(plain.report().norm, 0);
    for (const AverageReport& report : {round(driven, 1), round(plain, 0)}) {
      EXPECT_TRUE(std::isnan(report.spread)) << report.spread;
      EXPECT_TRUE(std::isnan(report.norm)) << report.norm;
    }
  }
}

} // namespace hasten::averager_state_test
