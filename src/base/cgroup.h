// The control groups of this process. Private to src/base.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace hasten::detail {

/// Folders, below `root`, of this process's v1 and v2 groups with the controller ("cpu", "memory"),
/// innermost first, up to the mount. They may not exist.
std::vector<std::filesystem::path> cgroup_folders(const std::filesystem::path& root,
                                                  const std::string& controller);

} // namespace hasten::detail
