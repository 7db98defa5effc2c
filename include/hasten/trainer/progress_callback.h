// The console output of a run: the banner, progress bars and messages on stderr, the table of
// epochs on stdout. On a terminal they fit its columns and have colours (styled() in base/log.h).
// No other part of the Trainer prints. It prints on rank 0 only. A Trainer adds
// one (transformers' ProgressCallback) unless TrainingArguments::disable_tqdm is set. One that you
// add replaces it.
// Threading: that of TrainerCallback.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hasten/base/progress_bar.h"
#include "hasten/trainer/callback.h"

namespace hasten {

/// Lines of the banner: {"data", "4,000 samples"}. Consecutive lines of one name show it once.
using BannerLines = std::vector<std::pair<std::string, std::string>>;

class ProgressCallback : public TrainerCallback {
 public:
  /// `title` is the banner's first line, by default "hasten VERSION". `facts` returns lines that
  /// the Trainer cannot know; on_precision() calls it, while the model is whole.
  /// `prediction_label` is the label of the bar of evaluate() and predict().
  explicit ProgressCallback(std::string title = {}, std::function<BannerLines()> facts = {},
                            std::string prediction_label = "evaluate");

  void on_precision(Precision precision) override;
  void on_train_begin(const RunDescription& run) override;
  void on_step_end(const StepProgress& progress) override;
  void on_log(const nlohmann::json& record) override;
  void on_prediction_step(int64_t done, int64_t total) override;
  void on_epoch_end(const EpochReport& epoch) override;
  void on_train_end(const nlohmann::json& record) override;

 private:
  std::string title_;
  std::function<BannerLines()> facts_;
  BannerLines fact_lines_{};
  std::string prediction_label_;
  std::optional<ProgressBar> prediction_bar_{}; // gone at the evaluation's end
  std::optional<ProgressBar> bar_{};
  std::string loss_{}; // of the newest record
  std::vector<double> losses_{}; // of all records
  std::string metric_{}; // by which the best epoch is chosen
  bool greater_is_better_ = false;
  std::optional<double> best_{};
  bool header_printed_ = false;
};

/// The banner's lines that the Trainer knows.
BannerLines run_lines(const RunDescription& run);
/// One text per line, with aligned names. Texts are wrapped at `columns`, if that is not 0.
std::vector<std::string> banner_text(const BannerLines& lines, int columns = 0);
/// The header and one line of the table of epochs. It has losses, speed and two metrics of the
/// evaluation. Columns that do not fit in `columns` characters, if that is not 0, are left out from
/// the right, but not losses and first metric. `best_metric` ("eval_accuracy") is green if stdout
/// is a terminal.
std::string epoch_header(const EpochReport& epoch, int columns = 0);
std::string epoch_line(const EpochReport& epoch, int columns = 0,
                       const std::string& best_metric = {});

} // namespace hasten
