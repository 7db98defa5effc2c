// One replaceable sink for everything hasten has to say. Rank 0 says info and
// above, other ranks warnings and above; results never pass here.
// Threading: all functions may be called from any thread; a line is never torn.
#pragma once

#include <functional>
#include <string_view>

namespace hasten {

enum class LogLevel { debug = 0, info = 1, warning = 2, error = 3, off = 4 };

using LogSink = std::function<void(LogLevel, std::string_view line)>;

/// Replaces the sink. The default writes one line to stderr: "[rank r/w] " on
/// replicas, then "warning: " or "error: ", then the text; a progress bar on the
/// terminal is removed before it. An empty function restores the default. The
/// sink may be called from several threads at once.
void set_log_sink(LogSink sink);

/// Least level that reaches the sink on rank 0 and on all other ranks.
/// Default: info and warning.
void set_log_levels(LogLevel main, LogLevel replica);

/// Tells the log which rank it speaks for. Called when the world is known.
void set_log_rank(int rank, int world_size);

bool log_enabled(LogLevel level);

/// One line, without its line break.
void log(LogLevel level, std::string_view line);

inline void log_info(std::string_view line) { log(LogLevel::info, line); }
inline void log_warning(std::string_view line) { log(LogLevel::warning, line); }
inline void log_error(std::string_view line) { log(LogLevel::error, line); }

} // namespace hasten
