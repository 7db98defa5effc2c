// hasten train --strategy fsdp, and hasten state on its output.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/small_reviews.h"
#include "hasten/base/files.h"

namespace hasten {

namespace sharded_programs_test {

using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::TemporaryFolder;

std::filesystem::path train(const std::filesystem::path& folder, const std::string& strategy) {
  std::filesystem::create_directories(folder / strategy);
  std::ofstream(folder / strategy / "train.csv") << testing_support::small_reviews(66);
  const ProgramRun run = run_program(testing_support::train_arguments(
      folder / strategy, {"--nproc", "2", "--strategy", strategy, "--epochs", "1", "--eval-split",
                          "0.1", "--batch-size", "7"}));
  EXPECT_EQ(run.code, 0) << run.error;
  return folder / strategy / "out";
}

std::filesystem::path checkpoint_in(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with("checkpoint-")) {
      return entry.path();
    }
  }
  return {};
}

std::vector<double> losses_in(const std::filesystem::path& folder) {
  std::vector<double> losses;
  std::ifstream file(folder / "metrics.jsonl");
  for (std::string line; std::getline(file, line);) {
    const auto record = nlohmann::json::parse(line);
    for (const char* name : {"loss", "eval_loss"}) {
      if (record.contains(name)) {
        losses.push_back(record.at(name).get<double>());
      }
    }
  }
  return losses;
}

} // namespace sharded_programs_test

TEST(ShardedPrograms, TrainAsWholeCopiesDoAndArePutTogether) {
  using namespace sharded_programs_test;
  const TemporaryFolder folder;
  const auto whole = train(folder.path(), "ddp");
  const auto sharded = train(folder.path(), "fsdp");
  const auto expected = losses_in(whole), losses = losses_in(sharded);
  ASSERT_GE(expected.size(), 2u);
  ASSERT_EQ(expected.size(), losses.size());
  for (size_t i = 0; i < losses.size(); ++i) {
    EXPECT_NEAR(losses[i], expected[i], 1e-5);
  }

  const auto checkpoint = checkpoint_in(sharded);
  const ProgramRun inspect = run_program({"hasten", "state", "inspect", checkpoint, "--json"});
  ASSERT_EQ(inspect.code, 0) << inspect.error;
  const auto state = nlohmann::json::parse(inspect.out);
  EXPECT_EQ(state.at("world_size"), 2);
  EXPECT_EQ(state.at("strategy"), "fsdp");
  int64_t shards = 0;
  for (const auto& tensor : state.at("tensors")) {
    const auto& rows = tensor.at("rows");
    if (rows.is_null()) {
      continue;
    }
    ++shards;
    EXPECT_EQ(rows[0][2].get<int64_t>() + rows[1][2].get<int64_t>(),
              tensor.at("shape")[0].get<int64_t>());
  }
  EXPECT_GT(shards, 100); // parameters and two moments each

  // The checkpoint also has the whole model for transformers, with the same bytes.
  const ProgramRun consolidate = run_program(
      {"hasten", "state", "consolidate", checkpoint, "--output", folder / "whole.safetensors"});
  ASSERT_EQ(consolidate.code, 0) << consolidate.error;
  EXPECT_EQ(read_file(folder / "whole.safetensors"), read_file(checkpoint / "model.safetensors"));

  std::filesystem::resize_file(checkpoint / "state_rank_1.safetensors", 1000);
  const ProgramRun damaged = run_program(
      {"hasten", "state", "consolidate", checkpoint, "--output", folder / "none.safetensors"});
  EXPECT_EQ(damaged.code, 2);
  EXPECT_NE(damaged.error.find("state_rank_1.safetensors"), std::string::npos) << damaged.error;
  EXPECT_FALSE(std::filesystem::exists(folder / "none.safetensors"));
}

TEST(LocalSGDPrograms, ItsFlagsReachTheScope) {
  using namespace sharded_programs_test;
  const TemporaryFolder folder;
  std::ofstream(folder / "train.csv") << testing_support::small_reviews(40);
  const ProgramRun run =
      run_program(testing_support::train_arguments(folder.path(), {"--nproc",
                                                                   "2",
                                                                   "--max-steps",
                                                                   "10",
                                                                   "--batch-size",
                                                                   "2",
                                                                   "--max-length",
                                                                   "16",
                                                                   "--logging-steps",
                                                                   "1",
                                                                   "--save-strategy",
                                                                   "no",
                                                                   "--local-sgd-steps",
                                                                   "4",
                                                                   "--local-sgd-post-local-start",
                                                                   "2",
                                                                   "--local-sgd-delay",
                                                                   "3",
                                                                   "--local-sgd-outer",
                                                                   "diloco",
                                                                   "--local-sgd-outer-lr",
                                                                   "0.5",
                                                                   "--local-sgd-outer-momentum",
                                                                   "0.8",
                                                                   "--local-sgd-inner-steps",
                                                                   "2",
                                                                   "--local-sgd-group-size",
                                                                   "1",
                                                                   "--local-sgd-driver"}));
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_TRUE(run.said("after 2 steps of plain training, 3 steps late, by diloco")) << run.error;
  std::vector<nlohmann::json> rounds; // of each step
  std::ifstream file(folder / "out" / "metrics.jsonl");
  for (std::string line; std::getline(file, line);) {
    const auto record = nlohmann::json::parse(line);
    if (record.at("type") == "train") {
      rounds.push_back(record.value("local_sgd_rounds", nlohmann::json()));
      EXPECT_TRUE(record.at("loss").is_number()) << line;
      if (rounds.back() == 1) { // a driver with an outer step does not know it
        EXPECT_TRUE(record.at("local_sgd_spread").is_null()) << line;
      }
    }
  }
  // Begun after steps 6 and 10, of which the first arrives after step 9; at the end all are averaged.
  EXPECT_EQ(nlohmann::json(rounds), nlohmann::json({nullptr, 0, 0, 0, 0, 0, 0, 0, 1, 1}));
}

TEST(ShardedPrograms, WhatIsNoStateIsRefused) {
  using namespace sharded_programs_test;
  const TemporaryFolder folder;
  for (const auto& [arguments, says] :
       std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"inspect", folder.path()}, "has no state.json"},
           {{"inspect"}, "inspect FOLDER or consolidate FOLDER"},
           {{"mend", folder.path()}, "inspect FOLDER or consolidate FOLDER"},
           {{"consolidate", folder.path()}, "--output="}}) {
    std::vector<std::string> command{"hasten", "state"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    const ProgramRun run = run_program(command);
    EXPECT_EQ(run.code, 2) << run.out;
    EXPECT_NE(run.error.find(says), std::string::npos) << run.error;
  }
}

} // namespace hasten
