#include "hasten/tracking/tracker.h"

#include <exception>
#include <utility>

#include "hasten/base/log.h"

namespace hasten {

template <typename Call>
void SafeTracker::guard(const Call& call) {
  std::string why;
  try {
    return call();
  } catch (const std::exception& error) {
    why = error.what();
  } catch (...) {
    why = "an exception of an unknown type";
  }
  tracker_.reset();
  log_warning("tracker " + name_ + " stops, training continues: " + why.substr(0, why.find('\n')));
}

SafeTracker::SafeTracker(std::string name,
                         const std::function<std::shared_ptr<GeneralTracker>()>& make)
    : name_(std::move(name)) {
  guard([&] { tracker_ = make ? make() : nullptr; });
}

void SafeTracker::store_init_configuration(const nlohmann::json& values) {
  guard([&] { tracker_ ? tracker_->store_init_configuration(values) : void(); });
}

void SafeTracker::log(const nlohmann::json& values, std::optional<int64_t> step) {
  guard([&] { tracker_ ? tracker_->log(values, step) : void(); });
}

void SafeTracker::log_histogram(const std::string& tag, const std::vector<double>& values,
                                std::optional<int64_t> step) {
  guard([&] { tracker_ ? tracker_->log_histogram(tag, values, step) : void(); });
}

void SafeTracker::finish() {
  guard([&] { tracker_ ? tracker_->finish() : void(); });
  tracker_.reset();
}

} // namespace hasten
