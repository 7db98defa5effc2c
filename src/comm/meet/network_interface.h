// The address of this host that ranks on other hosts reach, and who is connected to this process.
#pragma once

#include <sys/socket.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "hasten/comm/handshake.h"

namespace hasten::detail {

bool is_address(const std::string& host); // a numeric IPv4 or IPv6 address
bool is_loopback_address(const std::string& host); // 127.x.x.x or ::1, numeric
std::string socket_address_text(const sockaddr* address); // numeric; IPv4 or IPv6

/// An address of this host that others reach. `interface` is an address or an interface's name. If
/// it is empty, uses the interface of GLOO_SOCKET_IFNAME, else the one of the route to `target` (a
/// numeric address), else the first that is not loopback, else `target`. Throws InputError if there
/// is no such interface.
std::string reachable_address(const std::string& interface, const std::string& target);

/// The address at which other hosts reach the store: this rank's own route to it. If that is
/// loopback, the route of the first rank on another host. Empty if there is none. hellos: [rank]
std::string store_address_of(const std::vector<Hello>& hellos, int rank);

/// TCP ports at which this process listens. Gloo accepts every connection to its port.
std::set<int> listening_ports();

/// The user of a process of this host that is connected to one of `ports`, if it is neither this
/// user nor root. Empty if there is none, or no /proc.
std::optional<unsigned> stranger_at(const std::set<int>& ports);

} // namespace hasten::detail
