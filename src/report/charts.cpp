// Which curves a page has.
#include <algorithm>
#include <set>

#include "page.h"

namespace hasten::detail::run_report {

/// The charts by their series; one that ends in "/" is each series in it. Rows of one title share a
/// chart.
const std::vector<Chart>& known_charts() {
  static const std::vector<Chart> rows{
      {"Loss", "", "train/loss", "training", false, true},
      {"Loss", "", "eval/eval_loss", "evaluation", false, true},
      {"Metrics", "of the evaluations"},
      {"Learning rate", "", "train/learning_rate", "", true},
      {"Gradient norm", "before clipping", "train/grad_norm", "", false, true},
      {"Gradient norm by part", "the first 8", "train/grad_norm/", ""},
      {"Samples per second", "", "train/samples_per_second", "by record", true},
      {"Samples per second", "", "epoch/samples_per_second", "by epoch", true},
      {"Tokens per second", "of an epoch", "epoch/tokens_per_second", "real", true},
      {"Tokens per second", "", "epoch/padded_tokens_per_second", "with padding", true},
      {"Time of a step", "by what it went into", "train/step_seconds/", "", true},
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
    if (name.starts_with("eval/eval_") && !series.values.empty() && !is_left_out(name) &&
        !name.ends_with("_runtime") && name.find('/', 5) == std::string::npos) {
      keys.push_back(name.substr(5));
    }
  }
  return keys;
}

/// A chart for each series of the runs, by its place on the page: known ones, metrics between -1
/// and 1, other values.
std::multimap<ptrdiff_t, Chart> placed_charts(const std::vector<RunRecords>& runs) {
  std::map<std::string, bool> names; // and whether all values are between -1 and 1
  for (const RunRecords& run : runs) {
    for (const auto& [name, series] : run.series) {
      if (!series.values.empty()) {
        const auto [least, greatest] = std::ranges::minmax(series.values);
        names.try_emplace(name, true).first->second &= least >= -1 && greatest <= 1;
      }
    }
  }
  const std::vector<Chart>& known = known_charts();
  const auto metrics = std::ranges::find(known, "Metrics", &Chart::title);
  std::multimap<ptrdiff_t, Chart> charts;
  size_t others = 0;
  for (const auto& [name, fraction] : names) {
    const auto row = std::ranges::find_if(known, [&name = name](const Chart& chart) {
      return chart.key.ends_with('/') ? name.starts_with(chart.key) : name == chart.key;
    });
    const std::string label = shown_name(name.substr(name.find('/') + 1));
    if (row != known.end()) {
      Chart& chart = charts.emplace(row - known.begin(), *row)->second;
      chart.key = name;
      chart.label += name.substr(row->key.size());
    } else if (is_left_out(name)) {
      continue;
    } else if (fraction && name.starts_with("eval/")) {
      charts.emplace(metrics - known.begin(),
                     Chart{metrics->title, metrics->subtitle, name, label});
    } else if (others++ < 24) {
      charts.emplace(known.size(), Chart{label, name.substr(0, name.find('/')), name});
    }
  }
  return charts;
}

std::vector<Chart> charts_of(const std::vector<RunRecords>& runs) {
  const bool one = runs.size() == 1;
  const double last_step =
      std::max(1.0, std::ranges::max_element(runs, {}, &RunRecords::last_step)->last_step);
  const double epoch = one && runs[0].last_epoch > 0 ? last_step / runs[0].last_epoch : 0;
  std::vector<Chart> charts;
  for (const auto& [place, row] : placed_charts(runs)) {
    const std::string title = row.title + (one || row.label.empty() ? "" : ": " + row.label);
    if (charts.empty() || charts.back().title != title) {
      charts.push_back(row);
      charts.back().title = title;
      charts.back().last_step = last_step;
      charts.back().steps_per_epoch = epoch;
    }
    std::vector<Curve>& curves = charts.back().curves;
    for (size_t i = 0; i < runs.size() && curves.size() < std::max<size_t>(8, runs.size()); ++i) {
      if (const Series* series = runs[i].find(row.key)) {
        curves.push_back(
            {one ? row.label : runs[i].folder.name, series, (one ? curves.size() : i) % 8});
      }
    }
  }
  return charts;
}

} // namespace hasten::detail::run_report
