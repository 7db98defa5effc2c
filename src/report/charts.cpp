// Which curves a page has.
#include <algorithm>
#include <set>

#include "page.h"

namespace hasten::detail::run_report {

struct ChartRow {
  std::string title{};
  std::string subtitle{};
  /// A series of RunRecords; one that ends in "/" is each series in it.
  std::string series{};
  std::string label{};
  bool from_zero = false;
  bool smooth = false;
};

/// Rows of one title share a chart. The row without a series is the place of the metrics.
const std::vector<ChartRow>& known_rows() {
  static const std::vector<ChartRow> rows{
      {"Loss", "", "train/loss", "training", false, true},
      {"Loss", "", "eval/eval_loss", "evaluation", false, true},
      {"Metrics", "of the evaluations", "", ""},
      {"Learning rate", "", "train/learning_rate", "", true},
      {"Gradient norm", "before clipping", "train/grad_norm", "", false, true},
      {"Gradient norm by part", "the first 8", "train/grad_norm/", ""},
      {"Samples per second", "of an epoch", "epoch/samples_per_second", "", true},
      {"Tokens per second", "of an epoch", "epoch/tokens_per_second", "real", true},
      {"Tokens per second", "", "epoch/padded_tokens_per_second", "with padding", true},
      {"Time of a step", "by what it went into", "train/step_seconds/", "", true},
      {"Time of a step", "by what it went into", "epoch/step_seconds/", "", true},
      {"Time of an epoch", "", "epoch/train_seconds", "training", true},
      {"Time of an epoch", "", "eval/eval_runtime", "evaluation", true},
      {"Peak memory", "of the rank with most", "epoch/peak_resident_bytes", "process", true},
      {"Peak memory", "", "epoch/peak_tensor_bytes", "tensors", true},
      {"Tensor memory by rank", "", "epoch/peak_tensor_bytes_by_rank/", "rank ", true},
      {"Process memory by rank", "", "epoch/peak_resident_bytes_by_rank/", "rank ", true},
      {"Bytes sent", "in the run, by the rank that sends most", "epoch/bytes_sent", "", true},
      {"Spread of the ranks", "Local SGD, before averaging", "train/local_sgd_spread", ""},
      {"Share of time in averaging", "Local SGD", "train/local_sgd_share", "", true},
      {"Loss scale", "", "train/loss_scale", "", true}};
  return rows;
}

/// Values that are not worth a curve, or that tables show.
bool is_left_out(const std::string& name) {
  static const std::set<std::string> names{"train/local_sgd_rounds", "train/local_sgd_seconds",
                                           "train/local_sgd_bytes",  "train/overflows",
                                           "epoch/samples",          "epoch/seconds_left",
                                           "epoch/training_loss",    "epoch/padding_waste"};
  return names.contains(name) || (name.starts_with("eval/") && name.ends_with("_per_second")) ||
         !(name.starts_with("train/") || name.starts_with("eval/") || name.starts_with("epoch/"));
}

std::string shown_name(std::string key) {
  key.erase(0, key.starts_with("eval_") ? 5 : 0);
  std::replace(key.begin(), key.end(), '_', ' ');
  return key;
}

std::vector<std::string> metric_keys(const RunRecords& run) {
  std::vector<std::string> keys;
  for (const auto& [name, series] : run.series) {
    if (name.starts_with("eval/eval_") && run.find(name) != nullptr && !is_left_out(name) &&
        !name.ends_with("_runtime") && name.find('/', 5) == std::string::npos) {
      keys.push_back(name.substr(5));
    }
  }
  return keys;
}

/// A row for each series of the runs: known ones, metrics between -1 and 1, other values.
std::vector<ChartRow> rows_of(const std::vector<RunRecords>& runs) {
  std::map<std::string, bool> names; // and whether all values are between -1 and 1
  for (const RunRecords& run : runs) {
    for (const auto& [name, series] : run.series) {
      if (run.find(name) != nullptr) {
        const bool small = std::all_of(series.values.begin(), series.values.end(),
                                       [](double v) { return v >= -1 && v <= 1; });
        names[name] = small && (!names.contains(name) || names[name]);
      }
    }
  }
  std::vector<ChartRow> rows;
  size_t metrics = 0;
  for (const ChartRow& known : known_rows()) {
    metrics = known.series.empty() ? rows.size() : metrics;
    for (auto at = names.lower_bound(known.series); at != names.end();) {
      const bool within = known.series.ends_with('/') && at->first.starts_with(known.series);
      if (known.series.empty() || (at->first != known.series && !within)) {
        break;
      }
      rows.push_back(known);
      rows.back().series = at->first;
      rows.back().label += at->first.substr(known.series.size());
      at = names.erase(at);
    }
  }
  size_t others = 0;
  for (const auto& [name, small] : names) {
    if (is_left_out(name)) {
      continue;
    }
    const std::string label = shown_name(name.substr(name.find('/') + 1));
    if (small && name.starts_with("eval/")) {
      rows.insert(rows.begin() + static_cast<ptrdiff_t>(metrics++),
                  {"Metrics", "of the evaluations", name, label});
    } else if (others++ < 24) {
      rows.push_back({label, name.substr(0, name.find('/')), name, ""});
    }
  }
  return rows;
}

std::vector<Chart> charts_of(const std::vector<RunRecords>& runs) {
  const bool one = runs.size() == 1;
  double last_step = 1;
  for (const RunRecords& run : runs) {
    last_step = std::max(last_step, run.last_step);
  }
  const double epoch = one && runs[0].last_epoch > 0 ? last_step / runs[0].last_epoch : 0;
  std::vector<Chart> charts;
  for (const ChartRow& row : rows_of(runs)) {
    const std::string title = row.title + (one || row.label.empty() ? "" : ": " + row.label);
    if (charts.empty() || charts.back().title != title) {
      charts.push_back(
          {title, row.subtitle, row.series, row.from_zero, row.smooth, last_step, epoch});
    }
    std::vector<Curve>& curves = charts.back().curves;
    for (size_t i = 0; i < runs.size() && curves.size() < std::max<size_t>(8, runs.size()); ++i) {
      if (const Series* series = runs[i].find(row.series)) {
        curves.push_back(
            {one ? row.label : runs[i].folder.name, series, (one ? curves.size() : i) % 8});
      }
    }
  }
  return charts;
}

} // namespace hasten::detail::run_report
