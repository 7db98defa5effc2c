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

std::string trainer_state_json(const TrainerState& state) {
  const nlohmann::json json = {
      {"best_global_step", detail::json_or_null(state.best_global_step)},
      {"best_metric", detail::json_or_null(state.best_metric)},
      {"best_model_checkpoint", state.best_model_checkpoint.empty()
                                    ? nlohmann::json(nullptr)
                                    : nlohmann::json(state.best_model_checkpoint)},
      {"epoch", state.epoch},
      {"eval_steps", state.eval_steps},
      {"global_step", state.global_step},
      {"is_hyper_param_search", false},
      {"is_local_process_zero", true}, // rank 0 writes this file
      {"is_world_process_zero", true},
      {"log_history", state.log_history},
      {"logging_steps", state.logging_steps},
      {"max_steps", state.max_steps},
      {"num_input_tokens_seen", state.num_input_tokens_seen},
      {"num_train_epochs", state.num_train_epochs},
      {"save_steps", state.save_steps},
      {"stateful_callbacks", nlohmann::json::object()},
      {"total_flos", 0.0}, // not counted, but readers expect the key
      {"train_batch_size", state.train_batch_size},
      {"trial_name", nullptr},
      {"trial_params", nullptr}};
  return finite_json(json).dump(2) + "\n";
}

TrainerState trainer_state_from(const nlohmann::json& json) {
  TrainerState state;
  const auto number = [&](const char* name, auto& field) {
    if (const auto entry = json.find(name); entry != json.end() && !entry->is_null()) {
      entry->get_to(field);
    }
  };
  json.at("global_step").get_to(state.global_step);
  json.at("log_history").get_to(state.log_history);
  number("epoch", state.epoch);
  number("max_steps", state.max_steps);
  number("num_train_epochs", state.num_train_epochs);
  number("logging_steps", state.logging_steps);
  number("eval_steps", state.eval_steps);
  number("save_steps", state.save_steps);
  number("train_batch_size", state.train_batch_size);
  number("num_input_tokens_seen", state.num_input_tokens_seen);
  number("best_model_checkpoint", state.best_model_checkpoint);
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
    return trainer_state_from(read_json_file("trainer::read_trainer_state", file));
  } catch (const nlohmann::json::exception& error) {
    throw InputError("trainer::read_trainer_state", "file=" + file.string() + ": " + error.what(),
                     "a trainer_state.json");
  }
}

} // namespace hasten
