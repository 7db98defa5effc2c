#include "compare.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"

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
  std::vector<std::string> least;
  for (const StrategyReport& report : reports) {
    least.push_back(
        spelling(report.strategy) + " " +
        (report.least_bytes > 0 ? format_bytes(report.least_bytes) : "more than the host has"));
  }
  return {{}, "No strategy fits with even one sample, which needs: " + joined(least)};
}

std::string table_row(const std::vector<std::string>& cells) {
  char text[128];
  std::snprintf(text, sizeof text, "  %-8s  %13s  %14s  %9s  %17s\n", cells[0].c_str(),
                cells[1].c_str(), cells[2].c_str(), cells[3].c_str(), cells[4].c_str());
  return text;
}

} // namespace detail

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BatchTrial, rows, peak_bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BatchSearch, limit_bytes, most_rows, too_many, trials)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BatchTiming, rows, samples_per_second, step_seconds,
                                   exposed_share, peak_bytes)
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
  const auto fastest = std::max_element(
      reports.begin(), reports.end(), [](const StrategyReport& a, const StrategyReport& b) {
        return a.timing.samples_per_second < b.timing.samples_per_second;
      });
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
      {"strategy", "largest batch", "peak/process", "samples/s", "waits in backward"});
  for (const StrategyReport& report : reports) {
    const std::string name = strategy_name(report.strategy);
    if (!report.fits()) {
      text += detail::table_row(
          {name, "none", report.least_bytes > 0 ? ">= " + format_bytes(report.least_bytes) : "-",
           "-", "-"});
      continue;
    }
    const BatchTiming& timing = report.timing;
    text += detail::table_row(
        {name,
         format_count(timing.rows) + (timing.rows == command.max_batch_size ? " or more" : ""),
         format_bytes(timing.peak_bytes), format_fixed(timing.samples_per_second, 1),
         format_fixed(100 * timing.exposed_share, 0) + " %"});
  }
  return text + recommendation.text + "\n";
}

} // namespace hasten
