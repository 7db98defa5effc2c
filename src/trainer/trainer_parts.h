// What a Trainer holds between calls, shared by training and evaluation.
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hasten/accelerator/accelerator.h"
#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/trainer/output_folder.h"
#include "hasten/trainer/trainer.h"

namespace hasten::detail {

struct TrainerParts {
  std::shared_ptr<torch::nn::Module> model{};
  LossFunction loss_function{};
  TrainingArguments arguments{};
  std::shared_ptr<const Dataset> train{}; // null: evaluation only
  std::shared_ptr<const Dataset> eval{}; // null: no evaluation in training
  ComputeMetrics compute_metrics{};
  std::shared_ptr<Accelerator> accelerator{};
  ModelFiles files{};
  std::vector<std::shared_ptr<TrainerCallback>> callbacks{};
  std::map<std::string, std::shared_ptr<Stateful>> stateful_callbacks{};
  nlohmann::json listed_facts = nlohmann::json::object();
  nlohmann::json altering_facts = nlohmann::json::object();
  TrainerState state{};
  std::vector<double> class_weights{}; // as numbers; empty: none
  bool precision_settled = false;
  // What enable_checkpointing() chose; empty: nothing, or the model had it already.
  std::optional<GradientCheckpointingOptions> checkpointing{};
  /// train() saves on SIGTERM when the update is complete: others go on till then.
  bool saves_when_terminated = false;
  const OutputDirLock* output_lock = nullptr; // rank 0's, while train() runs

  template <typename Call>
  void notify(Call&& call) {
    for (const auto& callback : callbacks) {
      call(*callback);
    }
  }
  Communicator& communicator() { return *accelerator->communicator(); }
  /// Before each write into output_dir.
  void require_output_dir() const {
    if (output_lock != nullptr) {
      output_lock->require_in_place();
    }
  }
  bool is_main() const { return accelerator->is_main_process(); }
  /// SIGTERM is remembered, and train() will see to it.
  bool terminates() const;
  /// Throws Interrupted for any other signal that is remembered.
  void throw_if_interrupted() const;
};

/// The evaluation record lacks the metric that something depends on.
[[noreturn]] void refuse_metric(const std::string& metric, const nlohmann::json& record);

/// Loss, metrics and times of every row once; the rows' outputs too where
/// `outputs` is given. Collective. Leaves the model in the mode it was in.
nlohmann::json evaluate_dataset(TrainerParts& parts, const Dataset& dataset,
                                const std::string& prefix, at::Tensor* outputs = nullptr);

/// What arguments.gradient_checkpointing says, unless the model has a choice of its
/// own. Before prepare(); a budget runs the model on the longest rows, and rank 0's
/// plan is everybody's: sharded models need one order. Collective.
void enable_checkpointing(TrainerParts& parts);

/// Makes the accelerator compute in what the arguments say, `kept` (a name, or empty)
/// where they leave the choice, and writes into them what that is. Collective the
/// first time, else nothing.
void settle_precision(TrainerParts& parts, const std::string& kept = {});

} // namespace hasten::detail
