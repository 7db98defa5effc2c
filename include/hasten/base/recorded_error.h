// The error that a failed rank records for its launcher: a small JSON file in torchrun's form,
// at the path that TORCHELASTIC_ERROR_FILE names.
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
namespace detail {
/// With several ranks "rank r/w " comes before it, as in hasten's own errors.
std::string message_of_rank(const std::exception& error);
} // namespace detail

/// Why a rank failed, as the rank recorded it.
struct RecordedError {
  std::string message{};
  /// Time of recording.
  std::chrono::system_clock::time_point time{};
  /// True if the error follows from another rank's failure (CommunicationError, PeerInputError).
  /// It is then not the first cause if another rank recorded one that does not.
  bool of_a_peer = false;
  /// True if the rank has printed the message itself.
  bool shown = false;
};

/// Writes `error` to the file that TORCHELASTIC_ERROR_FILE names. Does nothing if the variable
/// is not set, the file cannot be written or the file exists: the first error counts.
/// hasten-worker calls it for the error that ends it. Your own program may call it in the last
/// catch of its main. `shown`: the rank prints the error itself. True if it wrote the file.
bool record_error(const std::exception& error, bool shown = false) noexcept;

/// Whether another live rank of this host throws the same CommunicationError as this rank, so
/// that this rank need not print it. Communicators set it.
void set_said_by_peer(bool said) noexcept;
bool said_by_peer() noexcept;

/// True if a launcher of hasten reads and prints what this process records.
bool launcher_says_errors() noexcept;

/// Reads the file that record_error() or Python's torch.distributed.elastic wrote. Empty if there
/// is no such file or it has another form. Never throws.
std::optional<RecordedError> read_recorded_error(const std::filesystem::path& path) noexcept;

} // namespace hasten
