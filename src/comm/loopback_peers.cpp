#include "loopback_peers.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "hasten/base/store_channel.h"

namespace hasten::detail {

std::set<int> listening_ports() {
  std::set<int> ports;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    int listening = 0;
    socklen_t size = sizeof listening;
    sockaddr_in6 address{};
    socklen_t address_size = sizeof address;
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) == 0 && listening != 0 &&
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &address_size) == 0 &&
        (address.sin6_family == AF_INET || address.sin6_family == AF_INET6)) {
      ports.insert(ntohs(address.sin6_port)); // where IPv4 has its own
    }
  }
  return ports;
}

std::optional<unsigned> stranger_at(const std::set<int>& ports) {
  // Established connections. If both ends are on this host, both are listed.
  std::map<std::pair<std::string, std::string>, unsigned> users;
  for (const char* path : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream table(path);
    std::string line;
    std::getline(table, line); // names of the columns
    while (std::getline(table, line)) {
      char local[64]; // address:port, in hexadecimal digits
      char remote[64];
      char state[3];
      unsigned uid = 0;
      if (std::sscanf(line.c_str(), "%*s %63s %63s %2s %*s %*s %*s %u", local, remote, state,
                      &uid) == 4 &&
          std::string_view(state) == "01") { // established
        users[{local, remote}] = uid;
      }
    }
  }
  for (const auto& [ends, uid] : users) {
    const auto& [local, remote] = ends;
    const auto port = std::stoi(local.substr(local.find(':') + 1), nullptr, 16);
    const auto other = users.find({remote, local});
    if (ports.contains(port) && other != users.end() && !own_or_root(other->second)) {
      return other->second;
    }
  }
  return std::nullopt;
}

} // namespace hasten::detail
