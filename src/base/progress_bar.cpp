#include "hasten/base/progress_bar.h"
#include "hasten/base/text.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <utility>

#include "terminal.h"

namespace hasten {

constexpr auto kBarRedraw = std::chrono::milliseconds(100);
constexpr auto kBarPlainLine = std::chrono::seconds(5);

ProgressBar::ProgressBar(std::string label, int64_t total, bool enabled)
    : label_(std::move(label)),
      total_(std::max<int64_t>(total, 1)),
      enabled_(enabled),
      terminal_(enabled && ::isatty(STDERR_FILENO) == 1 && !detail::dumb_terminal()),
      start_(std::chrono::steady_clock::now()),
      // A bar shows immediately, a plain line after the first five seconds.
      last_draw_(terminal_ ? start_ - kBarRedraw : start_) {}

ProgressBar::~ProgressBar() {
  try {
    if (enabled_ && terminal_) {
      const std::lock_guard lock(detail::terminal_mutex());
      if (std::exchange(detail::terminal_bar_drawn, false)) {
        detail::write_stderr("\n");
      }
    }
  } catch (...) { // the mutex cannot be locked: leave the line as it is
  }
}

void ProgressBar::update(int64_t done, const std::string& note,
                         std::optional<double> seconds_left) {
  if (!enabled_) {
    return;
  }
  done_ = std::clamp<int64_t>(done, 0, total_);
  note_ = note;
  seconds_left_ = seconds_left;
  const auto now = std::chrono::steady_clock::now();
  const bool due =
      terminal_ ? now - last_draw_ >= kBarRedraw
                : now - last_draw_ >= kBarPlainLine && (done_ - printed_done_) * 10 >= total_;
  if (due) {
    draw(now);
  }
}

void ProgressBar::clear() {
  const std::lock_guard lock(detail::terminal_mutex());
  if (enabled_ && std::exchange(detail::terminal_bar_drawn, false)) {
    detail::write_stderr(detail::kEraseLine);
  }
}

void ProgressBar::finish() {
  if (!enabled_) {
    return;
  }
  draw(std::chrono::steady_clock::now());
  if (terminal_) {
    const std::lock_guard lock(detail::terminal_mutex());
    detail::terminal_bar_drawn = false;
    detail::write_stderr("\n");
  }
  enabled_ = false;
}

// "train  45% [=========>          ] 450/1,000 00:12<00:15 loss 0.41"
std::string ProgressBar::text(std::chrono::steady_clock::time_point now, int width) const {
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const double left =
      seconds_left_ ? *seconds_left_
      : done_ > 0   ? elapsed * static_cast<double>(total_ - done_) / static_cast<double>(done_)
                    : std::numeric_limits<double>::infinity();
  const double share = static_cast<double>(done_) / static_cast<double>(total_);
  char percent[8];
  std::snprintf(percent, sizeof percent, "%3d%%", static_cast<int>(share * 100));
  std::string head = label_ + " " + percent + " ";
  std::string tail = format_count(done_) + "/" + format_count(total_) + " " +
                     format_duration(elapsed) + "<" + format_duration(left);
  std::string note = note_;
  // A part of a number would be a wrong one, so names and values go together.
  while (width > 0 && !note.empty() &&
         head.size() + tail.size() + 1 + note.size() > static_cast<size_t>(width - 1)) {
    const size_t next = note.find(' ', note.find(' ') + 1);
    note.erase(0, next == std::string::npos ? next : next + 1);
  }
  if (!note.empty()) {
    tail += " " + note;
  }
  // Leave one column free: a terminal wraps when the last column is written.
  const int room = width - 4 - static_cast<int>(head.size() + tail.size());
  if (room >= 5) {
    const int cells = std::min(room, 40);
    const int full = static_cast<int>(share * cells);
    head += "[" + std::string(static_cast<size_t>(full), '=') +
            std::string(static_cast<size_t>(cells - full), ' ') + "] ";
  }
  std::string line = head + tail;
  if (width > 0 && line.size() > static_cast<size_t>(width - 1)) {
    line.resize(static_cast<size_t>(width - 1));
  }
  return line;
}

void ProgressBar::draw(std::chrono::steady_clock::time_point now) {
  last_draw_ = now;
  printed_done_ = done_;
  const std::lock_guard lock(detail::terminal_mutex());
  if (terminal_) {
    detail::write_stderr(std::string(detail::kEraseLine) +
                         text(now, detail::window_columns(STDERR_FILENO)));
    detail::terminal_bar_drawn = true;
  } else {
    detail::write_stderr(text(now, 0) + "\n");
  }
}

} // namespace hasten
