#include "hasten/report/report.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <numeric>
#include <ranges>
#include <set>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/process.h"
#include "hasten/base/svg.h"
#include "hasten/base/text.h"
#include "hasten/config/training_arguments.h"
#include "page.h"

namespace hasten {

namespace detail::run_report {

using Rows = std::vector<std::vector<std::string>>;

std::string bdi(std::string_view text, const std::string& css_class) {
  return "<bdi" + (css_class.empty() ? "" : " class=\"" + css_class + "\"") + ">" +
         escape_markup(text) + "</bdi>";
}

/// Cells are markup, with or without their <td>. The first row is the head; empty without others.
std::string table(const Rows& rows, const std::string& css_class = {}) {
  std::string text = "<div class=\"scroll\"><table class=\"" + css_class + "\">";
  for (const std::vector<std::string>& row : rows) {
    const std::string cell = &row == &rows[0] ? "th>" : "td>";
    text += "<tr>";
    for (const std::string& value : row) {
      text += value.starts_with("<td") ? value : "<" + cell + value + "</" + cell;
    }
    text += "</tr>\n";
  }
  return rows.size() == 1 ? "" : text + "</table></div>\n";
}

std::string heading(const std::string& text) { return "<h2>" + text + "</h2>\n"; }

std::string status_mark(const RunRecords& run) {
  return std::string("<span class=\"status ") +
         (run.ended            ? "finished\">finished"
          : run.folder.running ? "running\">running"
                               : "\">not finished") +
         "</span>";
}

/// The value of a record; a dash if it has none.
std::string cell(const nlohmann::json& record, const std::string& key) {
  const double value = number_of(record, key, std::nan(""));
  return std::isfinite(value) ? value_text(value, key) : "–";
}

/// The index of the best value of a metric: the least of a loss or an error.
size_t best_of(const Series& series, const std::string& key) {
  const auto [least, greatest] = std::ranges::minmax_element(series.values);
  static constexpr const char* kFalling[] = {"loss", "mse", "mae", "error", "perplexity"};
  const bool falls =
      std::ranges::any_of(kFalling, [&](const char* end) { return key.ends_with(end); });
  return static_cast<size_t>((falls ? least : greatest) - series.values.begin());
}

std::string tiles(const RunRecords& run) {
  std::string text = "<div class=\"tiles\">";
  const auto tile = [&](const std::string& name, const std::string& value,
                        const std::string& more) {
    text += "<div><small>" + escape_markup(name) + "</small><b>" + escape_markup(value) +
            "</b><small>" + escape_markup(more) + "</small></div>";
  };
  for (const std::string& key : metric_keys(run) | std::views::take(4)) {
    const Series& series = *run.find("eval/" + key);
    const size_t best = best_of(series, key);
    tile((key == "eval_loss" ? "evaluation " : "") + shown_name(key),
         value_text(series.values.back()),
         best + 1 == series.values.size() ? "the best so far"
                                          : "best " + value_text(series.values[best]) + ", step " +
                                                value_text(series.steps[best]));
  }
  if (const Series* loss = run.find("train/loss")) {
    tile("training loss", value_text(loss->values.back()),
         "first " + value_text(loss->values.front()));
  }
  tile("steps", value_text(run.last_step), "epoch " + format_digits(run.last_epoch, 3));
  if (run.ended) {
    tile("time", cell(run.end, "train_runtime"),
         cell(run.end, "train_samples_per_second") + " samples/s");
  }
  if (const Series* memory = run.find("epoch/peak_resident_bytes")) {
    tile("peak memory", format_bytes(static_cast<int64_t>(memory->values.back())), "of a process");
  }
  return text + "</div>\n";
}

std::string evaluation_table(const RunRecords& run) {
  constexpr size_t kMostRows = 40;
  const std::vector<std::string> keys = metric_keys(run);
  Rows rows{{"step"}};
  std::map<double, std::vector<std::string>> by_step;
  for (size_t k = 0; k < keys.size(); ++k) {
    const Series& series = *run.find("eval/" + keys[k]);
    const size_t best = best_of(series, keys[k]);
    rows[0].push_back(escape_markup(shown_name(keys[k])));
    for (size_t i = 0; i < series.values.size(); ++i) {
      auto& cells = by_step[series.steps[i]];
      cells.resize(keys.size(), "–");
      const std::string value = value_text(series.values[i], keys[k]);
      cells[k] = i == best ? "<b>" + value + "</b>" : value;
    }
  }
  for (auto at = by_step.rbegin(); at != by_step.rend() && rows.size() <= kMostRows; ++at) {
    rows.push_back({value_text(at->first)});
    rows.back().insert(rows.back().end(), at->second.begin(), at->second.end());
  }
  return rows.size() == 1
             ? ""
             : heading("Evaluations") + "<p class=\"dim\">The last " +
                   std::to_string(rows.size() - 1) +
                   ", latest first. The best of each column is bold.</p>\n" + table(rows);
}

/// Counts as a share of their row, by shade.
std::string confusion_table(const nlohmann::json& matrix) {
  constexpr size_t kMostLabels = 30;
  const nlohmann::json& labels = member(matrix, "labels");
  const nlohmann::json& counts = member(matrix, "counts");
  if (!labels.is_array() || !counts.is_array() || counts.size() != labels.size() ||
      labels.size() > kMostLabels) {
    return {};
  }
  Rows rows{{"label ╲ predicted"}};
  for (const auto& label : labels) {
    rows[0].push_back(bdi(json_text(label)));
  }
  for (const auto& of_label : counts) {
    rows.push_back({rows[0][rows.size()]});
    const auto values = mapped(of_label, [](const nlohmann::json& count) {
      return count.is_number() ? count.get<double>() : 0;
    });
    const double total = std::accumulate(values.begin(), values.end(), 0.0);
    for (const double value : values) {
      const double share = total > 0 ? value / total : 0;
      rows.back().push_back("<td style=\"background:color-mix(in srgb,var(--c0) " +
                            format_fixed(60 * share, 0) + "%,var(--card))\">" + value_text(value) +
                            "<br><small>" + format_fixed(100 * share, 0) + " %</small></td>");
    }
  }
  return table(rows, "matrix");
}

std::string per_class_table(const nlohmann::json& classes) {
  Rows rows{{"label", "precision", "recall", "f1", "support"}};
  for (const auto& [label, values] : classes.items()) {
    rows.push_back({bdi(label), cell(values, "precision"), cell(values, "recall"),
                    cell(values, "f1"), cell(values, "support")});
  }
  return table(rows);
}

std::string most_wrong_table(const nlohmann::json& samples, bool texts) {
  constexpr size_t kMostSamples = 50;
  Rows rows{{"text", "label", "predicted", "loss"}};
  for (const auto& sample : samples) {
    if (rows.size() > kMostSamples) {
      break;
    }
    rows.push_back({bdi(shortened(text_of(sample, "text"), 600)), bdi(text_of(sample, "label")),
                    bdi(text_of(sample, "predicted")), cell(sample, "loss")});
  }
  for (std::vector<std::string>& row : rows) {
    row.erase(row.begin(), row.begin() + (texts ? 0 : 1));
  }
  return table(rows, texts ? "texts" : "");
}

std::string results_of(const RunRecords& run, bool texts) {
  std::string text;
  const auto add = [&](const char* key, const char* title, auto&& make) {
    const nlohmann::json& result = member(run.results, key);
    const std::string part = result.is_structured() ? make(result) : "";
    text += part.empty() ? part : heading(title) + "<div class=\"box\">" + part + "</div>";
  };
  add("confusion_matrix", "Confusion matrix", confusion_table);
  add("per_class", "Results by class", per_class_table);
  add("most_wrong", "Samples it was most wrong about",
      [&](const nlohmann::json& samples) { return most_wrong_table(samples, texts); });
  return text;
}

/// How to go on from the run.
std::string next_commands(const RunRecords& run) {
  const std::string folder = shell_quoted(run.folder.path.string());
  if (run.ended) {
    return "hasten predict --model " + folder + " \"some text\"\nhasten eval --model " + folder +
           " --file test.csv";
  }
  return run.config.empty() ? "resume_from_checkpoint = \"auto\" in your program's arguments"
                            : "hasten train --config " + shell_quoted(run.config.string()) +
                                  " --resume-from-checkpoint auto" +
                                  (text_of(run.arguments, "overwrite_output_dir") == "true"
                                       ? " --overwrite-output-dir=false"
                                       : "");
}

std::string run_details(const RunRecords& run) {
  Rows facts{{"", ""}};
  const auto add = [&](const std::string& name, const std::string& value) {
    if (!value.empty()) {
      facts.push_back({escape_markup(name), bdi(value)});
    }
  };
  add("folder", run.folder.path.string());
  for (const char* key : {"model", "train_file", "strategy", "precision", "local_sgd_steps",
                          "num_train_epochs", "max_steps"}) {
    add(shown_name(key), text_of(run.arguments, key));
  }
  add("hasten version", text_of(run.state, "hasten_version"));
  for (const char* key : {"world_size", "total_batch", "train_rows", "steps_per_epoch",
                          "samples_seen", "tokens_seen"}) {
    add(shown_name(key), run.state.contains(key) ? cell(run.state, key) : "");
  }
  for (const auto& [key, value] : run.start.items()) {
    add(shown_name(key), json_text(value));
  }
  for (const auto& resume : run.resumes) {
    add("resumed", "at step " + cell(resume, "step") + " from " + text_of(resume, "from") + ", " +
                       cell(resume, "world_size") + " processes");
  }
  const nlohmann::json defaults = TrainingArguments();
  Rows arguments{{"argument", "value", "default, if another"}};
  for (const auto& [key, value] : run.arguments.items()) {
    const bool differs = defaults.contains(key) && defaults[key] != value;
    arguments.push_back(
        {escape_markup(key), bdi(json_text(value)), differs ? bdi(json_text(defaults[key])) : ""});
  }
  return heading("The run") + table(facts, "facts") + "<details><summary>All arguments</summary>" +
         table(arguments, "facts") + "</details>\n<p class=\"dim\">" +
         (run.ended ? "Use the model:" : "Continue the run:") + "</p><pre>" +
         escape_markup(next_commands(run)) + "</pre>\n";
}

std::string notes_of(const RunRecords& run) {
  std::string text;
  const auto note = [&](const std::string& sentence) {
    text += "<p class=\"note\">" + escape_markup(sentence) + "</p>\n";
  };
  std::for_each(run.notes.begin(), run.notes.end(), note);
  if (run.series.empty()) {
    note("There are no values yet.");
  }
  for (const auto& [name, series] : run.series) {
    if (series.not_finite > 0) {
      note(name.substr(name.find('/') + 1) + " is not a finite number in " +
           format_count(series.not_finite) + " records, first at step " +
           value_text(series.first_not_finite) + ". Its curve leaves them out.");
    }
  }
  return text;
}

/// Tables of results, and of the arguments that differ between the runs.
std::string differences(const std::vector<RunRecords>& runs) {
  Rows results{{""}};
  std::set<std::string> arguments;
  std::set<std::string> metrics;
  for (const RunRecords& run : runs) {
    results[0].push_back(bdi(run.folder.name, "f" + std::to_string((results[0].size() - 1) % 8)));
    for (const auto& [key, value] : run.arguments.items()) {
      arguments.insert(key);
    }
    const auto keys = metric_keys(run);
    metrics.insert(keys.begin(), keys.end());
  }
  Rows differing{results[0]};
  const auto row = [&](const std::string& name, auto&& value_of) {
    std::vector<std::string> cells{escape_markup(name)};
    std::transform(runs.begin(), runs.end(), std::back_inserter(cells), value_of);
    return cells;
  };
  results.push_back(row("status", status_mark));
  for (const std::string& key : metrics) {
    results.push_back(row("best evaluation " + shown_name(key), [&](const RunRecords& run) {
      const Series* series = run.find("eval/" + key);
      return series == nullptr ? "–" : value_text(series->values[best_of(*series, key)]);
    }));
  }
  results.push_back(row("steps", [](const RunRecords& run) { return value_text(run.last_step); }));
  for (const char* key : {"train_loss", "train_runtime", "train_samples_per_second"}) {
    results.push_back(
        row(shown_name(key), [&](const RunRecords& run) { return cell(run.end, key); }));
  }
  for (const std::string& key : arguments) {
    auto cells = row(key, [&](const RunRecords& run) { return bdi(text_of(run.arguments, key)); });
    if (std::adjacent_find(cells.begin() + 1, cells.end(), std::not_equal_to<>()) != cells.end()) {
      differing.push_back(std::move(cells));
    }
  }
  return heading("Results") + table(results) + heading("Arguments that differ") +
         (differing.size() > 1 ? table(differing) : "<p class=\"dim\">None.</p>\n");
}

} // namespace detail::run_report

std::string report_page(const std::vector<RunFolder>& folders, const ReportOptions& options) {
  using namespace detail::run_report;
  if (folders.empty()) {
    throw InputError("report::write_report", "no folder", "the output folder of a run");
  }
  std::vector<RunRecords> runs;
  std::vector<std::string> names;
  for (const RunFolder& folder : folders) {
    runs.push_back(read_run(folder));
    names.push_back(runs.back().folder.name);
  }
  const RunRecords& first = runs[0];
  const bool one = runs.size() == 1;
  nlohmann::json data = nlohmann::json::array();
  std::string charts;
  bool decimates = false;
  for (const Chart& chart : charts_of(runs)) {
    for (const Curve& curve : chart.curves) {
      decimates |= curve.series->values.size() > kMostPoints;
    }
    charts += draw_chart(chart, data);
  }
  const bool again = options.refresh_seconds > 0 && first.folder.running && !first.ended;
  std::string page =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
      "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n" +
      (again ? "<meta http-equiv=\"refresh\" content=\"" + std::to_string(options.refresh_seconds) +
                   "\">\n"
             : std::string()) +
      "<title>" + escape_markup(joined(names)) + "</title>\n<style>" + std::string(kPageStyle) +
      "</style></head><body>\n<h1>" +
      (one ? bdi(names[0]) + " " + status_mark(first)
           : std::to_string(runs.size()) + " runs side by side") +
      "</h1>\n";
  for (const RunRecords& run : runs) {
    page += notes_of(run);
  }
  page += one ? tiles(first) : differences(runs);
  if (!charts.empty()) {
    page += heading("Curves") + "<div class=\"charts\">\n" + charts + "</div>\n";
  }
  if (decimates) {
    page += "<p class=\"dim\">A curve shows at most " + value_text(kMostPoints) +
            " points: its first, its last, and the least and the greatest of each of " +
            value_text((kMostPoints - 2) / 2) + " equal groups of records between them.</p>\n";
  }
  for (const RunRecords& run : runs) {
    const std::string open =
        one ? "" : "<details><summary>" + bdi(run.folder.name) + "</summary>\n";
    page += open + (one ? evaluation_table(run) : std::string()) + results_of(run, options.texts) +
            run_details(run) + (one ? "" : "</details>\n");
  }
  return page +
         "<p class=\"dim\">Written by hasten " HASTEN_VERSION
         ".</p>\n<script type=\"application/json\" id=\"data\">" +
         joined(split(data.dump(), "<"), "\\u003c") + // "<" would let a text end the element
         "</script>\n<script>" + std::string(kPageScript) + "</script></body></html>\n";
}

void write_report(const std::vector<RunFolder>& runs, const std::filesystem::path& path,
                  const ReportOptions& options) {
  write_file_atomically(path, report_page(runs, options));
}

} // namespace hasten
