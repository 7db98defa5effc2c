// The decisions of hasten compare: which batch to try next and which strategy to recommend; and
// the file by which `hasten` and the ranks that it starts communicate. Without LibTorch.
// Threading: none needed.
//
// A world is started for each strategy. Its ranks run the Trainer for a few steps with batches under
// the limit until one does not fit, time steps of the largest that did, and end. A rank that runs out of memory in the middle
// of a step cannot continue, and neither can its waiting peers. Then the world ends. If that was
// not predicted, a new world continues with the results so far.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "commands.h"
#include "hasten/config/strategy.h"

namespace hasten {

/// A batch that fits.
struct BatchTrial {
  /// Samples on one rank.
  int64_t rows = 0;
  /// Peak bytes of tensors in its steps, the maximum over ranks.
  int64_t peak_bytes = 0;
};

/// Finds the largest batch that fits: doubling, then bisection. The line through the last two
/// peaks shortens both. The result was tried, and so was a batch with one more sample.
struct BatchSearch {
  /// 0: the ranks set it to the share of the device's memory that each of them may use.
  int64_t limit_bytes = 0;
  /// Largest batch to try, >= 1.
  int64_t most_rows = 1;
  /// Smallest batch that ran out of memory; 0: none.
  int64_t too_many = 0;
  /// Ascending.
  std::vector<BatchTrial> trials{};

  /// The batch to try next; 0 if the largest is known.
  int64_t next_rows() const;
  /// True if, by the line, this batch does not fit.
  bool foresees_shortage(int64_t rows) const;
  /// Records that a batch ran out of memory, and drops trials that are not smaller.
  void ran_out(int64_t rows);
  /// 0: none yet.
  int64_t largest_rows() const { return trials.empty() ? 0 : trials.back().rows; }
  /// Bytes per additional sample, from the last two trials; 0: unknown.
  double bytes_per_row() const;
};

/// Timed steps of one batch size, over all ranks.
struct BatchTiming {
  /// 0: nothing was timed.
  int64_t rows = 0;
  double samples_per_second = 0;
  /// Median time of a step on the slowest rank.
  double step_seconds = 0;
  /// Fraction of it that the slowest rank waited for communication.
  double exposed_share = 0;
  /// What the rank that sends most sends in a step, through shared memory and TCP; 0: unknown.
  int64_t sent_bytes = 0;
  /// Peak of a rank, including the building of the model.
  int64_t peak_bytes = 0;
};

/// The results for a strategy, in a file that is passed from world to world. A rank that runs out
/// of memory writes it, otherwise the first rank.
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

/// The result for one strategy.
struct StrategyReport {
  Strategy strategy = Strategy::ddp;
  /// Timing of the largest batch; 0 samples if none fits.
  BatchTiming timing{};
  /// If none fits: the memory of one sample; 0: more than the device has.
  int64_t least_bytes = 0;

  bool fits() const { return timing.rows > 0; }
};

struct Recommendation {
  /// Index of the report; empty if no strategy fits.
  std::optional<size_t> index{};
  /// One line: the strategy to use, and why.
  std::string text{};
};

/// Recommends the strategy with the most samples per second. Of those within 3 % it recommends the
/// simplest, which is the first in the enumeration Strategy.
Recommendation recommend(const std::vector<StrategyReport>& reports);

std::string comparison_table(const CompareCommand& command, int64_t limit_bytes,
                             const std::vector<StrategyReport>& reports,
                             const Recommendation& recommendation);

/// Measures each strategy, prints the table and writes the JSON file. `run_world` runs a world
/// with CompareState::kVariable set to `state_file`. It returns if the world succeeds or runs out
/// of memory, and otherwise throws.
/// Throws InputError, after printing the table, if no strategy fits.
void compare_strategies(const CompareCommand& command,
                        const std::function<void(const std::string& state_file)>& run_world);

} // namespace hasten
