#include "hasten/trainer/progress_callback.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"

namespace hasten {

namespace detail {

std::string fixed_text(double value, int digits) {
  return std::isfinite(value) ? format_fixed(value, digits) : "-";
}

struct MetricColumn {
  std::string title{};
  std::string name{}; // in the evaluation's record
};

/// The two metrics of the table: the usual ones for the kind of head, otherwise the evaluation's
/// first two.
std::array<MetricColumn, 2> metric_columns(const EpochReport& epoch) {
  static const MetricColumn known[] = {{"MSE", "eval_mse"},           {"pearson", "eval_pearson"},
                                       {"micro-F1", "eval_f1_micro"}, {"macro-F1", "eval_f1_macro"},
                                       {"ppl", "eval_perplexity"},    {"accuracy", "eval_accuracy"},
                                       {"macro-F1", "eval_f1"}};
  std::vector<MetricColumn> columns;
  std::ranges::copy_if(known, std::back_inserter(columns), [&](const MetricColumn& column) {
    return epoch.evaluation.contains(column.name);
  });
  if (epoch.evaluation.contains("eval_precision")) { // of entities
    columns = {{"entity-F1", "eval_f1"}, {"accuracy", "eval_accuracy"}};
  }
  for (const auto& [name, value] : epoch.evaluation) {
    if (name != "eval_loss" && name != "eval_runtime" &&
        name.find("_per_second") == std::string::npos && columns.size() < 2 &&
        (columns.empty() || columns[0].name != name)) {
      columns.push_back({name.substr(name.find('_') + 1, 8), name});
    }
  }
  columns.insert(columns.end(), {known[5], known[6]});
  return {columns[0], columns[1]};
}

/// A column of the table of epochs.
struct EpochColumn {
  size_t width;
  std::string title;
  std::string text;
  std::string metric{}; // in the evaluation's record
};

constexpr size_t kLeastEpochColumns = 4; // epoch, both losses, the first metric

/// The line of the columns' titles or texts.
std::string epoch_row(const EpochReport& epoch, std::string EpochColumn::*part, int most,
                      const std::string& best_metric = {}) {
  const auto metric = [&](const std::string& name) {
    const auto found = epoch.evaluation.find(name);
    return found == epoch.evaluation.end() ? std::string("-") : fixed_text(found->second, 4);
  };
  const auto [first, second] = metric_columns(epoch);
  const EpochColumn columns[] = {
      {7, "epoch", std::to_string(epoch.epoch) + "/" + std::to_string(epoch.epochs)},
      {10, "train loss", fixed_text(epoch.training_loss, 4)},
      {9, "eval loss", metric("eval_loss"), "eval_loss"},
      {8, first.title, metric(first.name), first.name},
      {8, second.title, metric(second.name), second.name},
      {9, "samples/s", fixed_text(epoch.samples_per_second, 1)},
      {10, "tokens/s", format_count(std::llround(epoch.tokens_per_second))},
      {11, "peak memory", format_bytes(epoch.peak_resident_bytes)},
      {9, "time left", format_duration(epoch.seconds_left)}};
  std::string line;
  size_t used = 0;
  for (const EpochColumn& column : columns) {
    const std::string& text = column.*part;
    const size_t width = std::max(column.width, text.size()) + (line.empty() ? 0 : 2);
    if (most > 0 && used + width > static_cast<size_t>(most) &&
        &column >= columns + kLeastEpochColumns) {
      break;
    }
    used += width;
    line += std::string(width - text.size(), ' ');
    line += !best_metric.empty() && column.metric == best_metric
                ? styled(text, Style::green, STDOUT_FILENO)
                : text;
  }
  return line;
}

} // namespace detail

std::string epoch_header(const EpochReport& epoch, int columns) {
  return detail::epoch_row(epoch, &detail::EpochColumn::title, columns);
}

std::string epoch_line(const EpochReport& epoch, int columns, const std::string& best_metric) {
  return detail::epoch_row(epoch, &detail::EpochColumn::text, columns, best_metric);
}

BannerLines run_lines(const RunDescription& run) {
  const TrainingPlan& plan = run.plan;
  const auto number = format_count;
  std::string parameters = number(run.parameters);
  parameters += run.trainable_parameters == run.parameters
                    ? ", all trained"
                    : ", " + number(run.trainable_parameters) + " trained";
  std::string steps = number(plan.max_steps) + " (" + number(plan.epochs) +
                      (plan.epochs == 1 ? " epoch of " : " epochs of ") +
                      number(plan.steps_per_epoch) + ")";
  if (plan.warmup_steps > 0) {
    steps += ", the first " + number(plan.warmup_steps) + " warm up";
  }
  BannerLines lines{
      {"parameters", parameters},
      {"ranks", std::to_string(run.world_size) + " x " + std::to_string(run.threads) +
                    (run.threads == 1 ? " thread, " : " threads, ") + run.device +
                    (run.world_size == 1
                         ? ""
                         : std::string(", strategy ") + strategy_name(run.arguments.strategy))},
      {"precision", run.precision != "fp32" ? run.precision + " products, fp32 weights"
                    : run.arguments.tf32    ? "fp32 with products in TF32"
                                         : "fp32 (--precision auto uses bf16 if that is faster)"},
      {"activations", run.arguments.gradient_checkpointing
                          ? "recomputed in backward (gradient checkpointing " +
                                run.arguments.gradient_checkpointing.text() + ")"
                          : "kept for backward (no gradient checkpointing)"},
      {"batch", number(run.batch_per_rank) + " samples per rank x " +
                    std::to_string(run.world_size) +
                    (run.world_size == 1 ? " rank x " : " ranks x ") +
                    number(run.gradient_accumulation_steps) +
                    " accumulation = " + number(run.total_batch) + " samples per step"},
      {"steps", steps},
  };
  if (run.local_sgd_steps > 0) {
    const TrainingArguments& a = run.arguments;
    std::string how = "weights are averaged every " + number(run.local_sgd_steps) +
                      " optimizer steps (Accelerate counts batches)";
    how += a.local_sgd_post_local_start > 0
               ? ", after " + number(a.local_sgd_post_local_start) + " steps of plain training"
               : "";
    how += a.local_sgd_delay > 0 ? ", " + number(a.local_sgd_delay) + " steps late" : "";
    how += a.local_sgd_outer != LocalSGDOuter::none ? ", by " + spelling(a.local_sgd_outer) : "";
    lines.emplace_back("local sgd", how);
  }
  if (!run.output_dir.empty()) {
    lines.emplace_back("output", run.output_dir.string());
    lines.emplace_back("output", run.metrics_file.string());
  }
  return lines;
}

std::vector<std::string> banner_text(const BannerLines& lines, int columns) {
  std::vector<std::string> texts;
  std::string before;
  for (const auto& [name, text] : lines) { // consecutive lines of one name show it once
    const std::string label = name == before ? "" : name;
    const std::string start =
        "  " + label + std::string(12 - std::min<size_t>(11, label.size()), ' ');
    std::ranges::move(split(start + wrapped(text, columns, 14), "\n"), std::back_inserter(texts));
    before = name;
  }
  return texts;
}

namespace detail {

/// Logs a text, on a terminal wrapped between words.
void log_wrapped(const std::string& text, std::optional<Style> style = {}) {
  for (const std::string& line : split(wrapped(text, terminal_columns(), 0), "\n")) {
    log_info(style ? styled(line, *style) : line);
  }
}

/// "█▅▃▁": at most `most` cells, each the mean of a slice of the values.
std::string sparkline(const std::vector<double>& values, size_t most) {
  static constexpr const char* kLevels[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  std::vector<double> means(std::min(values.size(), most));
  for (size_t i = 0; i < means.size(); ++i) {
    const auto begin = values.begin() + i * values.size() / means.size();
    const auto end = values.begin() + (i + 1) * values.size() / means.size();
    means[i] = std::accumulate(begin, end, 0.0) / static_cast<double>(end - begin);
  }
  const auto [low, high] = std::minmax_element(means.begin(), means.end());
  std::string line;
  for (const double mean : means) {
    line += kLevels[*high > *low ? std::lround(7 * (mean - *low) / (*high - *low)) : 0];
  }
  return line;
}

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) { // the first that is set counts
    if (const auto value = environment_value(name)) {
      return ::strcasestr(value->c_str(), "UTF") != nullptr;
    }
  }
  return false;
}

} // namespace detail

