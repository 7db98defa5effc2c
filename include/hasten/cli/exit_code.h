// How both programs end: exceptions become one line in the log and an exit code.
// Without LibTorch. Threading: main thread.
#pragma once

#include <exception>
#include <functional>

namespace hasten {

inline constexpr int kExitOk = 0;
/// Training or anything else failed.
inline constexpr int kExitFailed = 1;
/// The user's flags, files or environment are wrong; nothing was written.
inline constexpr int kExitBadInput = 2;

/// Ends this process with `code` and without a word: another rank has said why.
class SilentExit : public std::exception {
 public:
  explicit SilentExit(int code) : code_(code) {}
  int code() const { return code_; }
  const char* what() const noexcept override {
    return "another rank says why this one ends";
  }

 private:
  int code_;
};

/// Runs `body` and returns its exit code. An exception becomes an error line and
///   kExitBadInput  InputError, or a full disk
///   128 + n        Interrupted, or any other once signal n was remembered; with
///                  several ranks without a line, since the launcher says it
///   kExitFailed    anything else
/// What all ranks throw alike (TrainingError, CommunicationError) is said by
/// rank 0 alone.
int exit_code_of(int rank, int world_size, const std::function<int()>& body);

} // namespace hasten
