#include "loopback_peers.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
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
      std::istringstream fields(line);
      std::string number;
      std::string local; // address:port, in hexadecimal digits
      std::string remote;
      std::string state;
      std::string skipped;
      unsigned uid = 0;
      fields >> number >> local >> remote >> state;
      fields >> skipped >> skipped >> skipped >> uid;
      if (fields && state == "01") { // established
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
