// Replaces stderr or stdout by a file or a terminal during a scope.
#pragma once

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>

#include "support/environment.h"
#include "support/temporary_folder.h"

namespace hasten::testing_support {

/// Everything that this process writes to the descriptor, by default stderr.
class CapturedStderr {
 public:
  /// A pseudo terminal makes isatty() true; its output has "\r\n" line ends. It has `columns`, or
  /// no size. It has escape codes and colours, whatever this process's TERM and NO_COLOR are.
  explicit CapturedStderr(bool terminal = false, int columns = 0, int descriptor = STDERR_FILENO)
      : descriptor_(descriptor), saved_(::dup(descriptor)) {
    int target = -1;
    if (terminal) {
      reader_ = ::posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
      if (reader_ < 0 || ::grantpt(reader_) != 0 || ::unlockpt(reader_) != 0) {
        throw std::runtime_error("no pseudo terminal");
      }
      target = ::open(::ptsname(reader_), O_RDWR | O_NOCTTY | O_CLOEXEC);
      winsize size{};
      size.ws_col = static_cast<unsigned short>(columns);
      ::ioctl(target, TIOCSWINSZ, &size);
      environment_.emplace(EnvironmentValues{{"TERM", "xterm"}, {"NO_COLOR", {}}});
    } else {
      reader_ = ::open((folder_ / "stderr").c_str(), O_RDWR | O_CREAT, 0600);
      target = ::dup(reader_);
    }
    if (saved_ < 0 || target < 0 || ::dup2(target, descriptor_) < 0) {
      throw std::runtime_error("the descriptor cannot be replaced");
    }
    ::close(target);
    is_terminal_ = terminal;
  }
  ~CapturedStderr() {
    ::dup2(saved_, descriptor_);
    ::close(saved_);
    ::close(reader_);
  }
  CapturedStderr(const CapturedStderr&) = delete;
  CapturedStderr& operator=(const CapturedStderr&) = delete;

  /// Everything that was written since the last call.
  std::string take() {
    if (!is_terminal_) {
      ::lseek(reader_, read_so_far_, SEEK_SET);
    }
    std::string text;
    char block[4096];
    for (ssize_t got; (got = ::read(reader_, block, sizeof block)) > 0;) {
      text.append(block, static_cast<size_t>(got));
    }
    read_so_far_ += static_cast<off_t>(text.size());
    if (!is_terminal_) { // both descriptors share one position
      ::lseek(reader_, 0, SEEK_END);
    }
    return text;
  }

 private:
  TemporaryFolder folder_;
  std::optional<ScopedEnvironment> environment_{};
  int descriptor_;
  int saved_;
  int reader_ = -1;
  bool is_terminal_ = false;
  off_t read_so_far_ = 0;
};

} // namespace hasten::testing_support
