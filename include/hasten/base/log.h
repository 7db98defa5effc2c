// The log: one replaceable sink for all messages of hasten. By default rank 0 logs info and
// above, other ranks warnings and above. Results of programs do not go through the log.
// Threading: any thread may call any function. Lines of several threads are not mixed.
#pragma once

#include <unistd.h>

#include <functional>
#include <string>
#include <string_view>

namespace hasten {

enum class LogLevel { debug = 0, info = 1, warning = 2, error = 3, off = 4 };

using LogSink = std::function<void(LogLevel, std::string_view line)>;

/// Replaces the sink. The default sink writes one line to stderr: "[rank r/w] " on every rank
/// but 0, then "warning: " or "error: ", then the text. It first removes a progress bar from the
/// terminal. On a terminal it wraps warnings and errors between words. An empty function restores the default. Several threads may call the sink at the
/// same time.
void set_log_sink(LogSink sink);

/// Minimum level that reaches the sink, on rank 0 (`main`) and on the other ranks (`replica`).
/// Defaults: info and warning.
void set_log_levels(LogLevel main, LogLevel replica);

/// Sets the rank that log lines name. Called when the world is known.
void set_log_rank(int rank, int world_size);

bool log_enabled(LogLevel level);

/// Logs one line. `line` has no line break.
void log(LogLevel level, std::string_view line);

inline void log_info(std::string_view line) { log(LogLevel::info, line); }
inline void log_warning(std::string_view line) { log(LogLevel::warning, line); }
inline void log_error(std::string_view line) { log(LogLevel::error, line); }

/// Columns of the terminal at STDERR_FILENO or STDOUT_FILENO, 80 if it does not say. 0 if there is
/// no terminal, and for stderr if a sink gets the lines.
int terminal_columns(int fd = STDERR_FILENO);

enum class Style { bold, red, yellow, green };

/// The text in the style for the terminal at `fd`. The text itself if there is no terminal, if
/// TERM is "dumb", or if NO_COLOR is not empty (https://no-color.org).
std::string styled(std::string_view text, Style style, int fd = STDERR_FILENO);

} // namespace hasten
