// Temporary names, "<target>.tmp-…", for a file or folder that will replace the target.
// Threading: free functions.
#pragma once

#include <filesystem>
#include <functional>
#include <string_view>

namespace hasten {

/// Creates something new with the name "<target><mark><pid>-<n>". Calls `make` with one name
/// after the other while it returns EEXIST: a name may be left by an earlier process with this
/// pid, or used by one in another container. `made` is the last name.
/// Returns the result of `make`: 0, or errno.
int make_beside(const std::filesystem::path& target, const char* mark, std::filesystem::path& made,
                const std::function<int(const std::filesystem::path&)>& make);

/// Whether a name ends like those of make_beside() with the mark ".tmp-".
bool is_temporary_name(std::string_view name);

/// Creates a temporary file and opens it for writing. Returns -1 and sets errno on failure.
int open_temporary(const std::filesystem::path& target, std::filesystem::path& temporary);

} // namespace hasten
