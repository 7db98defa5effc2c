// The last line of the terminal, which the log and the progress bar share. Internal to base.
#pragma once

#include <mutex>
#include <string_view>

namespace hasten::detail {

/// Hold it while writing to stderr or drawing the bar.
std::mutex& terminal_mutex();

/// True if a bar is on the terminal's last line. Guarded by terminal_mutex().
extern bool terminal_bar_drawn;

/// Writes all bytes to stderr. Ignores errors, because there is nowhere to report them.
void write_stderr(std::string_view bytes) noexcept;

/// Columns of the terminal at `fd`, 80 if it does not say; 0 if `fd` is no terminal.
int window_columns(int fd);

/// True if the terminal knows no escape codes.
bool dumb_terminal();

/// Erases the line of the cursor.
inline constexpr std::string_view kEraseLine = "\r\x1b[K";

} // namespace hasten::detail
