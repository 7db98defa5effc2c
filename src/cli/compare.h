// What hasten compare decides from measurements: which batch is tried next, and which
// strategy is recommended; and what `hasten` and the ranks that it starts tell each
// other. Pure functions and values, without LibTorch. Threading: none needed.
//
// A world is started for each strategy. Its ranks try batches under the limit until
// one does not fit, time steps of the largest that did, and end. A rank that runs out
// of memory in the middle of a step cannot go on, nor can those that wait for it:
// the world ends, and where that was not foreseen a new one goes on with what is known.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
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
class BatchSearch {
 public:
  BatchSearch() = default;
  /// At most `most_rows` are tried, >= 1.
  BatchSearch(int64_t limit_bytes, int64_t most_rows)
      : limit_bytes_(limit_bytes), most_rows_(most_rows) {}

  /// What to try; 0 where the largest is known.
  int64_t next_rows() const;
  /// Where the line says that these rows do not fit.
  bool foresees_shortage(int64_t rows) const;
  void fitted(BatchTrial trial) { trials_.push_back(trial); }
  /// Takes back what seemed to fit before.
  void ran_out(int64_t rows);

  /// 0: none yet.
  int64_t largest_rows() const;
  int64_t most_rows() const { return most_rows_; }
  /// Ascending.
  const std::vector<BatchTrial>& trials() const { return trials_; }

  friend void to_json(nlohmann::json& json, const BatchSearch& search);
  friend void from_json(const nlohmann::json& json, BatchSearch& search);

 private:
  /// Of one row more, by the last two trials; 0: not known.
  double bytes_per_row() const;

  int64_t limit_bytes_ = 0;
  int64_t most_rows_ = 1;
  int64_t too_many_ = 0; // least rows that ran out; 0: none
  std::vector<BatchTrial> trials_{};
};

/// Timed updates of one size, over all ranks.
struct BatchTiming {
  int64_t rows = 0;
  double samples_per_second = 0;
  /// Median of an update, of the slowest rank.
  double step_seconds = 0;
  /// Share of it in which the slowest rank's backward waited for messages.
  double exposed_share = 0;
  /// Most of a rank, from its start on, building the model included.
  int64_t peak_bytes = 0;
};

/// What a world is to find out; reaches its ranks by the environment.
struct CompareTask {
  static constexpr const char* kVariable = "HASTEN_COMPARE_TASK";

  Strategy strategy = Strategy::ddp;
  /// Most bytes of tensors a rank.
  int64_t limit_bytes = 0;
  /// Each rank leaves its CompareOutcome here.
  std::filesystem::path folder{};
  BatchSearch search{};

  std::filesystem::path file_of(int rank) const;
};

/// How far a rank has come. All ranks' are alike, but that a rank which the others
/// wait for may be a trial ahead.
struct CompareOutcome {
  BatchSearch search{};
  std::optional<BatchTiming> timing{};
  /// What did not fit; 0: nothing was short here.
  int64_t ran_out_rows = 0;
  /// Most bytes of tensors from the start on, of any rank as far as they have met.
  int64_t peak_bytes = 0;
  /// Why the rank failed otherwise; empty: it did not, or has said so.
  std::string failure{};
};

/// Exit code of a rank that ran out of memory.
inline constexpr int kExitOutOfMemory = 3;

void to_json(nlohmann::json& json, const CompareTask& task);
void from_json(const nlohmann::json& json, CompareTask& task);
void to_json(nlohmann::json& json, const CompareOutcome& outcome);
void from_json(const nlohmann::json& json, CompareOutcome& outcome);

/// What was found for one strategy.
struct StrategyReport {
  Strategy strategy = Strategy::ddp;
  /// Of the largest batch; none where not one row fits.
  std::optional<BatchTiming> timing{};
  /// The batch is the largest that was tried, not that fits.
  bool tried_no_more = false;
  /// Where none fits: what one row takes; 0: more than the host has.
  int64_t least_bytes = 0;
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
nlohmann::json comparison_json(const CompareCommand& command, int64_t limit_bytes,
                               const std::vector<StrategyReport>& reports,
                               const Recommendation& recommendation);

} // namespace hasten
