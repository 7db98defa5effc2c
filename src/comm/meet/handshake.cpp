#include "hasten/comm/handshake.h"

#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <utility>

#include "hasten/base/process.h"

namespace hasten::detail {

std::string link_target(const char* path) {
  std::array<char, 128> target{};
  const ssize_t size = readlink(path, target.data(), target.size());
  return size > 0 ? std::string(target.data(), static_cast<size_t>(size)) : "";
}

Hello own_hello(const World& world, const std::string& device_kind, const std::string& backend,
                std::map<std::string, std::string> options) {
  std::ifstream boot_file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  boot_file >> boot;
  boot = environment_value("HASTEN_TEST_HOST").value_or(boot); // processes of one host as several
  Hello hello;
  hello.rank = hello.launch_rank = world.rank;
  hello.world_size = world.world_size;
  hello.hasten_version = HASTEN_VERSION;
  hello.torch_version = TORCH_VERSION;
  hello.device_kind = device_kind;
  hello.backend = backend;
  hello.options = std::move(options);
  hello.process_host = boot + " " + link_target("/proc/self/ns/pid");
  hello.network_host = boot + " " + link_target("/proc/self/ns/net");
  hello.pid = getpid();
  hello.start_time = process_start_time(getpid());
  return hello;
}

std::string first_difference(const std::vector<std::optional<Hello>>& hellos) {
  if (!hellos[0]) {
    return "";
  }
  const auto fields = [](const Hello& hello) {
    std::vector<std::pair<std::string, std::string>> all{
        {"hasten version", hello.hasten_version}, // another one may lack the others
        {"world size", std::to_string(hello.world_size)},
        {"torch version", hello.torch_version},
        {"device kind", hello.device_kind},
        {"back end", hello.backend},
    };
    all.insert(all.end(), hello.options.begin(), hello.options.end());
    return all;
  };
  for (const std::optional<Hello>& hello : hellos) {
    if (!hello) {
      continue;
    }
    const auto own = fields(*hello);
    const auto expected = fields(*hellos[0]);
    for (size_t i = 0; i < std::min(own.size(), expected.size()); ++i) {
      if (own[i].second != expected[i].second) {
        return own[i].first + ": rank " + std::to_string(hello->rank) + " has " + own[i].second +
               ", rank 0 has " + expected[i].second;
      }
    }
  }
  return "";
}

std::vector<std::vector<int>> ranks_by_host(const std::vector<std::string>& names) {
  std::map<std::string, size_t> found;
  std::vector<std::vector<int>> hosts;
  for (size_t rank = 0; rank < names.size(); ++rank) {
    const auto [at, is_new] = found.emplace(names[rank], hosts.size());
    if (is_new) {
      hosts.emplace_back();
    }
    hosts[at->second].push_back(static_cast<int>(rank));
  }
  return hosts;
}

} // namespace hasten::detail
