// Passes a run's records to trackers, with the tags of transformers' TensorBoardCallback: eval_loss
// becomes eval/loss, and loss becomes train/loss. The Trainer adds one for report_to. Add one for a
// tracker of your own on every rank; only rank 0's is used:
//   trainer.add_callback(std::make_shared<hasten::TrackerCallback>(my_tracker));
// A tracker that fails is a warning, and training continues.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "hasten/tracking/tracker.h"
#include "hasten/trainer/callback.h"

namespace hasten {

class TrackerCallback final : public TrainerCallback {
 public:
  /// Null: the trackers of TrainingArguments::report_to.
  explicit TrackerCallback(std::shared_ptr<GeneralTracker> tracker = nullptr);

  void on_train_begin(const RunDescription& run) override;
  void on_log(const nlohmann::json& record) override { log(record); }
  void on_evaluate(const nlohmann::json& record) override { log(record); }
  void on_epoch_end(const EpochReport& epoch) override;
  void on_train_end(const nlohmann::json& record) override;

 private:
  void log(const nlohmann::json& record);

  std::shared_ptr<GeneralTracker> given_;
  std::vector<SafeTracker> trackers_{};
};

} // namespace hasten
