#include "hasten/base/log.h"

#include <sys/ioctl.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "hasten/base/files.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"
#include "terminal.h"

namespace hasten {

namespace detail {

bool terminal_bar_drawn = false;

std::mutex& terminal_mutex() {
  // Never destroyed, because other static destructors may still log.
  static auto* mutex = new std::mutex;
  return *mutex;
}

void write_stderr(std::string_view bytes) noexcept { write_all(STDERR_FILENO, bytes); }

// Atomics instead of the mutex, because log_enabled() is called before costly messages.
std::atomic<LogLevel> log_main_level{LogLevel::info};
std::atomic<LogLevel> log_replica_level{LogLevel::warning};
std::atomic<int> log_rank{0};
std::atomic<int> log_world_size{1};

struct LogSinkHolder {
  std::mutex mutex;
  std::shared_ptr<const LogSink> sink; // null: the default
};

LogSinkHolder& log_sink_holder() {
  static auto* holder = new LogSinkHolder;
  return *holder;
}

std::shared_ptr<const LogSink> log_sink() {
  auto& holder = log_sink_holder();
  const std::lock_guard lock(holder.mutex);
  return holder.sink;
}

int window_columns(int fd) {
  if (::isatty(fd) != 1) {
    return 0;
  }
  winsize size{};
  return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

bool dumb_terminal() { return environment_value("TERM") == "dumb"; }

void write_log_line(LogLevel level, std::string_view line) {
  std::string text;
  if (const int rank = log_rank; rank != 0) {
    text += "[rank " + std::to_string(rank) + "/" + std::to_string(log_world_size) + "] ";
  }
  if (level == LogLevel::warning || level == LogLevel::error) {
    const bool is_error = level == LogLevel::error;
    const std::string name = is_error ? "error:" : "warning:";
    const size_t indent = text.size() + name.size() + 1;
    text += styled(name, is_error ? Style::red : Style::yellow) + " " +
            wrapped(line, window_columns(STDERR_FILENO), indent);
  } else {
    text.append(line);
  }
  text.push_back('\n');
  const std::lock_guard lock(terminal_mutex());
  if (terminal_bar_drawn) {
    text.insert(0, kEraseLine);
    terminal_bar_drawn = false;
  }
  write_stderr(text);
}

} // namespace detail

void set_log_sink(LogSink sink) {
  auto next = sink ? std::make_shared<const LogSink>(std::move(sink)) : nullptr;
  auto& holder = detail::log_sink_holder();
  const std::lock_guard lock(holder.mutex);
  holder.sink = std::move(next);
}

void set_log_levels(LogLevel main, LogLevel replica) {
  detail::log_main_level = main;
  detail::log_replica_level = replica;
}

void set_log_rank(int rank, int world_size) {
  detail::log_rank = rank;
  detail::log_world_size = world_size;
}

int terminal_columns(int fd) {
  return fd == STDERR_FILENO && detail::log_sink() ? 0 : detail::window_columns(fd);
}

std::string styled(std::string_view text, Style style, int fd) {
  static constexpr const char* kCodes[] = {"1", "31", "33", "32"}; // [style]
  if (terminal_columns(fd) == 0 || detail::dumb_terminal() ||
      detail::environment_value("NO_COLOR")) {
    return std::string(text);
  }
  return std::string("\x1b[") + kCodes[static_cast<size_t>(style)] + "m" + std::string(text) +
         "\x1b[0m";
}

bool log_enabled(LogLevel level) {
  const LogLevel least =
      detail::log_rank == 0 ? detail::log_main_level.load() : detail::log_replica_level.load();
  return level != LogLevel::off && level >= least;
}

void log(LogLevel level, std::string_view long_line) {
  if (!log_enabled(level)) {
    return;
  }
  // Enough for all parts of an error and the caller's text around them.
  const std::string line = shortened(long_line, 8192);
  // Called without the lock, so that a sink may itself replace the sink.
  if (const auto sink = detail::log_sink()) {
    (*sink)(level, line);
  } else {
    detail::write_log_line(level, line);
  }
}

} // namespace hasten
