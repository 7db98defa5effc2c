// Reads the files of a run.
#include <algorithm>
#include <cmath>
#include <limits>
#include <system_error>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "page.h"

namespace hasten::detail::run_report {

/// Of hasten_state.json.
constexpr int kKnownFormat = 1;
/// Parts of a record that are no numbers.
constexpr const char* kResults[] = {"confusion_matrix", "per_class", "most_wrong"};
/// A record with more values has them by parameter.
constexpr size_t kMostSeries = 2000;

const Series* RunRecords::find(const std::string& name) const {
  const auto found = series.find(name);
  return found == series.end() || found->second.values.empty() ? nullptr : &found->second;
}

const nlohmann::json& member(const nlohmann::json& object, const std::string& key) {
  static const nlohmann::json kNull;
  const auto found = object.find(key);
  return found == object.end() ? kNull : *found;
}

std::string text_of(const nlohmann::json& object, const std::string& key) {
  return json_text(member(object, key));
}

double number_of(const nlohmann::json& object, const std::string& key, double otherwise) {
  const nlohmann::json& value = member(object, key);
  return value.is_number() ? value.get<double>() : otherwise;
}

/// The object in a file; empty, with a note, if the file holds none.
nlohmann::json object_in(const std::filesystem::path& path, std::vector<std::string>& notes) {
  try {
    std::error_code error;
    const nlohmann::json value = std::filesystem::is_regular_file(path, error)
                                     ? read_json_file("report::write_report", path)
                                     : nlohmann::json::object();
    if (value.is_object()) {
      return value;
    }
  } catch (const InputError&) { // removed since, or unreadable
  }
  notes.push_back(path.filename().string() + " cannot be read as a JSON object.");
  return nlohmann::json::object();
}

/// Drops the values from `step` on, so that steps ascend.
void drop_from(Series& series, double step) {
  while (!series.steps.empty() && series.steps.back() >= step) {
    series.steps.pop_back();
    series.values.pop_back();
  }
}

void add_value(RunRecords& run, const std::string& name, double step, const nlohmann::json& value) {
  if (value.is_structured()) {
    for (const auto& [key, inner] : value.items()) { // of an array: its indices
      if (!inner.is_structured()) {
        add_value(run, name + "/" + key, step, inner);
      }
    }
  } else if ((value.is_number() || value.is_null()) &&
             (run.series.size() < kMostSeries || run.series.contains(name))) {
    Series& series = run.series[name];
    drop_from(series, step);
    const double number = value.is_number() ? value.get<double>() : std::nan("");
    if (std::isfinite(number)) {
      series.steps.push_back(step);
      series.values.push_back(number);
    } else if (series.not_finite++ == 0) {
      series.first_not_finite = step;
    }
  }
}

void add_record(RunRecords& run, nlohmann::json record) {
  const std::string type = text_of(record, "type");
  const double step = std::clamp(number_of(record, "step", run.last_step), 0.0, 1e15);
  if (type == "start") {
    record.erase("type");
    run.start = std::move(record);
    return;
  }
  if (type == "resume") { // later records belong to steps that were given up
    run.last_step = step;
    for (auto& [name, series] : run.series) {
      drop_from(series, std::nextafter(step, std::numeric_limits<double>::infinity()));
    }
    run.resumes.push_back(std::move(record));
    return;
  }
  run.last_step = std::max(run.last_step, step);
  run.last_epoch = number_of(record, "epoch", run.last_epoch);
  for (const char* key : kResults) {
    if (record.contains(key)) {
      run.results[key] = std::move(record[key]);
      record.erase(key);
    }
  }
  for (const auto& [key, value] : record.items()) {
    // An epoch's record repeats its evaluation.
    if (key != "step" && key != "epoch" && (type != "epoch" || !key.starts_with("eval_"))) {
      add_value(run, type + "/" + key, step, value);
    }
  }
  if (type == "end") {
    run.ended = true;
    run.end = std::move(record);
  }
}

void add_records(RunRecords& run, std::string_view text) {
  int64_t unreadable = 0;
  const std::vector<std::string> lines = split(text, "\n");
  for (const std::string& line : lines) {
    ParsedJson parsed = try_parse_json(line);
    if (parsed.value.is_object()) {
      add_record(run, std::move(parsed.value));
    } else if (&line != &lines.back()) {
      ++unreadable;
    } else if (!line.empty()) {
      run.notes.emplace_back(
          "The last line of metrics.jsonl is incomplete: it is being written, "
          "or the run was cut off in it.");
    }
  }
  if (unreadable > 0) {
    run.notes.push_back(format_count(unreadable) +
                        " lines of metrics.jsonl cannot be read as records and are left out.");
  }
}

/// The newest checkpoint-N; empty if there is none.
std::filesystem::path newest_checkpoint(const std::filesystem::path& folder) {
  const std::string prefix = "checkpoint-";
  int64_t newest = -1;
  std::error_code error;
  for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end;
       at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (name.starts_with(prefix)) {
      newest = std::max(newest, parse_number<int64_t>(name.substr(prefix.size())).value_or(-1));
    }
  }
  return newest < 0 ? std::filesystem::path() : folder / (prefix + std::to_string(newest));
}

RunRecords read_run(const RunFolder& folder) {
  RunRecords run{.folder = folder};
  if (folder.name.empty()) {
    run.folder.name = folder.path.string();
  }
  const auto metrics = folder.path / "metrics.jsonl";
  std::error_code error;
  if (!std::filesystem::is_regular_file(metrics, error)) {
    throw InputError("report::write_report",
                     folder.path.string() + " is not the folder of a run: it has no metrics.jsonl",
                     "an output folder of hasten train or of a Trainer",
                     "pass the folder of --output-dir");
  }
  add_records(run, read_file(metrics));
  // A finished run has these files itself; the newest checkpoint describes an unfinished one.
  for (const auto& place : {folder.path, newest_checkpoint(folder.path)}) {
    if (run.state.empty()) {
      run.state = object_in(place / "hasten_state.json", run.notes);
    }
    if (run.arguments.empty()) {
      const auto file = place / "training_args.json";
      run.arguments = object_in(file, run.notes);
      run.config = run.arguments.contains("model") ? file : "";
    }
  }
  if (number_of(run.state, "format", 0) > kKnownFormat) {
    run.notes.push_back("A newer hasten (" + text_of(run.state, "hasten_version") +
                        ") wrote hasten_state.json: format " + text_of(run.state, "format") +
                        ". This one knows format " + std::to_string(kKnownFormat) +
                        " and shows what it can read.");
  }
  nlohmann::json results = object_in(folder.path / "eval_results.json", run.notes);
  results.update(run.results); // a later evaluation of the run itself
  run.results = std::move(results);
  return run;
}

} // namespace hasten::detail::run_report