ProgressCallback::ProgressCallback(std::string title, std::function<BannerLines()> facts,
                                   std::string prediction_label)
    : title_(title.empty() ? "hasten " HASTEN_VERSION : std::move(title)),
      facts_(std::move(facts)),
      prediction_label_(std::move(prediction_label)) {}

void ProgressCallback::on_precision(Precision) { fact_lines_ = facts_ ? facts_() : BannerLines(); }

void ProgressCallback::on_train_begin(const RunDescription& run) {
  BannerLines lines = mapped(
      run.notes, [](const std::string& note) { return std::pair(std::string("resume"), note); });
  lines.insert(lines.end(), fact_lines_.begin(), fact_lines_.end());
  std::ranges::move(run_lines(run), std::back_inserter(lines));
  detail::log_wrapped(title_, Style::bold);
  for (const std::string& line : banner_text(lines, terminal_columns())) {
    log_info(line);
  }
  metric_ = run.arguments.best_metric_name();
  greater_is_better_ = run.arguments.best_is_greater();
  best_.reset();
  losses_.clear();
  bar_.emplace("train", run.plan.max_steps, true);
}

void ProgressCallback::on_step_end(const StepProgress& progress) {
  if (bar_) {
    bar_->update(progress.global_step, "epoch " + detail::fixed_text(progress.epoch, 2) + loss_,
                 progress.seconds_left);
  }
}

