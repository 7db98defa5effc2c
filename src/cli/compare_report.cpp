#include "compare.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "hasten/base/text.h"

namespace hasten {

namespace detail {

/// Share of the fastest's samples a second that a simpler strategy may lack.
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
  return {{}, "No strategy fits, not with one row, which takes: " + joined(least)};
}

nlohmann::json report_json(const StrategyReport& report) {
  nlohmann::json json{{"strategy", strategy_name(report.strategy)},
                      {"fits", report.timing.has_value()}};
  if (report.timing) {
    json["largest_batch"] = report.timing->rows;
    json["tried_no_more"] = report.tried_no_more;
    json["peak_bytes"] = report.timing->peak_bytes;
    json["samples_per_second"] = report.timing->samples_per_second;
    json["step_seconds"] = report.timing->step_seconds;
    json["exposed_share"] = report.timing->exposed_share;
  } else {
    json["least_bytes"] =
        report.least_bytes > 0 ? nlohmann::json(report.least_bytes) : nlohmann::json();
  }
  return json;
}

std::string table_row(const std::vector<std::string>& cells) {
  char text[128];
  std::snprintf(text, sizeof text, "  %-8s  %13s  %14s  %9s  %17s\n", cells[0].c_str(),
                cells[1].c_str(), cells[2].c_str(), cells[3].c_str(), cells[4].c_str());
  return text;
}

} // namespace detail

double BatchSearch::bytes_per_row() const {
  if (trials_.size() < 2) {
    return 0;
  }
  const BatchTrial& last = trials_.back();
  const BatchTrial& before = trials_[trials_.size() - 2];
  return std::max(0.0, static_cast<double>(last.peak_bytes - before.peak_bytes) /
                           static_cast<double>(last.rows - before.rows));
}

bool BatchSearch::foresees_shortage(int64_t rows) const {
  const double slope = bytes_per_row();
  return slope > 0 && static_cast<double>(trials_.back().peak_bytes) +
                              slope * static_cast<double>(rows - trials_.back().rows) >
                          static_cast<double>(limit_bytes_);
}

int64_t BatchSearch::largest_rows() const { return trials_.empty() ? 0 : trials_.back().rows; }

int64_t BatchSearch::next_rows() const {
  const int64_t largest = largest_rows();
  const int64_t most = too_many_ > 0 ? too_many_ - 1 : most_rows_;
  if (largest >= most) {
    return 0;
  }
  if (largest == 0) {
    return 1;
  }
  const int64_t blind =
      too_many_ > 0 ? largest + (too_many_ - largest) / 2 : std::min(2 * largest, most);
  const double slope = bytes_per_row();
  if (slope <= 0) {
    return blind;
  }
  // Peaks bend upwards, if at all, so the line leads rather too far than not far
  // enough. Where it ends, one row more is tried all the same.
  const double room = static_cast<double>(limit_bytes_ - trials_.back().peak_bytes) / slope;
  const int64_t foreseen =
      largest +
      std::max<int64_t>(1, static_cast<int64_t>(std::min(room, static_cast<double>(most_rows_))));
  return too_many_ > 0 && foreseen < too_many_ ? foreseen : std::min(blind, foreseen);
}

void BatchSearch::ran_out(int64_t rows) {
  too_many_ = too_many_ > 0 ? std::min(too_many_, rows) : rows;
  std::erase_if(trials_, [this](const BatchTrial& trial) { return trial.rows >= too_many_; });
}

void to_json(nlohmann::json& json, const BatchSearch& search) {
  json = {{"limit_bytes", search.limit_bytes_},
          {"most_rows", search.most_rows_},
          {"too_many", search.too_many_},
          {"trials", nlohmann::json::array()}};
  for (const BatchTrial& trial : search.trials_) {
    json["trials"].push_back({trial.rows, trial.peak_bytes});
  }
}

void from_json(const nlohmann::json& json, BatchSearch& search) {
  search = BatchSearch(json.at("limit_bytes").get<int64_t>(), json.at("most_rows").get<int64_t>());
  search.too_many_ = json.at("too_many").get<int64_t>();
  for (const auto& trial : json.at("trials")) {
    search.trials_.push_back({trial.at(0).get<int64_t>(), trial.at(1).get<int64_t>()});
  }
}

std::filesystem::path CompareTask::file_of(int rank) const {
  return folder / ("rank_" + std::to_string(rank) + ".json");
}

void to_json(nlohmann::json& json, const CompareTask& task) {
  json = {{"strategy", strategy_name(task.strategy)},
          {"limit_bytes", task.limit_bytes},
          {"folder", task.folder.string()},
          {"search", task.search}};
}

