// The state of a scope of LocalSGD. A run that is saved at any moment continues bit for bit. Worlds
// 1 to 4.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "accelerator/state_rig.h"
#include "local_sgd/local_sgd_rig.h"
#include "support/on_hosts.h"

namespace hasten::accelerator_test {

// A user's loop. It starts at the position of the state.
struct LocalSession : state_test::Session {
  using Session::Session;
  using Hook = std::function<void(int64_t step)>; // at the end of a loop's body

  // `before_step`: the hook or the load is between backward and optimizer.step().
  void run(LocalSGDOptions options, const std::filesystem::path& load, const Hook& at = {},
           const Hook& before_step = {}, bool loads_before_step = false) {
    auto [model, optimizer, batches, scheduler] = prepared();
    LocalSGD local_sgd(accelerator, model, std::move(options));
    const auto finish_body = [&, &optimizer = optimizer, &scheduler = scheduler] {
      optimizer.step();
      if (between) {
        between(); // not counted by the scope yet
      }
      scheduler.step();
      optimizer.zero_grad();
      local_sgd.step();
    };
    if (!load.empty()) {
      accelerator.load_state(load);
      if (loads_before_step) {
        finish_body();
      }
    }
    int64_t step = 0;
    for (auto epoch = static_cast<int64_t>(batches.epoch()); epoch < state_test::kEpochs; ++epoch) {
      batches.set_epoch(static_cast<uint64_t>(epoch));
      for (const Batch& batch : batches) {
        auto window = accelerator.accumulate(model);
        accelerator.backward(
            torch::nn::functional::cross_entropy(model->forward(batch["x"]), batch["y"]));
        ++step;
        if (before_step) {
          before_step(step);
        }
        finish_body();
        if (at) {
          at(step);
        }
      }
    }
    local_sgd.finish();
  }
  std::function<void()> between{};
};

void expect_exact_resumes(const std::shared_ptr<Communicator>& communicator,
                          const std::filesystem::path& folder,
                          const std::function<LocalSGDOptions()>& options, int64_t accumulation,
                          int64_t rows, const std::vector<int64_t>& places) {
  const auto name = [&](int64_t place) { return folder / ("state-" + std::to_string(place)); };
  LocalSession saving(communicator, accumulation, rows);
  saving.run(options(), {}, [&](int64_t step) {
    if (std::count(places.begin(), places.end(), step) > 0) {
      saving.accelerator.save_state(name(step));
    }
  });
  const auto expected = saving.everything();
  for (const int64_t place : places) {
    SCOPED_TRACE(testing::Message() << "saved after step " << place);
    LocalSession resumed(communicator, accumulation, rows, /*weights=*/99);
    resumed.run(options(), name(place));
    state_test::expect_equal_bits(resumed.everything(), expected);
  }
}

TEST(LocalSGDState, ResumedInMidRoundItIsTheUninterruptedRunBitForBit) {
  const auto communicator = testing_support::fresh_communicator();
  const auto folder = state_test::common_folder();
  const int64_t rows = 24 * communicator->world_size();
  // An outer step with momentum. A difference is being sent when the state is saved.
  const std::vector<std::function<LocalSGDOptions()>> kinds{
      [] {
        return LocalSGDOptions{.local_sgd_steps = 5,
                               .average = {.outer = std::make_shared<DiLoCo>()}};
      },
      [] { return LocalSGDOptions{.local_sgd_steps = 5, .delay = 3}; },
      // Saves before and after the end of plain training. The moments are averaged.
      [] {
        return LocalSGDOptions{
            .local_sgd_steps = 3, .post_local_start = 8, .moments = MomentPolicy::average};
      }};
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    SCOPED_TRACE(kind);
    // Saves between windows, and in the middle of a window.
    expect_exact_resumes(communicator, folder, kinds[kind], 2, rows, {15, 16, 18, 19});
  }
  if (communicator->world_size() > 1) {
    LocalSession outside(communicator, 2, rows);
    outside.prepared();
    const auto text =
        state_test::input_error([&] { outside.accelerator.load_state(folder / "state-16"); });
    EXPECT_NE(text.find("inside a LocalSGD scope"), std::string::npos) << text;
  }
}

TEST(LocalSGDState, OnHostsWithFoldersOfTheirOwnItGoesOnBitForBit) {
  const auto communicator = testing_support::on_hosts(
      testing_support::two_hosts(testing_support::test_world().world_size));
  const auto folder = state_test::common_folder() / ("host" + std::to_string(communicator->host()));
  expect_exact_resumes(communicator, folder,
                       [] { return LocalSGDOptions{.local_sgd_steps = 5, .delay = 3}; }, 2,
                       24 * communicator->world_size(), {15, 16, 19});
}

// Cases: which rank sums, whether sums are delayed, the number of fragments. The test saves after
// each step of two synchronisations of every fragment.
TEST(LocalSGDState, SavedAfterAnyStepOfAnyKindOfRoundItGoesOnBitForBit) {
  const auto communicator = testing_support::fresh_communicator();
  const auto folder = state_test::common_folder();
  const int64_t rows = 6 * communicator->world_size(); // 9 steps
  for (const SyncStrategy sync : {SyncStrategy::driver, SyncStrategy::all_reduce}) {
    for (const int64_t delay : {0, 2}) {
      for (const int64_t fragments : {1, 2}) {
        SCOPED_TRACE(testing::Message() << (sync == SyncStrategy::driver ? "driver" : "all")
                                        << " delay=" << delay << " fragments=" << fragments);
        const auto options = [&] {
          return LocalSGDOptions{
              .local_sgd_steps = 4,
              .delay = delay,
              .weigh_by_samples = true,
              .average = {.outer = fragments > 1 ? std::make_shared<DiLoCo>() : nullptr,
                          .sync = sync,
                          .fragments = fragments}};
        };
        expect_exact_resumes(communicator, folder, options, 1, rows, {1, 2, 3, 4, 5, 6, 7, 8});
      }
    }
  }
}

TEST(LocalSGDState, SavedBeforeTheOptimizersStepTheScopeCountsIt) {
  const auto communicator = testing_support::fresh_communicator();
  const auto folder = state_test::common_folder();
  const int64_t rows = 6 * communicator->world_size();
  const LocalSGDOptions options{.local_sgd_steps = 4};
  LocalSession saving(communicator, 1, rows);
  saving.run(options, {}, {}, [&](int64_t step) {
    if (step == 3) {
      saving.accelerator.save_state(folder / "state");
    }
  });
  const auto expected = saving.everything();
  LocalSession resumed(communicator, 1, rows, /*weights=*/99);
  resumed.run(options, folder / "state", {}, {}, /*loads_before_step=*/true);
  state_test::expect_equal_bits(resumed.everything(), expected);
}

// A loop that continued with the next batch would lose a step of the schedule.
TEST(LocalSGDState, AStepThatTheScopeHasNotCountedIsNotSaved) {
  const auto communicator = testing_support::fresh_communicator();
  if (communicator->world_size() == 1) {
    return; // the scope does nothing
  }
  const auto folder = state_test::common_folder();
  LocalSession saving(communicator, 1, 6 * communicator->world_size());
  saving.between = [&] {
    const auto text =
        state_test::input_error([&] { saving.accelerator.save_state(folder / "state"); });
    EXPECT_NE(text.find("has not counted the step"), std::string::npos) << text;
    EXPECT_FALSE(std::filesystem::exists(folder / "state"));
  };
  saving.run({.local_sgd_steps = 4}, {});
}

} // namespace hasten::accelerator_test
