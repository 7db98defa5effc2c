// The exceptions of hasten and the one form their messages have:
//   [part::function] what: name=value. Expected …. Fix: ….
// "rank r/w " comes before it once the process is in a world of more than one rank.
// Threading: call set_error_rank() before other threads use hasten. Other functions: any thread.
#pragma once

#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace hasten {

/// What a program may act on, in addition to an error's class.
enum class ErrorKind {
  other,
  /// No space, quota or file size is left. The program ends with exit code 2.
  full_disk,
  out_of_memory,
  /// A peer was late.
  timed_out
};

/// Base of hasten's exceptions. Those of LibTorch (c10::Error) pass through as they are.
class Error : public std::runtime_error {
 public:
  /// `where` is "part::function". `what` names the wrong value. `expected` and `fix` are sentences
  /// without the full stop at the end, or empty.
  Error(std::string_view where, std::string_view what, std::string_view expected = {},
        std::string_view fix = {}, ErrorKind kind = ErrorKind::other);
  ErrorKind kind() const { return kind_; }
  /// what() without "rank r/w [part::function] ".
  std::string_view text() const;

 private:
  ErrorKind kind_;
};

/// A file, environment variable, flag or argument of the user is wrong. The program ends with
/// exit code 2. docs/errors.md says what state each class of error leaves.
class InputError : public Error {
 public:
  using Error::Error;
};

/// Another rank threw an InputError, and this rank repeats it. Show only the first to the user.
class PeerInputError : public InputError {
 public:
  using InputError::InputError;
};

/// A peer died, is late, or runs another operation than this rank. Once a group has lost a
/// peer, every later call on it throws this error too.
class CommunicationError : public Error {
 public:
  using Error::Error;
};

/// Training cannot continue, for example because a loss or gradient is not finite.
class TrainingError : public Error {
 public:
  using Error::Error;
};

/// The user or the launcher sent a signal that stops the process (SIGINT, SIGTERM).
class Interrupted : public Error {
 public:
  /// `signal` is the number of the signal; the exit code is 128 + signal.
  explicit Interrupted(int signal);
  int signal() const { return signal_; }

 private:
  int signal_;
};

/// Error::kind() of hasten's exceptions. For those of the standard library: full_disk or
/// out_of_memory if they report it. core/memory.h has the function that knows LibTorch's, too.
ErrorKind kind_of(const std::exception& error);
/// full_disk if this value of errno reports it.
ErrorKind kind_of_errno(int error);

/// Later messages start with "rank r/w ". Does nothing if world_size is 1.
void set_error_rank(int rank, int world_size);
namespace detail {
std::string error_rank_text(); // "rank r/w ", or empty
} // namespace detail

/// Returns the name closest to `word`. Empty if its edit distance is above 2 (1 for words
/// shorter than 4) and above a third of the word's length.
std::string nearest_name(std::string_view word, std::span<const std::string> names);

} // namespace hasten
