// Trainer with a strategy, worlds 1 to 4. The run and its files equal those of whole copies.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>

#include "hasten/accelerator/accelerator.h"
#include "hasten/io/safetensors.h"
#include "hasten/trainer/trainer.h"
#include "support/communicator.h"
#include "support/temporary_folder.h"
#include "support/world.h"
#include "trainer/toy_text.h"

namespace hasten::sharded_trainer_test {

// A folder of rank 0 that is removed at the end of the case. Collective.
std::filesystem::path common_folder() {
  const auto store = testing_support::test_store();
  if (testing_support::test_world().rank == 0) {
    auto folder = std::make_shared<testing_support::TemporaryFolder>();
    testing_support::at_case_end([folder] {});
    store->set("sharded folder", folder->path().string());
  }
  return store->get_to_str("sharded folder");
}

// Two copies, if the number of ranks is even.
int shard_size_of(Strategy strategy) {
  const int world = testing_support::test_world().world_size;
  return strategy == Strategy::hsdp && world % 2 == 0 ? world / 2 : 0;
}

struct Finished {
  nlohmann::json history{};
  NamedTensors model{}; // as the output folder has it
};

// Two epochs with evaluations, checkpoints, and the best model at the end.
Finished run(const std::filesystem::path& folder, Strategy strategy) {
  TrainingArguments a = toy::arguments();
  a.output_dir = folder.string();
  a.num_train_epochs = 3;
  a.per_device_train_batch_size = 2;
  a.gradient_accumulation_steps = 2;
  a.eval_strategy = IntervalStrategy::epoch;
  a.save_strategy = SaveStrategy::epoch;
  a.load_best_model_at_end = true;
  a.learning_rate = 0.4; // so that the last model is not the best
  a.strategy = strategy;
  a.shard_size = shard_size_of(strategy);
  a.resume_from_checkpoint = "auto";
  auto model = std::make_shared<toy::Classifier>();
  const auto texts = std::make_shared<toy::Texts>(8 * testing_support::test_world().world_size + 1);
  AcceleratorOptions options;
  options.gradient_accumulation_steps = a.gradient_accumulation_steps;
  options.strategy = strategy;
  options.shard_size = shard_size_of(strategy);
  const auto communicator = testing_support::fresh_communicator();
  Trainer trainer(model, toy::loss_function(model), a, texts, std::make_shared<toy::Texts>(9),
                  ComputeMetrics{}, std::make_shared<Accelerator>(options, communicator));
  trainer.train();
  communicator->barrier("written");
  Finished result;
  for (const auto& record : trainer.state().log_history) {
    for (const char* name : {"loss", "grad_norm", "eval_loss"}) {
      if (record.contains(name)) {
        result.history.push_back(record.at(name));
      }
    }
  }
  result.model = SafetensorsReader(folder / "model.safetensors").read_all();
  communicator->barrier("read");
  return result;
}

void expect_same(const Finished& a, const Finished& b) {
  // Ranks that had no row in a step do not know its norm.
  const bool knows = testing_support::test_world().rank == 0;
  ASSERT_EQ(a.history.size(), b.history.size());
  for (size_t i = 0; knows && i < a.history.size(); ++i) {
    EXPECT_NEAR(a.history[i].get<double>(), b.history[i].get<double>(), 1e-8) << "record " << i;
  }
  ASSERT_EQ(a.model.size(), b.model.size());
  for (const auto& [name, tensor] : a.model) {
    ASSERT_EQ(tensor.sizes(), b.model.at(name).sizes()) << name;
    EXPECT_LE((tensor - b.model.at(name)).abs().max().item<double>(), 1e-8) << name;
  }
}

TEST(ShardedTrainer, GivesTheRunOfWholeCopiesWithItsFiles) {
  const auto folder = common_folder();
  const Finished whole = run(folder / "ddp", Strategy::ddp);
  for (const Strategy strategy : {Strategy::zero1, Strategy::fsdp, Strategy::hsdp}) {
    SCOPED_TRACE(strategy_name(strategy));
    expect_same(whole, run(folder / strategy_name(strategy), strategy));
  }
}

TEST(ShardedTrainer, GoesOnUnderAnotherStrategy) {
  const auto folder = common_folder();
  const Finished whole = run(folder / "ddp", Strategy::ddp);
  for (const auto& [before, after] : {std::pair{Strategy::ddp, Strategy::fsdp},
                                      {Strategy::fsdp, Strategy::zero2},
                                      {Strategy::fsdp, Strategy::ddp}}) {
    SCOPED_TRACE(std::string(strategy_name(before)) + " to " + strategy_name(after));
    const auto place = folder / (std::string(strategy_name(before)) + "-" + strategy_name(after));
    run(place, before);
    // As if the run had been stopped after the first epoch.
    if (testing_support::test_world().rank == 0) {
      for (const auto& entry : std::filesystem::directory_iterator(place)) {
        if (entry.path().filename() != "checkpoint-3") {
          std::filesystem::remove_all(entry.path());
        }
      }
    }
    testing_support::fresh_communicator()->barrier("stopped");
    expect_same(whole, run(place, after));
  }
}

} // namespace hasten::sharded_trainer_test
