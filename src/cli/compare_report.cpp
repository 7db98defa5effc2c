// hasten compare in `hasten`: the search, the worlds of the strategies one after the other, and the
// report.
#include "compare.h"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "launch/rank_output.h"

namespace hasten {

namespace detail {

/// A simpler strategy is recommended if it is slower than the fastest by at most this fraction.
constexpr double kTie = 0.03;

/// "ddp", "ddp and zero1", "ddp, zero1 and zero2".
std::string names_in_words(const std::vector<std::string>& names) {
  const std::vector<std::string> before(names.begin(), names.end() - 1);
  return joined(before) + (before.empty() ? "" : " and ") + names.back();
}

Recommendation recommend_none(const std::vector<StrategyReport>& reports) {
  const auto least = mapped(reports, [](const StrategyReport& report) {
    return spelling(report.strategy) + " " +
           (report.least_bytes > 0 ? format_bytes(report.least_bytes) : "more than there is");
  });
  return {{}, "No strategy fits with even one sample, which needs: " + joined(least)};
}

std::string table_row(const std::vector<std::string>& cells) {
  char text[128];
  std::snprintf(text, sizeof text, "  %-8s  %13s  %14s  %9s  %9s  %9s  %5s\n", cells[0].c_str(),
                cells[1].c_str(), cells[2].c_str(), cells[3].c_str(), cells[4].c_str(),
                cells[5].c_str(), cells[6].c_str());
  return text;
}

} // namespace detail

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BatchTrial, rows, peak_bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BatchSearch, limit_bytes, most_rows, too_many, trials)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BatchTiming, rows, samples_per_second, step_seconds,
                                   exposed_share, sent_bytes, peak_bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CompareState, strategy, search, timing)

CompareState read_compare_state(const std::filesystem::path& file) {
  return read_json_file("cli::compare", file).get<CompareState>();
}

void write_compare_state(const std::filesystem::path& file, const CompareState& state) {
  write_file_atomically(file, nlohmann::json(state).dump());
}

double BatchSearch::bytes_per_row() const {
  if (trials.size() < 2) {
    return 0;
  }
  const BatchTrial& last = trials.back();
  const BatchTrial& before = trials[trials.size() - 2];
  return std::max(0.0, static_cast<double>(last.peak_bytes - before.peak_bytes) /
                           static_cast<double>(last.rows - before.rows));
}

bool BatchSearch::foresees_shortage(int64_t rows) const {
  const double slope = bytes_per_row();
  return slope > 0 && static_cast<double>(trials.back().peak_bytes) +
                              slope * static_cast<double>(rows - trials.back().rows) >
                          static_cast<double>(limit_bytes);
}

int64_t BatchSearch::next_rows() const {
  const int64_t largest = largest_rows();
  const int64_t most = too_many > 0 ? too_many - 1 : most_rows;
  if (largest >= most || largest == 0) {
    return largest >= most ? 0 : 1;
  }
  const int64_t blind =
      too_many > 0 ? largest + (too_many - largest) / 2 : std::min(2 * largest, most);
  const double slope = bytes_per_row();
  if (slope <= 0) {
    return blind;
  }
  // Peaks grow at least linearly, so the line predicts too large a batch rather than too small a
  // one. One more sample than predicted is tried in any case.
  const double room = static_cast<double>(limit_bytes - trials.back().peak_bytes) / slope;
  const int64_t foreseen =
      largest +
      std::max<int64_t>(1, static_cast<int64_t>(std::min(room, static_cast<double>(most_rows))));
  return too_many > 0 && foreseen < too_many ? foreseen : std::min(blind, foreseen);
}

void BatchSearch::ran_out(int64_t rows) {
  too_many = too_many > 0 ? std::min(too_many, rows) : rows;
  std::erase_if(trials, [this](const BatchTrial& trial) { return trial.rows >= too_many; });
}

