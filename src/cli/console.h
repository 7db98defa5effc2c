// What a person sees of a run: banner, progress bars and messages on stderr,
// the table of epochs on stdout. Rank 0 only. Private to src/cli.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hasten/base/progress_bar.h"
#include "hasten/trainer/callback.h"

namespace hasten::detail {

/// A bar of batches while something is evaluated or predicted; gone at its end.
class PredictionProgress : public TrainerCallback {
 public:
  explicit PredictionProgress(std::string label) : label_(std::move(label)) {}
  void on_prediction_step(int64_t done, int64_t total) override;

 private:
  std::string label_;
  std::optional<ProgressBar> bar_{};
};

/// Lines of the banner that the Trainer does not know: {"data", "…"}.
using BannerLines = std::vector<std::pair<std::string, std::string>>;

class TrainConsole : public TrainerCallback {
 public:
  /// `title` and `facts` open the banner.
  TrainConsole(std::string title, BannerLines facts);

  void on_train_begin(const RunDescription& run) override;
  void on_step_end(const StepProgress& progress) override;
  void on_log(const nlohmann::json& record) override;
  void on_prediction_step(int64_t done, int64_t total) override;
  void on_epoch_end(const EpochReport& epoch) override;
  void on_train_end(const nlohmann::json& record) override;

 private:
  std::string title_;
  BannerLines facts_;
  PredictionProgress evaluation_{"evaluate"};
  std::optional<ProgressBar> bar_{};
  std::string loss_{}; // of the newest record
  bool header_printed_ = false;
};

/// The banner's lines that come from the Trainer.
BannerLines run_lines(const RunDescription& run);
/// One line of the table of epochs, and the line above them, whose columns are those
/// of the first epoch's evaluation.
std::string epoch_header(const EpochReport& epoch);
std::string epoch_line(const EpochReport& epoch);

} // namespace hasten::detail