void from_json(const nlohmann::json& json, CompareTask& task) {
  task.strategy = spelled<Strategy>(json.at("strategy").get<std::string>()).value();
  task.limit_bytes = json.at("limit_bytes").get<int64_t>();
  task.folder = json.at("folder").get<std::string>();
  json.at("search").get_to(task.search);
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BatchTiming, rows, samples_per_second, step_seconds,
                                   exposed_share, peak_bytes)

void to_json(nlohmann::json& json, const CompareOutcome& outcome) {
  json = {{"search", outcome.search},
          {"ran_out_rows", outcome.ran_out_rows},
          {"peak_bytes", outcome.peak_bytes},
          {"failure", outcome.failure}};
  if (outcome.timing) {
    json["timing"] = *outcome.timing;
  }
}

void from_json(const nlohmann::json& json, CompareOutcome& outcome) {
  outcome = CompareOutcome{};
  json.at("search").get_to(outcome.search);
  json.at("ran_out_rows").get_to(outcome.ran_out_rows);
  json.at("peak_bytes").get_to(outcome.peak_bytes);
  json.at("failure").get_to(outcome.failure);
  if (json.contains("timing")) {
    json.at("timing").get_to(outcome.timing.emplace());
  }
}

Recommendation recommend(const std::vector<StrategyReport>& reports) {
  const StrategyReport* fastest = nullptr;
  std::vector<std::string> left_out;
  for (const StrategyReport& report : reports) {
    if (!report.timing) {
      left_out.emplace_back(strategy_name(report.strategy));
    } else if (fastest == nullptr ||
               report.timing->samples_per_second > fastest->timing->samples_per_second) {
      fastest = &report;
    }
  }
  if (fastest == nullptr) {
    return detail::recommend_none(reports);
  }
  const StrategyReport* chosen = fastest;
  for (const StrategyReport& report : reports) {
    if (report.timing && report.strategy < chosen->strategy &&
        report.timing->samples_per_second >=
            (1 - detail::kTie) * fastest->timing->samples_per_second) {
      chosen = &report;
    }
  }
  const auto speed = [](const StrategyReport& report) {
    return format_fixed(report.timing->samples_per_second, 1) + " samples/s";
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
            " not fit, not with one row";
  }
  return {static_cast<size_t>(chosen - reports.data()), text + "."};
}

std::string comparison_table(const CompareCommand& command, int64_t limit_bytes,
                             const std::vector<StrategyReport>& reports,
                             const Recommendation& recommendation) {
  std::string text = command.model + " on " + std::to_string(command.nproc) +
                     " processes, rows of " + std::to_string(command.arguments.max_length) +
                     " tokens, at most " + format_bytes(limit_bytes) + " a process\n";
  text += detail::table_row(
      {"strategy", "largest batch", "peak a process", "samples/s", "waits in backward"});
  for (const StrategyReport& report : reports) {
    const std::string name = strategy_name(report.strategy);
    if (!report.timing) {
      text += detail::table_row(
          {name, "none", report.least_bytes > 0 ? ">= " + format_bytes(report.least_bytes) : "-",
           "-", "-"});
      continue;
    }
    const BatchTiming& timing = *report.timing;
    text += detail::table_row(
        {name, format_count(timing.rows) + (report.tried_no_more ? " or more" : ""),
         format_bytes(timing.peak_bytes), format_fixed(timing.samples_per_second, 1),
         format_fixed(100 * timing.exposed_share, 0) + " %"});
  }
  return text + recommendation.text + "\n";
}

nlohmann::json comparison_json(const CompareCommand& command, int64_t limit_bytes,
                               const std::vector<StrategyReport>& reports,
                               const Recommendation& recommendation) {
  nlohmann::json json{
      {"model", command.model},
      {"nproc", command.nproc},
      {"tokens", command.arguments.max_length},
      {"gradient_accumulation_steps", command.arguments.gradient_accumulation_steps},
      {"precision", precision_name(command.arguments.effective_precision())},
      {"gradient_checkpointing", command.arguments.gradient_checkpointing.text()},
      {"memory_limit_bytes", limit_bytes},
      {"strategies", nlohmann::json::array()},
      {"recommended", nullptr},
      {"reason", recommendation.text}};
  for (const StrategyReport& report : reports) {
    json["strategies"].push_back(detail::report_json(report));
  }
  if (recommendation.index) {
    json["recommended"] = strategy_name(reports[*recommendation.index].strategy);
  }
  return json;
}

} // namespace hasten
