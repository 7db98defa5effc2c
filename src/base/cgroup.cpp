#include "cgroup.h"

#include <fstream>
#include <sstream>

namespace hasten::detail {

/// Mount points of the v2 tree and of the v1 tree with the controller.
struct CgroupMounts {
  std::filesystem::path v2;
  std::filesystem::path v1;
};

CgroupMounts find_cgroup_mounts(const std::filesystem::path& root, const std::string& controller) {
  // "36 35 98:0 /in-fs /mount opts … - type source super,opts"
  CgroupMounts mounts;
  std::ifstream file(root / "proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) {
      continue;
    }
    std::istringstream before(line.substr(0, dash));
    std::istringstream after(line.substr(dash + 3));
    std::string skip;
    std::string mount;
    std::string type;
    std::string options;
    before >> skip >> skip >> skip >> skip >> mount;
    after >> type >> skip >> options;
    const auto folder = root / std::filesystem::path(mount).relative_path();
    if (type == "cgroup2") {
      mounts.v2 = folder;
    } else if (type == "cgroup" &&
               ("," + options + ",").find("," + controller + ",") != std::string::npos) {
      mounts.v1 = folder;
    }
  }
  return mounts;
}

std::vector<std::filesystem::path> cgroup_folders(const std::filesystem::path& root,
                                                  const std::string& controller) {
  const CgroupMounts mounts = find_cgroup_mounts(root, controller);
  std::vector<std::filesystem::path> folders;
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) { // "4:cpu,cpuacct:/path"
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool is_v2 = controllers == ",,";
    const auto& mount = is_v2 ? mounts.v2 : mounts.v1;
    if (mount.empty() ||
        (!is_v2 && controllers.find("," + controller + ",") == std::string::npos)) {
      continue;
    }
    // In a container the path may be the host's and not exist here. The mount's root is then the
    // container's own group.
    std::filesystem::path folder = std::filesystem::path(line.substr(second + 1)).relative_path();
    while (true) {
      folders.push_back(mount / folder);
      if (folder.empty()) {
        break;
      }
      folder = folder.parent_path();
    }
  }
  return folders;
}

} // namespace hasten::detail
