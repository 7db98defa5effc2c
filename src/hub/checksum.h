// The checksum that the hub has of a file. Private to src/hub.
#pragma once

#include <filesystem>
#include <string>

namespace hasten::detail {

/// False where OpenSSL is not installed.
bool checksum_available();

/// True if the file has this checksum: 64 hex digits are its SHA-256, 40 are the name that git gives
/// it. Any other text is no checksum, and true.
bool has_checksum(const std::filesystem::path& file, const std::string& etag);

} // namespace hasten::detail
