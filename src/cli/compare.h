// What hasten compare decides from measurements: which batch is tried next, and which
// strategy is recommended; and what `hasten` and the ranks that it starts tell each
// other. Without LibTorch. Threading: none needed.
//
// A world is started for each strategy. Its ranks try batches under the limit until
// one does not fit, time steps of the largest that did, and end. A rank that runs out
// of memory in the middle of a step cannot go on, nor can those that wait for it:
// the world ends, and where that was not foreseen a new one goes on with what is known.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "commands.h"
#include "hasten/parallel/strategy.h"

namespace hasten {

/// A batch that fitted.
struct BatchTrial {
  /// Of one rank.
  int64_t rows = 0;
  /// Most bytes of tensors in its steps, on the rank that took most.
  int64_t peak_bytes = 0;
};

/// Finds the largest batch below a limit: doubling, then bisection, both cut short by
/// the line through the last two peaks. What it ends with was tried, and so was one
/// row more.
struct BatchSearch {
  int64_t limit_bytes = 0;
  /// Tried at most, >= 1.
  int64_t most_rows = 1;
  /// Least rows that ran out; 0: none.
  int64_t too_many = 0;
  /// Ascending.
  std::vector<BatchTrial> trials{};

  /// What to try; 0 where the largest is known.
  int64_t next_rows() const;
  /// Where the line says that these rows do not fit.
  bool foresees_shortage(int64_t rows) const;
  /// Takes back what seemed to fit before.
  void ran_out(int64_t rows);
  /// 0: none yet.
  int64_t largest_rows() const { return trials.empty() ? 0 : trials.back().rows; }
  /// Of one row more, by the last two trials; 0: not known.
  double bytes_per_row() const;
};

/// Timed updates of one size, over all ranks.
struct BatchTiming {
  /// 0: nothing was timed.
  int64_t rows = 0;
  double samples_per_second = 0;
  /// Median of an update, of the slowest rank.
  double step_seconds = 0;
  /// Share of it in which the slowest rank's backward waited for messages.
  double exposed_share = 0;
  /// Most of a rank, from its start on, building the model included.
  int64_t peak_bytes = 0;
};

/// What is known of a strategy: a file that goes from world to world. A rank that runs
/// out of memory writes it, else the first rank.
struct CompareState {
  /// The environment variable with the file's path.
  static constexpr const char* kVariable = "HASTEN_COMPARE_STATE";

  Strategy strategy = Strategy::ddp;
  BatchSearch search{};
  BatchTiming timing{};
};

CompareState read_compare_state(const std::filesystem::path& file);
void write_compare_state(const std::filesystem::path& file, const CompareState& state);

/// Exit code of a rank that ran out of memory.
inline constexpr int kExitOutOfMemory = 3;

/// What was found for one strategy.
struct StrategyReport {
  Strategy strategy = Strategy::ddp;
  /// Of the largest batch; of no rows where not one fits.
  BatchTiming timing{};
  /// Where none fits: what one row takes; 0: more than the host has.
  int64_t least_bytes = 0;

  bool fits() const { return timing.rows > 0; }
};

struct Recommendation {
  /// Index of the report; none where no strategy fits.
  std::optional<size_t> index{};
  /// One line: what to take, and why.
  std::string text{};
};

/// The most samples a second. Within 3 % of it the simpler one: that which comes first
/// in Strategy.
Recommendation recommend(const std::vector<StrategyReport>& reports);

std::string comparison_table(const CompareCommand& command, int64_t limit_bytes,
                             const std::vector<StrategyReport>& reports,
                             const Recommendation& recommendation);

/// Measures each strategy, prints the table and writes the JSON. `run_world` runs a world
/// with CompareState::kVariable set to `state_file` and returns where all went well or
/// memory ran out.
/// Throws InputError where no strategy fits, behind the table; what `run_world` throws.
void compare_strategies(const CompareCommand& command,
                        const std::function<void(const std::string& state_file)>& run_world);

} // namespace hasten
