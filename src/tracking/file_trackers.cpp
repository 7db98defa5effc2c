// The trackers that write files.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <fstream>
#include <system_error>
#include <utility>

#include "base/registry.h"
#include "event.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"
#include "hasten/config/training_arguments.h"
#include "hasten/tracking/tracker.h"
#include "record_file.h"

namespace hasten {

namespace detail {

/// Seconds since 1970.
static double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// "events.out.tfevents.1795451490.host.1234.0": seconds, host, process, number in the process.
static std::string event_file_name() {
  static std::atomic<int> count{0};
  return "events.out.tfevents." + std::to_string(static_cast<int64_t>(wall_time())) + "." +
         host_name() + "." + std::to_string(::getpid()) + "." + std::to_string(count++);
}

/// Calls visit(tag, value). Names of values inside objects become "a/b".
template <typename Visit>
static void visit_values(const nlohmann::json& values, const std::string& prefix,
                         const Visit& visit) {
  for (const auto& [name, value] : values.items()) {
    if (value.is_object()) {
      visit_values(value, prefix + name + "/", visit);
    } else {
      visit(prefix + name, value);
    }
  }
}

class TensorBoardTracker final : public GeneralTracker {
 public:
  TensorBoardTracker(const std::filesystem::path& folder, std::optional<int64_t> resumed_step,
                     const char* where)
      : file_(where, folder / event_file_name()) {
    file_.add(version_record(wall_time()));
    if (resumed_step) {
      file_.add(restart_record(wall_time(), *resumed_step + 1));
    }
  }
  std::string name() const override { return "tensorboard"; }
  void store_init_configuration(const nlohmann::json& values) override {
    file_.add(hparams_record(wall_time(), values));
    file_.add(text_record(wall_time(), 0, "args", values.dump(2)));
  }
  void log(const nlohmann::json& values, std::optional<int64_t> step) override {
    visit_values(values, "", [&](const std::string& tag, const nlohmann::json& value) {
      if (value.is_number() || value.is_boolean()) {
        file_.add(scalar_record(wall_time(), step.value_or(0), tag, value.get<float>()));
      } else if (!value.is_null()) {
        file_.add(text_record(wall_time(), step.value_or(0), tag, json_text(value)));
      }
    });
  }
  void log_histogram(const std::string& tag, const std::vector<double>& values,
                     std::optional<int64_t> step) override {
    file_.add(histogram_record(wall_time(), step.value_or(0), tag, values));
  }
  void finish() override {
    file_.add(hparams_end_record(wall_time()));
    file_.finish();
  }

 private:
  RecordFile file_;
};

/// Makes the file one to which lines can be appended: whole lines, and none of a step after `last`.
static std::filesystem::path csv_file(const std::filesystem::path& path,
                                      std::optional<int64_t> last) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    return path;
  }
  const std::string text = read_file(path);
  std::vector<std::string> lines = split(text, "\n");
  lines.back().clear(); // incomplete, or what follows the last line
  std::erase_if(lines, [&](const std::string& line) {
    const auto step = parse_number<int64_t>(line.substr(0, line.find(',')));
    return last && step && *step > *last;
  });
  if (const std::string kept = joined(lines, "\n"); kept != text) {
    write_file_atomically(path, kept);
  }
  return path;
}

class CsvTracker final : public GeneralTracker {
 public:
  CsvTracker(const std::filesystem::path& path, std::optional<int64_t> resumed_step,
             const char* where)
      : file_(where, csv_file(path, resumed_step)) {
    std::error_code error;
    if (std::filesystem::file_size(path, error) == 0) {
      file_.add("step,tag,value\n");
    }
  }
  std::string name() const override { return "csv"; }
  void store_init_configuration(const nlohmann::json& values) override {
    log({{"config", values}}, std::nullopt);
  }
  void log(const nlohmann::json& values, std::optional<int64_t> step) override {
    std::string lines;
    visit_values(values, "", [&](const std::string& tag, const nlohmann::json& value) {
      std::string line =
          (step ? std::to_string(*step) : "") + "," + csv_field(tag) + "," +
          csv_field(value.is_number_float() ? format_exact(value.get<double>()) : json_text(value));
      // A record is a line.
      std::replace_if(line.begin(), line.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
      lines += line + "\n";
    });
    file_.add(lines);
  }
  void finish() override { file_.finish(); }

 private:
  RecordFile file_;
};

class JsonTracker final : public GeneralTracker {
 public:
  JsonTracker(std::filesystem::path path, const char* where)
      : path_(std::move(path)), where_(where) {
    std::error_code error;
    std::filesystem::create_directories(folder_of(path_), error);
    file_.open(path_, std::ios::app);
    if (!file_) {
      throw InputError(where_, "cannot write path=" + path_.string(), "a writable folder");
    }
  }
  std::string name() const override { return "json"; }
  void store_init_configuration(const nlohmann::json& values) override {
    log({{"config", values}, {"type", "config"}}, std::nullopt);
  }
  void log(const nlohmann::json& values, std::optional<int64_t> step) override {
    nlohmann::json line = values;
    if (step) {
      line["step"] = *step;
    }
    file_ << line.dump() << '\n' << std::flush;
    std::error_code error;
    if (!file_ || !std::filesystem::exists(path_, error)) {
      throw Error(where_, "cannot write path=" + path_.string(),
                  "free disk space, a writable file, and that nobody removes it during the run");
    }
  }

 private:
  std::filesystem::path path_;
  const char* where_;
  std::ofstream file_{};
};

static Registry<TrackerFactory>& trackers() {
  static Registry<TrackerFactory> all(Registry<TrackerFactory>::Values{
      {"tensorboard",
       [](const TrackerRequest& r) {
         return std::make_shared<TensorBoardTracker>(r.folder, r.resumed_step, r.where);
       }},
      {"csv",
       [](const TrackerRequest& r) {
         return std::make_shared<CsvTracker>(r.folder / "metrics.csv", r.resumed_step, r.where);
       }},
      {"json",
       [](const TrackerRequest& r) {
         return std::make_shared<JsonTracker>(r.folder / "metrics.jsonl", r.where);
       }},
      {"html",
       [](const TrackerRequest& r) -> std::shared_ptr<GeneralTracker> {
         throw InputError(
             r.where, "tracker=html outside a Trainer", "tensorboard, csv or json",
             "the report is made of a Trainer's records: set TrainingArguments::report_to");
       }},
  });
  return all;
}

} // namespace detail

std::shared_ptr<GeneralTracker> make_tracker(const std::string& name,
                                             const std::filesystem::path& folder,
                                             std::optional<int64_t> resumed_step,
                                             const char* where) {
  return detail::trackers().get(where, "tracker", name)({folder, resumed_step, where});
}

void register_tracker(const std::string& name, TrackerFactory factory) {
  constexpr const char* kWhere = "tracking::register_tracker";
  if (!factory || name.find(',') != std::string::npos) {
    throw InputError(kWhere, "name=" + name + (factory ? "" : " without a factory"),
                     "a name without a comma, and a factory");
  }
  detail::trackers().add(kWhere, name, std::move(factory));
}

std::vector<std::string> registered_trackers() { return detail::trackers().names(); }

void check_trackers(const char* where, const std::string& names, const char* argument) {
  for (const std::string& name : tracker_names(names)) {
    detail::trackers().get(where, argument, name);
  }
}

std::filesystem::path default_logging_dir() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  char time[32];
  std::strftime(time, sizeof time, "%b%d_%H-%M-%S", ::localtime_r(&now, &local));
  return std::filesystem::path("runs") / (time + ("_" + host_name()));
}

} // namespace hasten
