// Names beside a file or folder for what is to take its place: "<target>.tmp-…".
// Threading: free functions.
#pragma once

#include <filesystem>
#include <functional>
#include <string_view>

namespace hasten {

/// Makes something new, "<target><mark><pid>-<n>": `make` gets names until it answers
/// something else than EEXIST, since another process of this pid may have left that
/// one, or be using it in another container. `made` is the last name.
/// Returns what `make` answered: 0, or errno.
int make_beside(const std::filesystem::path& target, const char* mark, std::filesystem::path& made,
                const std::function<int(const std::filesystem::path&)>& make);

/// Whether a name ends as those that make_beside() gives with ".tmp-".
bool is_temporary_name(std::string_view name);

/// A new file, opened for writing; -1 with errno where it cannot be.
int open_temporary(const std::filesystem::path& target, std::filesystem::path& temporary);

} // namespace hasten
