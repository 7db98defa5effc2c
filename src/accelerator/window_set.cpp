#include "window_set.h"

#include <algorithm>

#include <algorithm>
#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/loader/loader_state.h"
#include "model_set.h"
#include "run_context.h"
#include "state/state_contents.h"

namespace hasten::detail {

WindowSet::WindowSet(RunContext& run, ModelSet& models)
    : run_(run), models_(models), shared_(std::make_shared<WindowShared>()) {}

const WindowSet::ModelWindow& WindowSet::model_window(size_t model) const {
  static const ModelWindow none;
  return model < model_windows_.size() ? model_windows_[model] : none;
}

WindowSet::ModelWindow& WindowSet::ensure_model_window(size_t model) {
  model_windows_.resize(std::max(model_windows_.size(), model + 1));
  return model_windows_[model];
}

bool WindowSet::has_local(uint64_t models) const {
  const auto found = models_.in(models);
  return std::ranges::any_of(found, [this](size_t i) { return is_local(i); });
}

uint64_t WindowSet::key_of(uint64_t models) const {
  return has_local(models) ? models | kLocalWindow : models;
}

std::shared_ptr<Communicator> WindowSet::communicator_of(uint64_t key) {
  if ((key & kLocalWindow) == 0) {
    return run_.communicator();
  }
  if (models_.has_replicas(key & ~kLocalWindow)) {
    return models_.shard_group();
  }
  if (!alone_) {
    alone_ = Communicator::create(World{}, {.name = "local windows"});
  }
  return alone_;
}

WindowOptions WindowSet::window_options(uint64_t key) const {
  const AcceleratorOptions& options = run_.options();
  return {options.gradient_accumulation_steps, options.loss_weighting, options.check_accumulation,
          (key & kLocalWindow) == 0};
}

GradientWindow& WindowSet::window_at(uint64_t key) {
  const auto it = windows_.find(key);
  if (it != windows_.end()) {
    return it->second;
  }
  const uint64_t mask = key & ~kLocalWindow;
  std::vector<std::shared_ptr<DataParallel>> models;
  for (const size_t i : models_.in(mask)) {
    models.push_back(models_[i].parallel);
  }
  return windows_
      .try_emplace(key, communicator_of(key), std::move(models), mask, window_options(key),
                   run_.device(), shared_)
      .first->second;
}

GradientWindow& WindowSet::get(uint64_t mask, const char* where) {
  const auto models = models_.in(mask);
  const auto local = [this](size_t i) { return is_local(i); };
  if (has_local(mask) && !std::ranges::all_of(models, local)) {
    throw InputError(where, "a loss depends on the model of a LocalSGD scope and on others",
                     "losses of that model only inside the scope",
                     "put both models into one module");
  }
  GradientWindow& next = window_at(key_of(mask));
  for (const size_t model : models) {
    if (in_window(model) && of(model) != &next) {
      throw InputError(where, "a model is in the middle of a window with other models",
                       "the same models until the window is complete");
    }
  }
  return next;
}

void WindowSet::enter(GradientWindow& window, bool outside, const LoaderState* feeder) {
  accumulates_ = accumulates_ || !outside;
  for (const size_t model : models_.in(window.models_mask())) {
    ModelWindow& model_window = ensure_model_window(model);
    model_window.window = &window;
    model_window.completed = 0;
    model_window.outside = outside;
  }
  auto& feeders = fed_by_[key_of(window.models_mask())];
  if (std::ranges::find(feeders, feeder) == feeders.end()) {
    feeders.push_back(feeder);
  }
}

void WindowSet::leave(const GradientWindow& window) {
  for (ModelWindow& model_window : model_windows_) {
    if (model_window.window == &window) {
      model_window.window = nullptr;
    }
  }
}

void WindowSet::leave(size_t model) {
  const GradientWindow* last = of(model);
  if (is_local(model) || (last != nullptr && (last->is_open() || !last->opens()))) {
    throw InputError("accelerator::prepare",
                     "the model's parameters have changed inside a window or a scope of LocalSGD",
                     "a second prepare() between windows, outside LocalSGD");
  }
  std::erase_if(windows_, [&](const auto& entry) {
    const bool has = (entry.second.models_mask() >> model & 1) != 0;
    if (has) {
      leave(entry.second);
    }
    return has;
  });
}

void WindowSet::complete(const GradientWindow& window, bool outside, bool again) {
  report_ = window.report();
  if (again) {
    return;
  }
  ++serial_;
  fed_by_.erase(key_of(window.models_mask()));
  for (ModelWindow& model_window : model_windows_) {
    if (model_window.window == &window) {
      model_window.completed = serial_;
      model_window.outside = outside;
    }
  }
}

bool WindowSet::in_window(size_t model) const {
  return of(model) != nullptr && completed(model) == 0;
}

void WindowSet::note_attempt(size_t model, bool of_last) {
  ensure_model_window(model).attempted = ensure_model_window(model).completed - (of_last ? 0 : 1);
}

void WindowSet::set_local(size_t model, bool local) {
  DataParallel& parallel = *models_[model].parallel;
  ModelWindow& model_window = ensure_model_window(model);
  if (local) {
    parallel.set_local(true);
    model_window.local = true;
    return;
  }
  model_window.local = false;
  try {
    parallel.set_local(false);
  } catch (const Error&) { // left in the middle of a window
    parallel.cancel();
    parallel.set_local(false);
    model_window.window = nullptr;
  }
}

uint64_t WindowSet::completed_window(const std::vector<SlotList>& lists) const {
  uint64_t last = 0;
  for (const SlotList& list : lists) {
    if (in_window(list.model)) {
      return 0;
    }
    last = std::max(last, completed(list.model));
  }
  return last;
}

// Inside accumulate(): once for each complete window. Outside: always.
WindowSet::Acts WindowSet::acts(const std::vector<SlotList>& lists) const {
  bool outside = !accumulates_;
  for (const SlotList& list : lists) {
    if (in_window(list.model) && !model_window(list.model).outside) {
      return Acts::in_window;
    }
    outside = outside || model_window(list.model).outside;
  }
  return outside ? Acts::always : completed_window(lists) == 0 ? Acts::in_window : Acts::once;
}

void WindowSet::check_reduced(const std::vector<SlotList>& lists, const char* where) const {
  for (const SlotList& list : lists) {
    const GradientWindow* window = of(list.model);
    if (window != nullptr && window->waiting() > 0) {
      throw InputError(
          where,
          std::to_string(window->waiting()) + " backward calls under no_sync() are not reduced yet",
          "a backward outside no_sync() before it",
          "end no_sync() before the last backward, or call trigger_sync()");
    }
    DataParallel& parallel = *models_[list.model].parallel;
    if (parallel.has_foreign_gradients()) {
      throw InputError(where,
                       "gradients of \"" + parallel.parameters().front().first +
                           "\" and others come from a backward that was not "
                           "accelerator.backward() on this model: every rank has its own",
                       "accelerator.backward(loss), or gradients that were zeroed",
                       "use it instead of loss.backward(); pass every model that the loss "
                       "depends on to accumulate(), or detach() parts that it must not train");
    }
  }
}

void WindowSet::set_steps(int64_t steps) {
  constexpr const char* kWhere = "accelerator::set_gradient_accumulation_steps";
  if (steps < 1) {
    throw InputError(kWhere, "steps=" + std::to_string(steps), "1 or more");
  }
  for (const auto& [key, known] : windows_) {
    if (known.is_open() || !known.opens()) {
      throw InputError(kWhere, "steps=" + std::to_string(steps) + " inside a window",
                       "a call between windows");
    }
  }
  run_.set_accumulation(steps);
  for (auto& [key, known] : windows_) {
    known.set_steps(steps);
  }
}

bool WindowSet::feeds(uint64_t key, const LoaderState* loader) const {
  const auto of = fed_by_.find(key);
  return loader == nullptr ||
         (of != fed_by_.end() && std::ranges::find(of->second, loader) != of->second.end());
}

std::vector<GradientWindow*> WindowSet::lacking_backward(const LoaderState* loader) {
  std::vector<GradientWindow*> found;
  for (auto& [key, last] : windows_) {
    if (last.lacks_last_backward() && feeds(key, loader) &&
        !is_local(
            models_.in(last.models_mask()).front())) { // a local window's calls are not recorded
      found.push_back(&last);
    }
  }
  return found;
}

void WindowSet::drop_unfinished(const LoaderState* loader) {
  for (auto& [key, unfinished] : windows_) {
    if (!feeds(key, loader)) {
      continue; // another loader's window stays open
    }
    const bool incomplete = unfinished.lacks_last_backward();
    if (const int64_t batches = unfinished.drop(); batches > 0) {
      log_warning(std::string(incomplete ? "the last batch of the data had no backward"
                                         : "the epoch was left in the middle of a window") +
                  ": the window's gradients are dropped, batches=" + std::to_string(batches));
    }
    fed_by_.erase(key);
    if (!unfinished.is_complete()) {
      leave(unfinished);
    }
  }
}

void WindowSet::collect(StateToSave& parts) const {
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
    model["outside"] = model_window(i).outside;
  }
  shared["windows_completed"] = serial_;
  shared["step_history"] = shared_->steps;
  shared["accumulates"] = accumulates_;
}

void WindowSet::add_to(StateToLoad& load) {
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
                           window_options(key), run_.device(), shared_);
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
      ModelWindow& now = ensure_model_window(i);
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
