// The accumulation windows' part of a state.
#include <algorithm>

#include "state/state_load.h"
#include "window_set.h"

namespace hasten::detail {

nlohmann::json WindowSet::save_standing(size_t model) const {
  const Standing& now = standing(model);
  return {{"window", now.window ? now.window->models_mask() : 0},
          {"completed", now.completed},
          {"attempted", now.attempted},
          {"outside", now.outside}};
}

void WindowSet::load_standing(size_t model, const nlohmann::json& values) {
  Standing& now = standing_of(model);
  const auto mask = values.at("window").get<uint64_t>();
  now.window = mask == 0 ? nullptr : &window_at(key_of(mask));
  values.at("completed").get_to(now.completed);
  values.at("attempted").get_to(now.attempted);
  values.at("outside").get_to(now.outside);
}

nlohmann::json WindowSet::save_counts() const {
  return {{"serial", serial_}, {"steps", shared_->steps}, {"accumulates", accumulates_}};
}

void WindowSet::load_counts(const nlohmann::json& values) {
  serial_ = std::max(serial_, values.at("serial").get<uint64_t>());
  values.at("steps").get_to(shared_->steps);
  values.at("accumulates").get_to(accumulates_);
}

void WindowSet::collect(StateParts& parts) const {
  auto& own = parts.own_values["windows"] = nlohmann::json::object();
  for (const auto& [key, window] : windows_) {
    const std::string name = std::to_string(key);
    own[name] = save_stateful(window, "the window", parts.own, "window." + name + ".");
  }
  auto& shared = parts.shared_values;
  shared["open_window"] = false;
  for (size_t i = 0; i < models_.size(); ++i) {
    uint64_t key = 0;
    for (const auto& [other, candidate] : windows_) {
      if (&candidate == of(i)) {
        key = other;
      }
    }
    if (in_window(i)) {
      shared["open_window"] = true;
    }
    auto& model = shared["models"][i];
    model["window"] = key;
    model["completed"] = completed(i);
    model["outside"] = standing(i).outside;
  }
  shared["windows_completed"] = serial_;
  shared["step_history"] = shared_->steps;
  shared["accumulates"] = accumulates_;
}

void WindowSet::plan(StateLoad& load) {
  const auto& saved = load.own.at("windows");
  for (const auto& [name, values] : saved.items()) {
    const uint64_t key = std::stoull(name);
    const uint64_t mask = key & ~kLocalWindow;
    if (mask == 0 || mask >> models_.size() != 0) {
      refuse_state(load.rank_file, "window of models=" + name);
    }
    load.add(load.rank_file, &window_at(key),
             tensors_below(load.own_tensors, "window." + name + "."), values);
  }
  for (auto& [key, window] : windows_) {
    if (!saved.contains(std::to_string(key))) {
      // As before its first batch.
      GradientWindow fresh(communicator_of(key), window.models(), window.models_mask(),
                           window_options(), run_.device(), shared_);
      NamedTensors tensors;
      nlohmann::json values;
      fresh.save_state(tensors, values);
      load.add(load.rank_file, &window, std::move(tensors), values);
    }
  }
  struct Saved {
    uint64_t window, completed;
    bool outside;
  };
  std::vector<Saved> models;
  for (const auto& model : load.shared.at("models")) {
    models.push_back({model.at("window").get<uint64_t>(), model.at("completed").get<uint64_t>(),
                      model.at("outside").get<bool>()});
  }
  const auto serial = load.shared.at("windows_completed").get<uint64_t>();
  const auto steps = load.shared.at("step_history").get<uint64_t>();
  const bool accumulates = load.shared.at("accumulates").get<bool>();
  load.apply.push_back([this, models, serial, steps, accumulates] {
    serial_ = serial;
    shared_->steps = steps;
    accumulates_ = accumulates;
    fed_by_.clear();
    report_ = {};
    for (size_t i = 0; i < models_.size(); ++i) {
      const auto found = windows_.find(models[i].window);
      Standing& now = standing_of(i);
      now.window = found == windows_.end() ? nullptr : &found->second;
      now.completed = models[i].completed;
      now.outside = models[i].outside;
      if (found != windows_.end() && (serial == now.completed || models_.size() == 1)) {
        report_ = found->second.report();
      }
    }
  });
}

} // namespace hasten::detail
