// The exceptions of hasten and the one form their messages have:
//   [part::function] what: name=value. Expected …. Fix: ….
// with "rank r/w " before it once the process is part of a world larger than one.
// Threading: call set_error_rank() before other threads use hasten. All else: any thread.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace hasten {

/// Base of hasten's exceptions. Those of LibTorch (c10::Error) pass through as they are.
class Error : public std::runtime_error {
 public:
  /// `where` is "part::function"; `what` names the value that is wrong;
  /// `expected` and `fix` are sentences without their final stop, or empty.
  Error(std::string_view where, std::string_view what, std::string_view expected = {},
        std::string_view fix = {});
};

/// The user's files, flags, environment or arguments are wrong. The program ends with
/// exit code 2. docs/errors.md says what state each class of error leaves.
class InputError : public Error {
 public:
  using Error::Error;
};

/// Another rank threw an InputError, and this rank repeats it. Only the first needs to be
/// shown to the user.
class PeerInputError : public InputError {
 public:
  using InputError::InputError;
};

/// A peer died, is late, or does something else than this rank. Once a group has lost a
/// peer, every later call on it throws this, too.
class CommunicationError : public Error {
 public:
  using Error::Error;
};

/// Training cannot go on: a loss or gradient that is not finite, for example.
class TrainingError : public Error {
 public:
  using Error::Error;
};

/// The user or the launcher asked the process to stop (SIGINT, SIGTERM).
class Interrupted : public Error {
 public:
  /// `signal` is the number of the signal; the exit code is 128 + signal.
  explicit Interrupted(int signal);
  int signal() const { return signal_; }

 private:
  int signal_;
};

/// Makes later messages start with "rank r/w ". Nothing for world_size 1.
void set_error_rank(int rank, int world_size);

/// The candidate closest to `word`; empty where the edit distance is above 2
/// (1 for words shorter than 4) and above a third of the length.
std::string nearest_name(std::string_view word, const std::string* first, const std::string* last);

} // namespace hasten
