// What a person sees of a run: the banner, progress bars and messages on stderr, the
// table of epochs on stdout. The only part of the Trainer that prints, on rank 0 alone.
// A Trainer has one by itself (transformers' ProgressCallback) unless
// TrainingArguments::disable_tqdm is set; one that is added takes its place.
// Threading: that of TrainerCallback.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hasten/base/progress_bar.h"
#include "hasten/trainer/callback.h"

namespace hasten {

/// Lines of the banner: {"data", "4,000 rows"}. Lines of one name that follow each
/// other carry it once.
using BannerLines = std::vector<std::pair<std::string, std::string>>;

class ProgressCallback : public TrainerCallback {
 public:
  /// `title` opens the banner, by default "hasten VERSION"; `facts` are lines that the
  /// Trainer does not know. `prediction_label` stands before the bar of evaluate() and
  /// predict().
  explicit ProgressCallback(std::string title = {}, BannerLines facts = {},
                            std::string prediction_label = "evaluate");

  void on_train_begin(const RunDescription& run) override;
  void on_step_end(const StepProgress& progress) override;
  void on_log(const nlohmann::json& record) override;
  void on_prediction_step(int64_t done, int64_t total) override;
  void on_epoch_end(const EpochReport& epoch) override;
  void on_train_end(const nlohmann::json& record) override;

 private:
  std::string title_;
  BannerLines facts_;
  std::string prediction_label_;
  std::optional<ProgressBar> prediction_bar_{}; // gone at the evaluation's end
  std::optional<ProgressBar> bar_{};
  std::string loss_{}; // of the newest record
  bool header_printed_ = false;
};

/// The banner's lines that come from the Trainer.
BannerLines run_lines(const RunDescription& run);
/// One text a line, names aligned.
std::vector<std::string> banner_text(const BannerLines& lines);
/// One line of the table of epochs, and the line above them. Beside losses and speed it
/// has two metrics of the evaluation.
std::string epoch_header(const EpochReport& epoch);
std::string epoch_line(const EpochReport& epoch);

} // namespace hasten
