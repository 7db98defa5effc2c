#include "hasten/trainer/tracker_callback.h"

#include <chrono>
#include <filesystem>
#include <future>
#include <optional>
#include <string>
#include <utility>

#include "hasten/report/report.h"
#include "hasten/trainer/output_folder.h"

namespace hasten {

namespace detail {

/// Writes output_dir/report.html from the files of the run: on a thread, at most every ten seconds,
/// and at the end.
class HtmlTracker final : public GeneralTracker {
 public:
  explicit HtmlTracker(std::filesystem::path output_dir) : folder_(std::move(output_dir)) {}

  std::string name() const override { return "html"; }
  void log(const nlohmann::json&, std::optional<int64_t>) override {
    const auto now = std::chrono::steady_clock::now();
    const bool busy =
        page_.valid() && page_.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
    if (busy || now < next_) {
      return;
    }
    wait();
    next_ = now + std::chrono::seconds(10);
    page_ = std::async(std::launch::async, [folder = folder_] {
      write_report({{.path = folder, .running = true}}, folder / kReportFile,
                   {.refresh_seconds = 10});
    });
  }
  void finish() override {
    wait();
    write_report({{.path = folder_}}, folder_ / kReportFile);
  }

 private:
  /// Throws what the thread threw.
  void wait() {
    if (page_.valid()) {
      page_.get();
    }
  }

  std::filesystem::path folder_;
  std::chrono::steady_clock::time_point next_{};
  std::future<void> page_{};
};

} // namespace detail

TrackerCallback::TrackerCallback(std::shared_ptr<GeneralTracker> tracker)
    : given_(std::move(tracker)) {}

void TrackerCallback::on_train_begin(const RunDescription& run) {
  const TrainingArguments& a = run.arguments;
  trackers_.clear();
  if (given_) {
    trackers_.emplace_back(given_->name(), [this] { return given_; });
  } else {
    const std::filesystem::path folder = a.logging_dir.empty()
                                             ? run.output_dir / default_logging_dir()
                                             : std::filesystem::path(a.logging_dir);
    const auto resumed = run.resumed_step > 0 ? std::optional(run.resumed_step) : std::nullopt;
    for (const std::string& name : tracker_names(a.report_to)) {
      if (name == "html") {
        trackers_.emplace_back(
            name, [&] { return std::make_shared<detail::HtmlTracker>(run.output_dir); });
      } else if (name != "json") { // the run itself writes it
        trackers_.emplace_back(name, [&] { return make_tracker(name, folder, resumed); });
      }
    }
  }
  for (SafeTracker& tracker : trackers_) {
    tracker.store_init_configuration(a);
  }
}

void TrackerCallback::on_epoch_end(const EpochReport& epoch) {
  log({{"training_loss", epoch.training_loss},
       {"samples_per_second", epoch.samples_per_second},
       {"tokens_per_second", epoch.tokens_per_second},
       {"padding_waste", epoch.padding_waste},
       {"peak_resident_bytes", epoch.peak_resident_bytes},
       {"step", epoch.global_step}});
}

void TrackerCallback::on_train_end(const nlohmann::json& record) {
  log(record);
  for (SafeTracker& tracker : trackers_) {
    tracker.finish();
  }
}

void TrackerCallback::log(const nlohmann::json& record) {
  nlohmann::json values = nlohmann::json::object();
  for (const auto& [name, value] : record.items()) {
    if (name != "step") {
      values[name.starts_with("eval_") ? "eval/" + name.substr(5) : "train/" + name] = value;
    }
  }
  for (SafeTracker& tracker : trackers_) {
    tracker.log(values, record.at("step").get<int64_t>());
  }
}

} // namespace hasten
