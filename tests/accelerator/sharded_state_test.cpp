// States of sharded models, worlds 1 to 4. The files have each rank's rows. Any strategy and any
// number of ranks can continue from them.
#include <filesystem>

#include "accelerator/sharded_rig.h"
#include "accelerator/state_rig.h"
#include "hasten/io/safetensors.h"

namespace hasten::sharded_test {

TEST(ShardedState, SaveModelWritesTheUnshardedModelUnderEveryStrategy) {
  const auto common = state_test::common_folder();
  for (const Strategy strategy : {Strategy::ddp, Strategy::zero2, Strategy::fsdp}) {
    SCOPED_TRACE(strategy_name(strategy));
    const Training run{.strategy = strategy};
    Accelerator accelerator(options_of(run), testing_support::fresh_communicator());
    Stack stack = make_stack(run, 0);
    const NamedTensors before = [&] {
      NamedTensors all;
      for (const auto& item : stack->named_parameters()) {
        all[item.key()] = item.value().detach().clone();
      }
      return all;
    }();
    accelerator.prepare(stack);
    const auto folder = common / strategy_name(strategy);
    accelerator.save_model(stack, folder);
    const NamedTensors saved = accelerator.get_state_dict(stack);
    EXPECT_EQ(saved.empty(), !accelerator.is_main_process());
    const SafetensorsReader file(folder / "model.safetensors");
    for (const auto& [name, tensor] : before) {
      EXPECT_TRUE(torch::equal(file.tensor(name), tensor.cpu())) << name;
      EXPECT_TRUE(saved.empty() || torch::equal(saved.at(name).cpu(), tensor.cpu())) << name;
    }
    accelerator.end_training();
  }
}

TEST(ShardedState, AnyStrategyGoesOnFromAny) {
  state_test::expect_any_strategy_goes_on<Learning>(1e-10, 1e-10);
}

// From all ranks to fewer ranks, then back to all ranks.
TEST(ShardedState, AnyNumberOfRanksGoesOnFromAny) {
  const auto folder = state_test::common_folder();
  const auto everyone = testing_support::fresh_communicator();
  Learning saving(Strategy::fsdp, everyone);
  saving.step(0);
  saving.accelerator.save_state(folder / "all");
  saving.step(1);
  const auto later = saving.whole();
  std::vector<int> ranks;
  for (int count = 1; count < everyone->world_size(); ++count) {
    SCOPED_TRACE(count);
    ranks.push_back(count - 1);
    const auto place = folder / std::to_string(count);
    if (everyone->rank() < count) {
      CommunicatorOptions options = everyone->options();
      options.name += " of " + std::to_string(count);
      const auto group = everyone->new_group(ranks, options);
      Learning fewer(Strategy::fsdp, group);
      fewer.accelerator.load_state(folder / "all");
      fewer.step(1);
      state_test::expect_within(fewer.whole(), later, 1e-10);
      fewer.accelerator.save_state(place);
      group->close();
    }
    everyone->barrier("saved by fewer");
    Learning all(Strategy::fsdp, everyone);
    all.accelerator.load_state(place);
    state_test::expect_within(all.whole(), later, 1e-10);
  }
}

TEST(ShardedState, EachRankWritesItsRows) {
  const auto folder = state_test::common_folder();
  const auto everyone = testing_support::fresh_communicator();
  const int world = everyone->world_size();
  Learning saving(Strategy::fsdp, everyone);
  saving.step(0);
  saving.accelerator.save_state(folder / "state");
  if (world == 1) {
    return;
  }
  int64_t rows = 0;
  for (int rank = 0; rank < world; ++rank) {
    const SafetensorsReader file(folder / "state" /
                                 ("state_rank_" + std::to_string(rank) + ".safetensors"));
    const Tensor words = file.tensor("sharded.model.0.words.weight");
    EXPECT_EQ(words.size(0), std::clamp<int64_t>(13 - rank * ((13 + world - 1) / world), 0,
                                                 (13 + world - 1) / world));
    EXPECT_EQ(file.tensor("sharded.optimizer.0.exp_avg.model.0.words.weight").sizes(),
              words.sizes());
    rows += words.size(0);
  }
  EXPECT_EQ(rows, 13);
}

TEST(ShardedState, AFileThatLacksRowsIsNamedAndNothingChanged) {
  const auto folder = state_test::common_folder();
  const auto everyone = testing_support::fresh_communicator();
  if (everyone->world_size() == 1) {
    return;
  }
  Learning saving(Strategy::fsdp, everyone);
  saving.step(0);
  const auto place = folder / "state";
  saving.accelerator.save_state(place);
  everyone->barrier("saved");
  const std::string file = "state_rank_1.safetensors";
  if (everyone->is_main()) {
    std::filesystem::resize_file(place / file, std::filesystem::file_size(place / file) / 2);
  }
  everyone->barrier("cut");
  Learning then(Strategy::fsdp, everyone);
  const auto before = then.whole();
  const std::string error = state_test::input_error([&] { then.accelerator.load_state(place); });
  EXPECT_NE(error.find(file), std::string::npos) << error;
  state_test::expect_within(then.whole(), before, 0);
}

// The parameters are whole there, but the files have rows.
TEST(ShardedState, InsideAForwardItIsRefusedBeforeAnythingIsWritten) {
  const auto folder = state_test::common_folder();
  for (const Strategy strategy : {Strategy::zero1, Strategy::fsdp}) {
    Learning learner(strategy, testing_support::fresh_communicator());
    learner.step(0);
    const bool refused = learner.accelerator.num_processes() > 1;
    const auto place = folder / strategy_name(strategy);
    learner.accelerator.save_state(place / "before");
    const auto expect_refusal = [&](const std::function<void()>& call) {
      const std::string said = state_test::input_error(call);
      EXPECT_EQ(said.find("a forward of a sharded model") != said.npos, refused) << said;
    };
    {
      const auto forward = learner.accelerator.forward_scope(learner.stack);
      expect_refusal([&] { learner.accelerator.save_state(place / "inside"); });
      expect_refusal([&] { learner.accelerator.load_state(place / "before"); });
      expect_refusal([&] { learner.whole(); });
    }
    EXPECT_EQ(std::filesystem::exists(place / "inside"), !refused);
    learner.accelerator.save_state(place / "behind");
    learner.accelerator.load_state(place / "behind");
    learner.accelerator.end_training();
  }
}

} // namespace hasten::sharded_test
