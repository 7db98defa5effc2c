// What the log and the progress bar share: the last line of the terminal.
// Internal to base.
#pragma once

#include <mutex>
#include <string_view>

namespace hasten::detail {

/// Held while stderr is written or the bar is drawn.
std::mutex& terminal_mutex();

/// A bar stands on the terminal's last line. Guarded by terminal_mutex().
extern bool terminal_bar_drawn;

/// Writes everything to stderr, in one write(2) where the kernel takes it whole.
/// Errors are ignored: there is nowhere left to report them.
void write_stderr(std::string_view bytes) noexcept;

/// Erases the line the cursor is in.
inline constexpr std::string_view kEraseLine = "\r\x1b[K";

} // namespace hasten::detail
