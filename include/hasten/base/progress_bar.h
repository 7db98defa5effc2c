// A progress bar on stderr that degrades to plain lines where stderr is no
// terminal (one line about every tenth of the way, none more often than each
// 5 s, and a last one). Rank 0 only: other ranks make one with `enabled = false`.
// Threading: one thread; other threads may log meanwhile.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace hasten {

class ProgressBar {
 public:
  /// `total` units of work, ≥ 1; `label` stands before the bar.
  ProgressBar(std::string label, int64_t total, bool enabled);
  /// Ends the line if it was drawn; never throws.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// Work done so far (absolute) and a short text shown after the bar.
  /// Redraws at most 10 times a second. A steady clock and a comparison when it
  /// does not draw.
  void update(int64_t done, const std::string& note = {});
  /// Removes the bar from the terminal, so that a line can be printed; the next
  /// update draws it again. Lines of the default log sink do this by themselves.
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
  int64_t printed_done_ = 0; // at the last plain line
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point last_draw_;
};

} // namespace hasten
