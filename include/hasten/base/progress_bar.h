// A progress bar on stderr. If stderr is not a terminal, or TERM is "dumb", it prints plain lines instead: about one
// for every tenth of the work, at most one every 5 s, and a last one. Only rank 0 draws: other
// ranks pass `enabled = false`.
// Threading: one thread; other threads may log at the same time.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace hasten {

class ProgressBar {
 public:
  /// `total` is the amount of work, ≥ 1. `label` comes before the bar.
  ProgressBar(std::string label, int64_t total, bool enabled);
  /// Ends the line if the bar was drawn. Never throws.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// `done` is the total work done so far. `note` comes after the bar: names and values, as in
  /// "epoch 0.45 loss 0.41". The first ones are left out if the terminal is too narrow.
  /// `seconds_left`: by default the time so far per work done, for the work left.
  /// Redraws at most 10 times a second. A call that does not draw costs one read of the steady
  /// clock and a comparison.
  void update(int64_t done, const std::string& note = {}, std::optional<double> seconds_left = {});
  /// Removes the bar from the terminal so that a line can be printed. The next update() draws it
  /// again. The default log sink calls this itself.
  void clear();
  /// Draws the last state and ends the line. Later calls do nothing.
  void finish();

 private:
  std::string text(std::chrono::steady_clock::time_point now, int width) const;
  void draw(std::chrono::steady_clock::time_point now);

  std::string label_;
  int64_t total_;
  bool enabled_;
  bool terminal_ = false;
  int64_t done_ = 0;
  std::string note_;
  std::optional<double> seconds_left_{};
  int64_t printed_done_ = 0; // at the last plain line
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point last_draw_;
};

} // namespace hasten
