#include "compare_worlds.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "compare.h"
#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/files.h"
#include "hasten/base/host_memory.h"
#include "hasten/base/json.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"

namespace hasten::detail {

/// Where ranks leave what they found; goes with its scope.
class OutcomeFolder {
 public:
  OutcomeFolder() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "hasten-compare-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) {
      throw Error("cli::compare", "cannot make a folder: " + pattern, {},
                  "let TMPDIR name a folder you may write to");
    }
    path_ = pattern;
  }
  ~OutcomeFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  OutcomeFolder(const OutcomeFolder&) = delete;
  OutcomeFolder& operator=(const OutcomeFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// What a rank that ran out of memory found, or, where all went well, the first rank.
CompareOutcome outcome_of_world(CompareTask task, const StartWorld& start) {
  const OutcomeFolder folder;
  task.folder = folder.path();
  const LaunchResult result = start(nlohmann::json(task).dump());
  const auto read = [&](size_t rank) {
    return read_json_file("cli::compare", task.file_of(static_cast<int>(rank)))
        .get<CompareOutcome>();
  };
  if (result.exit_code == kExitOk) {
    return read(0);
  }
  for (size_t rank = 0; rank < result.ends.size(); ++rank) {
    if (result.ends[rank].code == kExitOutOfMemory) {
      return read(rank);
    }
  }
  for (size_t rank = 0; rank < result.ends.size(); ++rank) {
    if (std::filesystem::exists(task.file_of(static_cast<int>(rank)))) {
      const CompareOutcome outcome = read(rank);
      if (!outcome.failure.empty()) {
        log_error(outcome.failure);
        break;
      }
    }
  }
  throw WorldFailed{result};
}

int64_t host_share_bytes(int nproc) { return available_memory_bytes() / 10 * 9 / nproc; }

/// What one row takes, with as much memory as there is; 0: more.
int64_t measure_least(const CompareCommand& command, Strategy strategy,
                      const StartWorld& start_world) {
  const int64_t bytes = host_share_bytes(command.nproc);
  if (bytes <= 0) {
    return 0;
  }
  CompareTask task;
  task.strategy = strategy;
  task.limit_bytes = bytes;
  task.search = BatchSearch(bytes, 1);
  const CompareOutcome outcome = outcome_of_world(task, start_world);
  return outcome.ran_out_rows > 0 ? 0 : outcome.peak_bytes;
}

StrategyReport measure_strategy(const CompareCommand& command, int64_t limit_bytes,
                                Strategy strategy, const StartWorld& start_world) {
  StrategyReport report;
  report.strategy = strategy;
  CompareTask task;
  task.strategy = strategy;
  task.limit_bytes = limit_bytes;
  task.search = BatchSearch(limit_bytes, command.max_batch_size);
  // Each world that does not bring the end lowers the size that is too much.
  for (;;) {
    CompareOutcome outcome = outcome_of_world(task, start_world);
    task.search = std::move(outcome.search);
    if (outcome.ran_out_rows > 0) {
      task.search.ran_out(outcome.ran_out_rows);
    }
    const int64_t largest = task.search.largest_rows();
    if (task.search.next_rows() > 0) {
      continue;
    }
    if (largest == 0) {
      report.least_bytes = measure_least(command, strategy, start_world);
      return report;
    }
    if (outcome.timing && outcome.timing->rows == largest) {
      report.timing = outcome.timing;
      report.tried_no_more = largest == command.max_batch_size;
      return report;
    }
  }
}

/// One line for the log.
std::string found_line(const StrategyReport& report) {
  const std::string name = strategy_name(report.strategy);
  return report.timing ? name + ": " + format_count(report.timing->rows) +
                             (report.timing->rows == 1 ? " row fits" : " rows fit") + ", " +
                             format_bytes(report.timing->peak_bytes) + " a process"
                       : name + ": not one row fits";
}

[[noreturn]] void refuse_limit(const std::vector<StrategyReport>& reports, int64_t limit_bytes,
                               const Recommendation& recommendation) {
  int64_t least = 0;
  for (const StrategyReport& report : reports) {
    if (report.least_bytes > 0) {
      least = least == 0 ? report.least_bytes : std::min(least, report.least_bytes);
    }
  }
  throw InputError(
      "cli::compare",
      "memory limit of " + format_bytes(limit_bytes) + " a process: " + recommendation.text,
      "room for one row",
      (least > 0 ? "give --memory-limit " + std::to_string(least) + " or more, or train "
                 : "train ") +
          "a smaller model, shorter rows or on more processes");
}

int compare_strategies(const CompareCommand& command, const StartWorld& start_world) {
  const int64_t limit_bytes =
      command.memory_limit_bytes > 0 ? command.memory_limit_bytes : host_share_bytes(command.nproc);
  if (limit_bytes <= 0) {
    throw InputError("cli::compare", "this system does not say how much memory is free",
                     "--memory-limit BYTES");
  }
  std::vector<StrategyReport> reports;
  for (const Strategy strategy : command.strategies) {
    reports.push_back(measure_strategy(command, limit_bytes, strategy, start_world));
    log_info(found_line(reports.back()));
  }
  const Recommendation recommendation = recommend(reports);
  std::cout << comparison_table(command, limit_bytes, reports, recommendation) << std::flush;
  if (!command.json.empty()) {
    write_file_atomically(
        command.json,
        comparison_json(command, limit_bytes, reports, recommendation).dump(2) + "\n");
  }
  if (!recommendation.index) {
    refuse_limit(reports, limit_bytes, recommendation);
  }
  return kExitOk;
}

} // namespace hasten::detail
