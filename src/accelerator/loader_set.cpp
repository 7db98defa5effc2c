#include "loader_set.h"

#include <algorithm>

#include <algorithm>
#include "hasten/base/error.h"
#include "hasten/core/device.h"
#include "state/state_contents.h"

namespace hasten::detail {

void LoaderSet::add(const std::vector<std::shared_ptr<LoaderState>>& loaders,
                    const std::vector<size_t>& models, bool with_optimizer) {
  for (const auto& loader : loaders) {
    loaders_.push_back(loader);
    loader->index = loaders_.size();
  }
  if (loaders.empty() || !with_optimizer) {
    return;
  }
  loaders.front()->training = true;
  training_.push_back(loaders.front());
  for (const size_t model : models) {
    of_model_[model] = loaders.front();
  }
}

void LoaderSet::train_on(const std::shared_ptr<LoaderState>& loader) {
  if (!loader->training) {
    loader->training = loader->open = true;
    training_.push_back(loader);
  }
}

std::shared_ptr<LoaderState> LoaderSet::training_loader(const std::vector<size_t>& models) const {
  for (const size_t model : models) {
    if (const auto found = of_model_.find(model); found != of_model_.end()) {
      return found->second;
    }
  }
  if (training_.size() > 1) {
    throw InputError("accelerator::accumulate",
                     std::to_string(training_.size()) +
                         " training loaders are prepared, none of them with this model",
                     "one loader to choose", "call accumulate(loader, model)");
  }
  return training_.empty() ? nullptr : training_.front();
}

void LoaderSet::enter_loop(const std::shared_ptr<LoaderState>& loader) {
  std::erase(loops_, loader);
  loops_.push_back(loader);
}

const LoaderState* LoaderSet::active() {
  std::erase_if(loops_, [](const auto& loader) { return loader->loop.expired(); });
  return loops_.empty() || !loops_.back()->handed_out ? nullptr : loops_.back().get();
}

// The loop of a loader that was prepared with these models, or else the innermost that
// runs. Evaluation only if there is no training loader.
const LoaderState* LoaderSet::current(const std::vector<size_t>& models) const {
  const auto runs = [](const std::shared_ptr<LoaderState>& loader) {
    return loader && loader->handed_out && !loader->loop.expired();
  };
  for (const size_t model : models) {
    if (const auto found = of_model_.find(model); found != of_model_.end() && runs(found->second)) {
      return found->second.get();
    }
  }
  for (auto loader = loops_.rbegin(); loader != loops_.rend(); ++loader) {
    if (runs(*loader) && ((*loader)->training || training_.empty())) {
      return loader->get();
    }
  }
  return nullptr;
}

bool LoaderSet::in_pass() const {
  return std::ranges::any_of(training_, [](const auto& loader) { return loader->open; });
}

bool LoaderSet::close_passes() {
  bool open = false;
  for (const auto& loader : training_) {
    open = std::exchange(loader->open, false) || open;
  }
  return open;
}

void LoaderSet::collect(StateToSave& parts, const at::Device& device) const {
  auto& saved = parts.own_values["loaders"] = nlohmann::json::array();
  GeneratorStates random = generator_states({device});
  for (size_t i = 0; i < loaders_.size(); ++i) {
    const std::string prefix = "loader." + std::to_string(i) + ".";
    const auto position = loaders_[i]->position.lock();
    saved.push_back(
        position == nullptr
            ? nlohmann::json() // no handle is left to iterate it
            : nlohmann::json{{"training", loaders_[i]->training},
                             {"position", save_stateful(*position, prefix, parts.own, prefix)}});
    if (!loaders_[i]->random.empty() && !loaders_[i]->loop.expired()) {
      random = loaders_[i]->random; // random values of a stand-in are undone
    }
  }
  for (const GeneratorState& state : random) {
    parts.own["random." + state.device_name()] = state.tensor();
  }
}

void LoaderSet::add_to(StateToLoad& load) {
  const auto& loaders = load.own.at("loaders");
  check_count(load, "loaders", loaders.size(), loaders_.size());
  for (size_t i = 0; i < loaders_.size(); ++i) {
    const auto position = loaders_[i]->position.lock();
    if (position == nullptr || loaders[i].is_null()) {
      continue;
    }
    NamedTensors tensors = tensors_below(load.own_tensors, "loader." + std::to_string(i) + ".");
    load.add(load.rank_file, position.get(), std::move(tensors), loaders[i].at("position"));
    if (loaders[i].at("training").get<bool>() && !loaders_[i]->training) {
      load.apply.push_back([this, loader = loaders_[i]] {
        loader->training = true;
        training_.push_back(loader);
      });
    }
  }
}

} // namespace hasten::detail
