// Reads, replaces and syncs whole files. hasten/io/commit.h replaces whole folders.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace hasten {

/// Returns the bytes of the whole file. Throws InputError that names the path and the reason.
std::string read_file(const std::filesystem::path& path);

/// Replaces the content of `path` by `bytes`: writes a temporary file in the same folder, calls
/// fsync, renames it and calls fsync on the folder. A crash leaves the old or the new file, never
/// a mixture. Keeps the old file's permissions. If `path` is a symbolic link, replaces its target.
/// Throws InputError if the folder does not exist or denies writing, and Error for other
/// failures such as a full disk. Both name the path and the reason and leave the old file.
void write_file_atomically(const std::filesystem::path& path, std::string_view bytes);

/// Calls fsync on a file or a folder. Throws Error.
void sync_path(const std::filesystem::path& path);

/// Returns the 64-bit xxh3 hash as 16 hex digits.
std::string hash_hex(std::string_view bytes);

namespace detail {

/// Throws for a system call that failed with errno `error`: "path: No space left on device".
/// It is an InputError if the path does not exist or access is denied, else an Error (for
/// example a full or failing disk).
[[noreturn]] void throw_file_error(const char* where, const std::filesystem::path& path, int error);

} // namespace detail

} // namespace hasten
