// Small whole-file operations: read, replace in one step, sync.
// Commit of whole folders: hasten/io/commit.h.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace hasten {

/// The whole file as bytes. Throws InputError naming the path and the reason.
std::string read_file(const std::filesystem::path& path);

/// Replaces `path` by `bytes`: temporary file beside it, fsync, rename, fsync of
/// the folder. A crash leaves the old or the new file, never a mixture. The old
/// file's permissions stay; of a symbolic link the file it leads to is replaced.
/// Throws Error naming path and reason (a full disk), InputError where the path
/// does not exist or may not be written; the old file stays.
void write_file_atomically(const std::filesystem::path& path, std::string_view bytes);

/// fsync of a file or a folder. Throws Error.
void sync_path(const std::filesystem::path& path);

/// xxh3 64-bit hash as 16 hex digits.
std::string hash_hex(std::string_view bytes);

namespace detail {

/// Throws for a system call that failed with errno `error`: "path: No space left
/// on device". A path that does not exist or may not be touched is the user's
/// fault, an InputError; a full or failing disk is not, an Error.
[[noreturn]] void throw_file_error(const char* where, const std::filesystem::path& path, int error);

} // namespace detail

} // namespace hasten