void ProgressCallback::on_log(const nlohmann::json& record) {
  if (const auto loss = record.find("loss"); loss != record.end() && loss->is_number()) {
    loss_ = " loss " + detail::fixed_text(loss->get<double>(), 4);
    if (std::isfinite(loss->get<double>())) {
      losses_.push_back(loss->get<double>());
    }
  }
}

void ProgressCallback::on_prediction_step(int64_t done, int64_t total) {
  if (!prediction_bar_) {
    prediction_bar_.emplace(prediction_label_, total, true);
  }
  prediction_bar_->update(done);
  if (done >= total) {
    prediction_bar_->clear();
    prediction_bar_.reset();
  }
}

void ProgressCallback::on_epoch_end(const EpochReport& epoch) {
  if (bar_) {
    bar_->clear();
  }
  const int columns = terminal_columns(STDOUT_FILENO);
  if (!header_printed_) {
    std::cout << styled(epoch_header(epoch, columns), Style::bold, STDOUT_FILENO) << "\n";
    header_printed_ = true;
  }
  const auto metric = epoch.evaluation.find(metric_);
  const bool best =
      metric != epoch.evaluation.end() && std::isfinite(metric->second) &&
      (!best_ || (greater_is_better_ ? metric->second > *best_ : metric->second < *best_));
  if (best) {
    best_ = metric->second;
  }
  std::cout << epoch_line(epoch, columns, best ? metric_ : "") << std::endl;
}

void ProgressCallback::on_train_end(const nlohmann::json& record) {
  if (bar_) {
    bar_->clear();
    bar_.reset();
  }
  if (const auto best = record.find("best_model_checkpoint"); best != record.end()) {
    detail::log_wrapped("The final model is the best one, " + best->get<std::string>() +
                        ", with a metric of " +
                        detail::fixed_text(record.at("best_metric").get<double>(), 4));
  }
  detail::log_wrapped("Trained in " + format_duration(record.value("train_runtime", 0.0)) + ": " +
                      detail::fixed_text(record.value("train_samples_per_second", 0.0), 1) +
                      " samples/s (with evaluation and saving), training loss " +
                      detail::fixed_text(record.value("train_loss", NAN), 4));
  const int columns = terminal_columns();
  if (losses_.size() > 1 && columns >= 40 && detail::locale_is_utf8()) {
    const auto most = static_cast<size_t>(std::min(columns - 30, 60));
    log_info("Training loss " + detail::fixed_text(losses_.front(), 4) + " " +
             detail::sparkline(losses_, most) + " " + detail::fixed_text(losses_.back(), 4));
  }
}

} // namespace hasten
