// For tests that break ranks on purpose (hasten_tests(fault …)): one function is
// run by N processes of this program, and the test sees how each of them ended.
//
//   HASTEN_RANK_FUNCTION(ReduceUntilItFails) {
//     auto communicator = Communicator::create(rank.world(), …);
//     rank.fault_here();
//     communicator->all_reduce(…); // throws on those that are left
//   }
//   TEST(CommFault, KilledRankIsNamed) {
//     const auto ranks = testing_support::spawn(
//         3, "ReduceUntilItFails", {.kind = FaultKind::kill, .rank = 1});
//     EXPECT_THAT(ranks[0].error, HasSubstr("rank 1"));
//   }
#pragma once

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "hasten/base/process.h"
#include "hasten/base/world.h"

namespace hasten::testing_support {

enum class FaultKind {
  none,
  kill, // SIGKILL
  freeze, // SIGSTOP; killed by the parent once all others have ended
  late, // sleeps for `delay`, then goes on
  fail, // throws std::runtime_error("planted failure")
};

struct Fault {
  FaultKind kind = FaultKind::none;
  /// The rank it happens to.
  int rank = 0;
  std::chrono::milliseconds delay{0};
};

struct SpawnWorldOptions {
  /// After this the ranks that are left are killed and reported as timed out.
  std::chrono::seconds deadline{30};
  std::vector<std::pair<std::string, std::string>> environment{};
};

/// How one rank went.
struct RankReport {
  ProcessEnd end{}; // 0: returned; 1: an exception or a failed EXPECT
  bool timed_out = false;
  /// what() of the exception that left the function, and its type.
  std::string error{};
  std::string error_type{};
  /// From the fault to this rank's end of the function. Negative: not both
  /// were seen.
  double seconds_after_fault = -1;
  /// What the function said with report().
  nlohmann::json values = nlohmann::json::object();
};

/// What a rank function sees of its process.
class FaultRank {
 public:
  virtual ~FaultRank() = default;
  /// From torchrun's variables; port and descriptor are unused so far.
  virtual const World& world() const = 0;
  /// The planted fault happens here, if this is its rank; nothing elsewhere.
  virtual void fault_here() = 0;
  virtual bool is_faulty() const = 0;
  /// A value for the test to look at.
  virtual void report(const std::string& key, nlohmann::json value) = 0;
};

/// Runs the function registered as `function` on `world_size` ranks; blocks
/// until all have ended. EXPECTs that failed in ranks fail the calling test.
/// Leaves no process behind.
std::vector<RankReport> spawn(int world_size, const std::string& function, const Fault& fault = {},
                              const SpawnWorldOptions& options = {});

using RankFunction = void (*)(FaultRank&);

/// For the macro below.
bool register_rank_function(const char* name, RankFunction function);

/// In a process that spawn() made: runs its function, returns the exit code.
int run_rank_function();

/// Defines a function that spawn() can run, with a parameter `rank`.
#define HASTEN_RANK_FUNCTION(name)                                                     \
  static void rank_function_##name(::hasten::testing_support::FaultRank&);             \
  [[maybe_unused]] static const bool rank_function_registered_##name =                 \
      ::hasten::testing_support::register_rank_function(#name, &rank_function_##name); \
  static void rank_function_##name([[maybe_unused]] ::hasten::testing_support::FaultRank& rank)

} // namespace hasten::testing_support
