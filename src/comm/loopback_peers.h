// Which processes of this host are connected to this process's listeners, from /proc/net/tcp. Gloo
// accepts every connection.
#pragma once

#include <optional>
#include <set>

namespace hasten::detail {

/// TCP ports at which this process listens.
std::set<int> listening_ports();

/// The user of a process of this host that is connected to one of `ports`, if it is neither this
/// user nor root. Empty if there is none, or no /proc.
std::optional<unsigned> stranger_at(const std::set<int>& ports);

} // namespace hasten::detail
