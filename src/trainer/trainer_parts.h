// The members of a Trainer, shared by training and evaluation.
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hasten/accelerator/accelerator.h"
#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/trainer/losses.h"
#include "hasten/trainer/output_folder.h"
#include "hasten/trainer/trainer.h"
#include "state/host_folders.h"

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
  std::vector<double> class_weights{}; // empty: none
  nlohmann::json evaluation_report{}; // of the last evaluation; null before
  bool precision_settled = false;
  // The choice of enable_checkpointing(); empty: none, or the model had its own.
  std::optional<GradientCheckpointingOptions> checkpointing{};
  std::unique_ptr<OutputDirLock> output_lock{}; // of a rank with leads_folder(), while train() runs
  HostFolders folders{}; // output_dir on the hosts, once train() has begun

  template <typename Call>
  void notify(Call&& call) {
    for (const auto& callback : callbacks) {
      call(*callback);
    }
  }
  Communicator& communicator() { return *accelerator->communicator(); }
  /// Call it before each write into output_dir.
  void require_output_dir() const {
    if (output_lock) {
      output_lock->require_in_place();
    }
  }
  bool is_main() const { return accelerator->is_main_process(); }
  /// Whether this rank makes and removes checkpoints in output_dir: rank 0, and one rank of each host with
  /// an output_dir of its own.
  bool leads_folder() const {
    const int rank = accelerator->process_index();
    return folders.writer.empty() ? is_main() : folders.writer[static_cast<size_t>(rank)] == rank;
  }
};

/// Throws InputError because the evaluation record lacks a required metric.
[[noreturn]] void refuse_metric(const std::string& metric, const nlohmann::json& record);

/// Evaluates every sample once: loss, metrics and times, and the samples' outputs if `outputs` is
/// not null. Collective. Restores the model's mode.
nlohmann::json evaluate_dataset(TrainerParts& parts, const Dataset& dataset,
                                const std::string& prefix, at::Tensor* outputs = nullptr);

/// Enables arguments.gradient_checkpointing unless the model has its own setting. Call it before
/// prepare(). A budget runs the model on the longest samples. All ranks use rank 0's plan, because
/// sharded models need one order. Collective.
void enable_checkpointing(TrainerParts& parts);

/// Sets the accelerator's precision from the arguments, or to `kept` (a name, or empty) if they
/// are automatic, and writes the choice into the arguments. Collective in the first call; later
/// calls do nothing.
void settle_precision(TrainerParts& parts, const std::string& kept = {});

/// Returns `inner` with its loss replaced by cross_entropy_output(how) of its outputs, which must
/// be logits, as in transformers' Trainer; with several labels per sample by
/// bce_with_logits_output(class_weights). Batches without labels are unchanged. `balanced`:
/// classes after the last weight have weight 1. If the loss of `inner` is that of the next tokens'
/// labels, as of a causal model, so is the new one. Calls throw InputError if it is another loss.
LossFunction with_objective(LossFunction inner, ClassificationLossOptions how, bool balanced);

} // namespace hasten::detail
