// hasten compare: real worlds with a memory limit.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/run_program.h"

namespace hasten {

namespace compare_programs_test {

using testing_support::ProgramOptions;
using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::TemporaryFolder;

/// The arguments for bert-tiny with short rows. `folder` is for temporary files.
ProgramRun compare(const TemporaryFolder& folder, const std::vector<std::string>& more) {
  std::vector<std::string> command{"hasten",       "compare", "--model", "bert-tiny",
                                   "--max-length", "32",      "--steps", "3"};
  command.insert(command.end(), more.begin(), more.end());
  std::filesystem::create_directories(folder / "tmp");
  ProgramOptions options;
  options.environment.emplace_back("TMPDIR", (folder / "tmp").string());
  ProgramRun run = run_program(command, options);
  EXPECT_TRUE(std::filesystem::is_empty(folder / "tmp"));
  return run;
}

} // namespace compare_programs_test

TEST(Compare, ShardedModelsTakeLargerBatchesUnderOneLimit) {
  using namespace compare_programs_test;
  const TemporaryFolder folder;
  const int64_t limit = int64_t{88} << 20;
  const ProgramRun run =
      compare(folder, {"--nproc-per-node", "2", "--strategies", "ddp,fsdp", "--memory-limit", "88M",
                       "--json", folder / "found.json"});
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_FALSE(run.said("error")) << run.error;
  const auto found = nlohmann::json::parse(std::ifstream(folder / "found.json"));
  EXPECT_EQ(found.at("memory_limit_bytes"), limit);
  const auto& strategies = found.at("strategies");
  ASSERT_EQ(strategies.size(), 2u);
  for (const auto& strategy : strategies) {
    EXPECT_TRUE(strategy.at("fits").get<bool>());
    EXPECT_LE(strategy.at("peak_bytes").get<int64_t>(), limit);
    const double rows = strategy.at("largest_batch").get<double>();
    EXPECT_GE(rows, 1);
    EXPECT_NEAR(
        strategy.at("samples_per_second").get<double>() * strategy.at("step_seconds").get<double>(),
        2 * rows, 1e-6 * rows);
    // At least an all-reduce of the 4.4 million gradients between two ranks.
    EXPECT_GT(strategy.at("sent_bytes").get<int64_t>(), 17'000'000);
    EXPECT_GE(strategy.at("exposed_share").get<double>(), 0);
    EXPECT_LE(strategy.at("exposed_share").get<double>(), 1);
    // The memory is full: another row would not fit.
    EXPECT_GT(strategy.at("peak_bytes").get<double>(), 0.9 * limit);
    EXPECT_NE(run.out.find("  " + strategy.at("strategy").get<std::string>() + " "),
              std::string::npos)
        << run.out;
  }
  EXPECT_GT(strategies[1].at("largest_batch").get<int64_t>(),
            strategies[0].at("largest_batch").get<int64_t>());
  const auto reason = found.at("reason").get<std::string>();
  EXPECT_EQ(reason.rfind("Take " + found.at("recommended").get<std::string>(), 0), 0) << reason;
  EXPECT_NE(run.out.find(reason), std::string::npos) << run.out;
}

} // namespace hasten
