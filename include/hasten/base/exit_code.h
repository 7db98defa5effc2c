// How a program ends: exceptions become one line in the log, a recorded error for the
// launcher (recorded_error.h) and an exit code. Without LibTorch.
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

/// Ends this process with `code` and without a word: another rank has said why.
class SilentExit : public std::exception {
 public:
  explicit SilentExit(int code) : code_(code) {}
  int code() const { return code_; }
  const char* what() const noexcept override { return "another rank says why this one ends"; }

 private:
  int code_;
};

/// Runs `body` and returns its exit code. An exception becomes an error line and
///   kExitBadInput  InputError, or a full disk
///   128 + n        Interrupted, or any other once signal n was remembered; with
///                  several ranks without a line, since the launcher says it
///   kExitFailed    any other std::exception
/// What all ranks throw alike is said once: by the launcher where it is hasten's; else
/// a TrainingError by the first rank of each host, a CommunicationError by the first of
/// each host that is left.
int exit_code_of(int local_rank, int world_size, const std::function<int()>& body);

namespace detail {
int record_main(const std::function<int()>& main);
} // namespace detail

/// Runs a program's main function as a rank of its world, as
/// torch.distributed.elastic's record does:
///
///   int main(int argc, char** argv) {
///     return hasten::record([&] { train(argc, argv); });
///   }
///
/// `main` returns its exit code, or nothing for kExitOk. What it throws becomes a message
/// on stderr, the error that the launcher names, and an exit code, as in exit_code_of().
/// Signals end the program unless it called install_interrupt_handlers() (process.h).
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
