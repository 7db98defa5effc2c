// For tests that break ranks on purpose (hasten_tests(fault …)). N processes of this program run
// one function, and the test gets the end of each.
//
//   HASTEN_RANK_FUNCTION(ReduceUntilItFails) {
//     auto communicator = Communicator::create(rank.world(), …);
//     rank.fault_here();
//     communicator->all_reduce(…); // throws on the other ranks
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
  freeze, // SIGSTOP; the parent kills it after all others have ended
  late, // sleeps for `delay`, then continues
  fail, // throws std::runtime_error("planted failure")
};

struct Fault {
  FaultKind kind = FaultKind::none;
  /// The rank that gets the fault.
  int rank = 0;
  std::chrono::milliseconds delay{0};
};

struct SpawnWorldOptions {
  /// After this time the remaining ranks are killed and reported as timed out.
  std::chrono::seconds deadline{30};
  std::vector<std::pair<std::string, std::string>> environment{};
};

/// The result of one rank.
struct RankReport {
  ProcessEnd end{}; // 0: returned; 1: an exception or a failed EXPECT
  bool timed_out = false;
  /// what() of the exception that left the function, and its type.
  std::string error{};
  std::string error_type{};
  /// Time from the fault to the end of this rank's function. Negative if one of them did not
  /// happen.
  double seconds_after_fault = -1;
  /// The values that the function passed to report().
  nlohmann::json values = nlohmann::json::object();
};

/// What a rank function knows of its process.
class FaultRank {
 public:
  virtual ~FaultRank() = default;
  /// From torchrun's variables. No group has used the port and the descriptor yet.
  virtual const World& world() const = 0;
  /// Causes the planted fault if this is its rank. Does nothing on other ranks.
  virtual void fault_here() = 0;
  virtual bool is_faulty() const = 0;
  /// Sends a value to the test.
  virtual void report(const std::string& key, nlohmann::json value) = 0;
};

/// Runs the function that is registered as `function` on `world_size` ranks. Blocks until all have
/// ended. An EXPECT that fails in a rank fails the calling test. No process remains.
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
