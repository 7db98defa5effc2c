// What a rank that fails leaves for its launcher: a small JSON file, in the form
// and at the place (TORCHELASTIC_ERROR_FILE) that torchrun reads and shows.
// Threading: free functions.
#pragma once

#include <chrono>
#include <exception>
#include <filesystem>
#include <optional>
#include <string>

namespace hasten {

/// error.what() without the stack trace that LibTorch's exceptions carry.
std::string message_of(const std::exception& error);

/// Why a rank failed, as it said itself.
struct RecordedError {
  std::string message{};
  /// When it was recorded.
  std::chrono::system_clock::time_point time{};
  /// True for what follows from a peer's failure (CommunicationError,
  /// PeerInputError): never the first cause where another rank has one.
  bool of_a_peer = false;
  /// True where the rank has shown it to the user already.
  bool shown = false;
};

/// Writes `error` to the file that TORCHELASTIC_ERROR_FILE names. Does nothing
/// where that is not set, cannot be written, or has been written already: the
/// first error is the one that counts. hasten-worker calls it for what ends it;
/// a program of your own may in the last catch of its main. `shown`: the rank says it
/// on its stderr itself.
void record_error(const std::exception& error, bool shown = false) noexcept;

/// Whether another rank of this host, which lives, throws the CommunicationError that
/// this rank is about to throw, so that it need not be shown twice. Set by the
/// communicators.
void set_said_by_peer(bool said) noexcept;
bool said_by_peer() noexcept;

/// True where a launcher of hasten's reads what this process records, and says it.
bool launcher_says_errors() noexcept;

/// What record_error(), or Python's torch.distributed.elastic, wrote; nothing
/// where there is no such file or it is not in that form. Never throws.
std::optional<RecordedError> read_recorded_error(const std::filesystem::path& path) noexcept;

} // namespace hasten
