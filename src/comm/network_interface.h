// Which of this host's addresses ranks on other hosts reach.
#pragma once

#include <string>
#include <vector>

#include "hasten/comm/handshake.h"

namespace hasten::detail {

bool is_address(const std::string& host); // digits, IPv4 or IPv6
bool is_loopback_address(const std::string& host); // 127.x.x.x or ::1, as digits

/// An address of this host that others reach: `interface`, an address or an interface's
/// name; where that is empty GLOO_SOCKET_IFNAME's; else the one on the way to `target`
/// (digits); else the first that is not loopback; else `target`. Throws InputError
/// where there is no such interface.
std::string reachable_address(const std::string& interface, const std::string& target);

/// The address at which others reach the store: this rank's own way to it, or, where
/// that is loopback, the way of the first rank of another host; else empty. [rank]
std::string store_address_of(const std::vector<Hello>& hellos, int rank);

} // namespace hasten::detail
