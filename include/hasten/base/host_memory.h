// How much memory this process could still take. Local; reads small files.
#pragma once

#include <cstdint>
#include <filesystem>

namespace hasten {

/// Bytes that can be taken without swapping and without this process's control group
/// (v1 or v2, or any above it) ending something: the least of MemAvailable and, for
/// each group with a limit, limit - usage + pages of files that are not in use.
/// Of the whole host: ranks share it. 0 where the system does not say.
int64_t available_memory_bytes();

namespace detail {

/// The same, of the files below `root`.
int64_t memory_left_below(const std::filesystem::path& root);

} // namespace detail

} // namespace hasten
