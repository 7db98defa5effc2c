// hasten compare on a device.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "compare.h"
#include "hasten/core/memory.h"
#include "run.h"
#include "support/temporary_folder.h"
#include "support/test_device.h"

namespace hasten::device_compare_test {

using testing_support::set_device_memory_limit;
using testing_support::TemporaryFolder;
using testing_support::test_device;

static int64_t live() { return memory_stats(test_device()).live_bytes; }

/// What the comparison found for ddp. Its worlds are this process alone.
static nlohmann::json compare(int64_t limit_bytes) {
  const TemporaryFolder folder;
  CompareCommand command;
  command.model = "bert-tiny";
  command.vocab_size = 100;
  command.nproc = 1;
  command.strategies = {Strategy::ddp};
  command.memory_limit_bytes = limit_bytes;
  command.max_batch_size = 512;
  command.steps = 2;
  command.json = folder / "found.json";
  command.arguments.device = "test_device:0";
  command.arguments.max_length = 16;
  compare_strategies(command, [&](const std::string& state_file) {
    reset_peak_memory(test_device()); // as in a new process
    ASSERT_EQ(setenv(CompareState::kVariable, state_file.c_str(), 1), 0);
    const int code = run_command(command);
    EXPECT_TRUE(code == 0 || code == kExitOutOfMemory);
  });
  unsetenv(CompareState::kVariable);
  testing_support::take_device_errors(); // of steps that ran out of memory
  return nlohmann::json::parse(std::ifstream(command.json));
}

TEST(DeviceCompare, WithoutALimitARankTakesNineTenthsOfTheDevicesMemory) {
  const int64_t left = int64_t{40} << 20;
  set_device_memory_limit(static_cast<size_t>(live() + left));
  const int64_t share = live() + left / 10 * 9;
  const nlohmann::json found = compare(0);
  set_device_memory_limit(0);
  EXPECT_EQ(found.at("memory_limit_bytes"), share);
  const auto& ddp = found.at("strategies").at(0);
  EXPECT_LE(ddp.at("peak_bytes"), share);
  EXPECT_GT(ddp.at("peak_bytes").get<double>(), 0.9 * static_cast<double>(share));
}

TEST(DeviceCompare, TheLimitHoldsOnADeviceThatHasMore) {
  const int64_t limit = live() + (int64_t{30} << 20);
  const auto found = compare(limit).at("strategies").at(0);
  EXPECT_LE(found.at("peak_bytes"), limit);
  EXPECT_GT(found.at("peak_bytes").get<double>(), 0.9 * static_cast<double>(limit));
  EXPECT_LT(found.at("largest_batch"), 512);
}

} // namespace hasten::device_compare_test
