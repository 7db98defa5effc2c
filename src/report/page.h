// What the files of runs say, and the pieces of the page. Private to src/report.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "hasten/report/report.h"

namespace hasten::detail::run_report {

/// One recorded value over the run; steps ascend.
struct Series {
  std::vector<double> steps{};
  std::vector<double> values{};
  /// Records without a finite value, and the step of the first.
  int64_t not_finite = 0;
  double first_not_finite = 0;
};

struct RunRecords {
  RunFolder folder{};
  /// "train/loss", "eval/eval_accuracy", "epoch/peak_tensor_bytes_by_rank/0": the record's type,
  /// its key, and the key or index inside it. May be empty but for values that are not finite.
  std::map<std::string, Series> series{};
  double last_step = 0;
  double last_epoch = 0;
  bool ended = false;
  /// Objects; empty if the files lack them. `results`: confusion_matrix, per_class and most_wrong
  /// of the last evaluation that has them.
  nlohmann::json arguments = nlohmann::json::object();
  nlohmann::json state = nlohmann::json::object();
  nlohmann::json start = nlohmann::json::object();
  nlohmann::json end = nlohmann::json::object();
  nlohmann::json results = nlohmann::json::object();
  std::vector<nlohmann::json> resumes{};
  /// training_args.json, if hasten train wrote it: then it has the flags of data and model, too.
  std::filesystem::path config{};
  /// What could not be read, one sentence each.
  std::vector<std::string> notes{};

  /// Null if it has no value.
  const Series* find(const std::string& name) const;
};

/// Throws InputError for a folder without metrics.jsonl.
RunRecords read_run(const RunFolder& folder);

/// The value of `key`, as text or as a number; null, empty or `otherwise` if it is absent or of
/// another type. Any JSON value is accepted.
const nlohmann::json& member(const nlohmann::json& object, const std::string& key);
std::string text_of(const nlohmann::json& object, const std::string& key);
double number_of(const nlohmann::json& object, const std::string& key, double otherwise);

inline constexpr size_t kMostPoints = 2000;
/// At most `limit` points of the series: its first and last, and the least and the greatest of each
/// of (limit - 2) / 2 equal groups of consecutive points between. So every peak stays.
Series decimated(const Series& series, size_t limit = kMostPoints);

/// For tables and axes: "12,345", "0.6931"; bytes and seconds by the name of the key: "1.3 GiB".
std::string value_text(double value, const std::string& key = {});

/// A text of the user, apart from the direction of writing around it.
std::string bdi(std::string_view text, const std::string& css_class = {});

struct Curve {
  std::string label{};
  const Series* series = nullptr;
  size_t colour = 0;
};

struct Chart {
  std::string title{};
  std::string subtitle{};
  /// Of a series; it gives the unit.
  std::string key{};
  /// Of the series in a chart of one run.
  std::string label{};
  bool from_zero = false;
  /// Draws a mean over lines that are fainter.
  bool smooth = false;
  double last_step = 1;
  /// Steps of an epoch; 0: no marks.
  double steps_per_epoch = 0;
  std::vector<Curve> curves{};
};

/// The charts for one run, or of several, a curve for each run. They refer to `runs`.
std::vector<Chart> charts_of(const std::vector<RunRecords>& runs);
/// The figure. Appends what the script needs to `data`, an array.
std::string draw_chart(const Chart& chart, nlohmann::json& data);

/// The name of a recorded value for people: "eval_macro_f1" as "macro f1".
std::string shown_name(std::string key);
/// Keys of the loss and metrics of evaluations, without their times.
std::vector<std::string> metric_keys(const RunRecords& run);

extern const std::string_view kPageStyle;
extern const std::string_view kPageScript;

} // namespace hasten::detail::run_report
