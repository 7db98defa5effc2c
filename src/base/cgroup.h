// The control groups this process is in. Private to src/base.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace hasten::detail {

/// Folders, below `root`, of this process's groups that have the controller ("cpu",
/// "memory"), innermost first up to the mount, of v1 and v2; perhaps not existing.
std::vector<std::filesystem::path> cgroup_folders(const std::filesystem::path& root,
                                                  const std::string& controller);

} // namespace hasten::detail
