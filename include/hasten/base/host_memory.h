// How much memory this process can still allocate. Local. Reads small files of the system.
#pragma once

#include <cstdint>
#include <filesystem>

namespace hasten {

/// Bytes that can be allocated without swapping and without a control group's out-of-memory kill.
/// It is the minimum of MemAvailable and, for each control group of this process with a limit (v1
/// or v2, and the groups above it), limit - usage + inactive file pages. All ranks of the host
/// share these bytes. Returns 0 if the system does not report them.
int64_t available_memory_bytes();

/// Processes of this control group that the kernel has ended for want of memory; 0 if not counted.
int64_t memory_kills();

namespace detail {

/// Like available_memory_bytes(), but reads the files below `root`.
int64_t memory_left_below(const std::filesystem::path& root);
int64_t memory_kills_below(const std::filesystem::path& root);

} // namespace detail

} // namespace hasten
