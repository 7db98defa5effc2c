#include "network_interface.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "hasten/base/store_channel.h"

namespace hasten::detail {

bool is_address(const std::string& host) {
  unsigned char bytes[sizeof(in6_addr)];
  const std::string digits = host.substr(0, host.find('%'));
  return inet_pton(AF_INET, host.c_str(), bytes) == 1 ||
         inet_pton(AF_INET6, digits.c_str(), bytes) == 1;
}

bool is_loopback_address(const std::string& host) {
  return host == "::1" || (host.starts_with("127.") && is_address(host));
}

std::string socket_address_text(const sockaddr* address) {
  const socklen_t size = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  char text[NI_MAXHOST] = "";
  getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

/// The address from which this host would send to `target`; empty without a route. Sends nothing.
std::string address_towards(const std::string& target) {
  const auto to = is_address(target) ? host_addresses(target, 9) : nullptr;
  if (to == nullptr) {
    return {};
  }
  const FileDescriptor fd(socket(to->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  auto* const address = reinterpret_cast<sockaddr*>(&own);
  const bool found = connect(fd.get(), to->ai_addr, to->ai_addrlen) == 0 &&
                     getsockname(fd.get(), address, &size) == 0;
  return found ? socket_address_text(address) : "";
}

/// The address of interface `name`, IPv4 before IPv6. If `name` is empty: of the first interface
/// that is up and not loopback. Empty if there is none; `names` then lists the interfaces.
std::string interface_address(const std::string& name, std::string& names) {
  ifaddrs* all = nullptr;
  getifaddrs(&all);
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> freed(all, freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
      if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != family) {
        continue;
      }
      if (name.empty() ? (i->ifa_flags & (IFF_UP | IFF_LOOPBACK)) == IFF_UP : name == i->ifa_name) {
        return socket_address_text(i->ifa_addr);
      }
      names += (names.empty() ? "" : ", ") + std::string(i->ifa_name);
    }
  }
  return {};
}

std::string reachable_address(const std::string& interface, const std::string& target) {
  std::string name =
      interface.empty() ? environment_value("GLOO_SOCKET_IFNAME").value_or("") : interface;
  if (is_address(name)) {
    return name;
  }
  std::string names;
  std::string source = name.empty() ? address_towards(target) : "";
  if (!source.empty() && !is_loopback_address(source)) {
    return source;
  }
  const std::string address = interface_address(name, names);
  if (address.empty() && !name.empty()) {
    throw InputError("comm::create",
                     (interface.empty() ? "GLOO_SOCKET_IFNAME=" : "interface_address=") + name +
                         " is no interface with an address",
                     "one of this host's: " + names);
  }
  return address.empty() ? target : address;
}

std::string store_address_of(const std::vector<Hello>& hellos, int rank) {
  const Hello& own = hellos[static_cast<size_t>(rank)];
  const auto reaches = [](const Hello& hello) {
    return !hello.store_address.empty() && !is_loopback_address(hello.store_address);
  };
  for (const Hello& other : hellos) {
    if (!reaches(own) && other.network_host != own.network_host && reaches(other)) {
      return other.store_address;
    }
  }
  return reaches(own) ? own.store_address : "";
}

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
