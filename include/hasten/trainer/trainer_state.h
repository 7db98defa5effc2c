// The progress of a run and its records: trainer_state.json, with Hugging Face's keys and no others
// (its reader rejects unknown ones). hasten's own values go to hasten_state.json next to it.
// Without LibTorch. Threading: none needed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace hasten {

/// Equal on all ranks.
struct TrainerState {
  /// Steps done.
  int64_t global_step = 0;
  /// Epochs done, as a fraction.
  double epoch = 0;
  int64_t max_steps = 0;
  int64_t num_train_epochs = 0;
  int64_t logging_steps = 0;
  int64_t eval_steps = 0;
  int64_t save_steps = 0;
  int64_t train_batch_size = 0;
  /// Tokens read in training, padding included, over all ranks.
  int64_t num_input_tokens_seen = 0;
  /// Empty before the first comparison.
  std::optional<double> best_metric{};
  std::optional<int64_t> best_global_step{};
  /// The folder's path; empty if the best was not saved.
  std::string best_model_checkpoint{};
  /// Records in order: training, evaluation and the final one, each with epoch
  /// and step. An array.
  nlohmann::json log_history = nlohmann::json::array();
};

/// Indented by 2, keys sorted, with a final line break. Values that are not finite become null,
/// because JSON cannot represent them.
std::string trainer_state_json(const TrainerState& state);
/// Throws InputError naming the file and what is wrong with it.
TrainerState read_trainer_state(const std::filesystem::path& file);

namespace detail {

/// Throws what nlohmann::json throws.
TrainerState trainer_state_of(const nlohmann::json& json);

} // namespace detail

/// A copy with null in place of NaN and infinities.
nlohmann::json finite_json(nlohmann::json value);

} // namespace hasten
