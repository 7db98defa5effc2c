#include "hasten/trainer/trainer_state.h"

#include <cmath>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"

namespace hasten {

namespace detail {

template <typename T>
nlohmann::json json_or_null(const std::optional<T>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json(nullptr);
}

} // namespace detail

nlohmann::json finite_json(nlohmann::json value) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    return nullptr;
  }
  if (value.is_structured()) {
    for (auto& element : value) {
      element = finite_json(std::move(element));
    }
  }
  return value;
}

// Without the fields that can be null.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(TrainerState, best_model_checkpoint, epoch,
                                                eval_steps, global_step, log_history, logging_steps,
                                                max_steps, num_input_tokens_seen, num_train_epochs,
                                                save_steps, train_batch_size)

std::string trainer_state_json(const TrainerState& state) {
  nlohmann::json json = state;
  json.update({{"best_global_step", detail::json_or_null(state.best_global_step)},
               {"best_metric", detail::json_or_null(state.best_metric)},
               {"is_hyper_param_search", false},
               {"is_local_process_zero", true}, // rank 0 writes this file
               {"is_world_process_zero", true},
               {"stateful_callbacks", nlohmann::json::object()},
               {"total_flos", 0.0}, // not counted, but readers expect the key
               {"trial_name", nullptr},
               {"trial_params", nullptr}});
  if (state.best_model_checkpoint.empty()) {
    json["best_model_checkpoint"] = nullptr;
  }
  return finite_json(json).dump(2) + "\n";
}

TrainerState detail::trainer_state_of(const nlohmann::json& json) {
  nlohmann::json values = {{"global_step", json.at("global_step")},
                           {"log_history", json.at("log_history")}};
  for (const auto& [name, value] : json.items()) { // a number that is null was not finite
    if (!value.is_null()) {
      values[name] = value;
    }
  }
  auto state = values.get<TrainerState>();
  if (const auto best = json.find("best_metric"); best != json.end() && best->is_number()) {
    state.best_metric = best->get<double>();
  }
  if (const auto best = json.find("best_global_step"); best != json.end() && best->is_number()) {
    state.best_global_step = best->get<int64_t>();
  }
  return state;
}

TrainerState read_trainer_state(const std::filesystem::path& file) {
  try {
    return detail::trainer_state_of(read_json_file("trainer::read_trainer_state", file));
  } catch (const nlohmann::json::exception& error) {
    throw InputError("trainer::read_trainer_state", "file=" + file.string() + ": " + error.what(),
                     "a trainer_state.json");
  }
}

} // namespace hasten
