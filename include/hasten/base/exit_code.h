// Turns exceptions into one line in the log, a recorded error for the launcher
// (recorded_error.h) and the program's exit code. Does not use LibTorch.
// Threading: main thread.
#pragma once

#include <exception>
#include <functional>
#include <type_traits>

namespace hasten {

inline constexpr int kExitOk = 0;
/// Training or anything else failed.
inline constexpr int kExitFailed = 1;
/// The user's flags, files or environment are wrong, or a disk is full.
inline constexpr int kExitBadInput = 2;

/// Ends this process with `code` and without a message, because another rank prints why.
class SilentExit : public std::exception {
 public:
  explicit SilentExit(int code) : code_(code) {}
  int code() const { return code_; }
  const char* what() const noexcept override { return "another rank prints why this rank ended"; }

 private:
  int code_;
};

/// Runs `body` and returns its exit code. Logs an exception as an error and returns
///   kExitBadInput  for an InputError or a full disk
///   128 + n        for Interrupted, or for any exception after signal n was remembered. With
///                  several ranks nothing is logged, since the launcher reports the signal
///   kExitFailed    for any other std::exception
/// A TrainingError or CommunicationError, which all ranks throw, is printed once. hasten's
/// launcher prints it. Under other launchers the first rank of each host prints it; for a
/// CommunicationError the first live rank of the host. Other errors are printed by their rank.
/// Under hasten's launcher only its first rank does so, and the launcher prints those of the other
/// ranks that differ.
int exit_code_of(int local_rank, int world_size, const std::function<int()>& body);

namespace detail {
int record_main(const std::function<int()>& main);
} // namespace detail

/// Runs a program's main function as a rank of its world, like torch.distributed.elastic's record:
///
///   int main(int argc, char** argv) {
///     return hasten::record([&] { train(argc, argv); });
///   }
///
/// `main` returns its exit code, or void for kExitOk. An exception becomes a message on stderr,
/// the recorded error that the launcher reports, and an exit code as in exit_code_of().
/// A signal ends the program unless it has called install_interrupt_handlers() (process.h).
template <typename Main>
int record(Main&& main) {
  if constexpr (std::is_void_v<std::invoke_result_t<Main&>>) {
    return detail::record_main([&] {
      main();
      return kExitOk;
    });
  } else {
    return detail::record_main([&] { return main(); });
  }
}

} // namespace hasten
