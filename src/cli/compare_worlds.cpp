// hasten compare in `hasten`: runs a world for each strategy, one after the other.
#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "compare.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/host_memory.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "launch/rank_output.h"

namespace hasten {

namespace detail {

/// A world that ends without a result has lowered the search's upper limit.
BatchTiming measure_strategy(Strategy strategy, BatchSearch search,
                             const std::function<void(const std::string&)>& run_world) {
  LaunchFolder folder;
  folder.create();
  if (folder.path.empty()) {
    std::error_code ignored;
    throw Error("cli::compare",
                "cannot make a folder in " + std::filesystem::temp_directory_path(ignored).string(),
                {}, "set TMPDIR to a writable folder");
  }
  const std::string file = folder.path / "state.json";
  CompareState state{.strategy = strategy, .search = std::move(search)};
  do {
    write_compare_state(file, state);
    run_world(file);
    state = read_compare_state(file);
  } while (state.search.next_rows() > 0 || state.timing.rows != state.search.largest_rows());
  return state.timing;
}

/// One line for the log.
std::string found_line(const StrategyReport& report) {
  const std::string name = strategy_name(report.strategy);
  return report.fits() ? name + ": " + format_count(report.timing.rows) +
                             (report.timing.rows == 1 ? " sample fits" : " samples fit") + ", " +
                             format_bytes(report.timing.peak_bytes) + " per process"
                       : name + ": not even one sample fits";
}

std::string comparison_json(const CompareCommand& command, int64_t limit_bytes,
                            const std::vector<StrategyReport>& reports,
                            const Recommendation& recommendation) {
  nlohmann::json strategies = nlohmann::json::array();
  for (const StrategyReport& report : reports) {
    const BatchTiming& timing = report.timing;
    nlohmann::json json{{"strategy", strategy_name(report.strategy)}, {"fits", report.fits()}};
    if (report.fits()) {
      json.update({{"largest_batch", timing.rows},
                   {"tried_no_more", timing.rows == command.max_batch_size},
                   {"peak_bytes", timing.peak_bytes},
                   {"samples_per_second", timing.samples_per_second},
                   {"step_seconds", timing.step_seconds},
                   {"exposed_share", timing.exposed_share}});
    } else {
      json["least_bytes"] =
          report.least_bytes > 0 ? nlohmann::json(report.least_bytes) : nlohmann::json();
    }
    strategies.push_back(std::move(json));
  }
  const auto& index = recommendation.index;
  const nlohmann::json json{
      {"model", command.model},
      {"nproc", command.nproc},
      {"tokens", command.arguments.max_length},
      {"gradient_accumulation_steps", command.arguments.gradient_accumulation_steps},
      {"precision", precision_name(command.arguments.effective_precision())},
      {"gradient_checkpointing", command.arguments.gradient_checkpointing.text()},
      {"memory_limit_bytes", limit_bytes},
      {"strategies", std::move(strategies)},
      {"recommended",
       index ? nlohmann::json(strategy_name(reports[*index].strategy)) : nlohmann::json()},
      {"reason", recommendation.text}};
  return json.dump(2) + "\n";
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
      "memory limit of " + format_bytes(limit_bytes) + " per process: " + recommendation.text,
      "memory for one sample",
      (least > 0 ? "set --memory-limit " + std::to_string(least) + " or more, or use " : "use ") +
          "a smaller model, shorter samples or more processes");
}

} // namespace detail

void compare_strategies(const CompareCommand& command,
                        const std::function<void(const std::string&)>& run_world) {
  const auto host_share = [&] { return available_memory_bytes() / 10 * 9 / command.nproc; };
  const int64_t limit = command.memory_limit_bytes > 0 ? command.memory_limit_bytes : host_share();
  if (limit <= 0) {
    throw InputError("cli::compare", "cannot find out how much memory is free",
                     "--memory-limit BYTES");
  }
  std::vector<StrategyReport> reports;
  for (const Strategy strategy : command.strategies) {
    StrategyReport report{strategy};
    report.timing =
        detail::measure_strategy(strategy, BatchSearch(limit, command.max_batch_size), run_world);
    if (const int64_t most = report.fits() ? 0 : host_share(); most > 0) {
      report.least_bytes =
          detail::measure_strategy(strategy, BatchSearch(most, 1), run_world).peak_bytes;
    }
    log_info(detail::found_line(report));
    reports.push_back(report);
  }
  const Recommendation recommendation = recommend(reports);
  std::cout << comparison_table(command, limit, reports, recommendation) << std::flush;
  if (!command.json.empty()) {
    write_file_atomically(command.json,
                          detail::comparison_json(command, limit, reports, recommendation));
  }
  if (!recommendation.index) {
    detail::refuse_limit(reports, limit, recommendation);
  }
}

} // namespace hasten