Recommendation recommend(const std::vector<StrategyReport>& reports) {
  std::vector<std::string> left_out;
  for (const StrategyReport& report : reports) {
    if (!report.fits()) {
      left_out.emplace_back(strategy_name(report.strategy));
    }
  }
  if (left_out.size() == reports.size()) {
    return detail::recommend_none(reports);
  }
  const auto fastest = std::ranges::max_element(
      reports, {}, [](const StrategyReport& report) { return report.timing.samples_per_second; });
  auto chosen = fastest;
  for (auto report = reports.begin(); report != reports.end(); ++report) {
    if (report->fits() && report->strategy < chosen->strategy &&
        report->timing.samples_per_second >=
            (1 - detail::kTie) * fastest->timing.samples_per_second) {
      chosen = report;
    }
  }
  const auto speed = [](const StrategyReport& report) {
    return format_fixed(report.timing.samples_per_second, 1) + " samples/s";
  };
  std::string text = std::string("Take ") + strategy_name(chosen->strategy);
  if (left_out.size() + 1 == reports.size()) {
    text += reports.size() == 1 ? ": it fits, with " + speed(*chosen) : ": the only one that fits";
  } else if (chosen == fastest) {
    text += ": the fastest, " + speed(*chosen);
  } else {
    text += ": " + speed(*chosen) + ", within 3 % of " + strategy_name(fastest->strategy) + "'s " +
            speed(*fastest) + ", and simpler";
  }
  if (!left_out.empty()) {
    text += "; " + detail::names_in_words(left_out) + (left_out.size() == 1 ? " does" : " do") +
            " not fit with even one sample";
  }
  return {static_cast<size_t>(chosen - reports.begin()), text + "."};
}

std::string comparison_table(const CompareCommand& command, int64_t limit_bytes,
                             const std::vector<StrategyReport>& reports,
                             const Recommendation& recommendation) {
  std::string text = command.model + " on " + std::to_string(command.nproc) +
                     " processes, samples of " + std::to_string(command.arguments.max_length) +
                     " tokens, at most " + format_bytes(limit_bytes) + " per process\n";
  text += detail::table_row(
      {"strategy", "largest batch", "peak/process", "samples/s", "s/step", "sent/step", "waits"});
  for (const StrategyReport& report : reports) {
    const std::string name = strategy_name(report.strategy);
    const std::string least =
        report.least_bytes > 0 ? ">= " + format_bytes(report.least_bytes) : "-";
    const BatchTiming& timing = report.timing;
    text += report.fits()
                ? detail::table_row({name,
                                     format_count(timing.rows) +
                                         (timing.rows == command.max_batch_size ? " or more" : ""),
                                     format_bytes(timing.peak_bytes),
                                     format_fixed(timing.samples_per_second, 1),
                                     format_digits(timing.step_seconds, 3),
                                     timing.sent_bytes > 0 ? format_bytes(timing.sent_bytes) : "-",
                                     format_fixed(100 * timing.exposed_share, 0) + " %"})
                : detail::table_row({name, "none", least, "-", "-", "-", "-"});
  }
  return text + recommendation.text + "\n";
}

namespace detail {

/// A world that ends without a result has lowered the search's upper limit.
CompareState measure_strategy(Strategy strategy, BatchSearch search,
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
  return state;
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
                   {"sent_bytes", timing.sent_bytes},
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
    const int64_t bytes = report.least_bytes;
    least = bytes > 0 && (least == 0 || bytes < least) ? bytes : least;
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
  int64_t limit = command.memory_limit_bytes; // 0: the first world finds it
  std::vector<StrategyReport> reports;
  for (const Strategy strategy : command.strategies) {
    StrategyReport report{strategy};
    const CompareState found =
        detail::measure_strategy(strategy, BatchSearch(limit, command.max_batch_size), run_world);
    report.timing = found.timing;
    limit = found.search.limit_bytes;
    if (!report.fits()) {
      report.least_bytes =
          detail::measure_strategy(strategy, BatchSearch(0, 1), run_world).timing.peak_bytes;
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
