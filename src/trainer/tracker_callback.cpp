#include "hasten/trainer/tracker_callback.h"

#include <optional>
#include <string>
#include <utility>

namespace hasten {

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
      if (name != "json") { // the run itself writes it
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
