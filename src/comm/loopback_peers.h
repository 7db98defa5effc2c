// Who is connected to this process's listeners from its own host, by /proc/net/tcp: Gloo
// takes whoever connects.
#pragma once

#include <optional>
#include <set>

namespace hasten::detail {

/// TCP ports at which this process listens.
std::set<int> listening_ports();

/// The user of a process of this host that is connected to one of `ports`, where it is
/// neither this process's nor root; nothing where there is none, or no /proc.
std::optional<unsigned> stranger_at(const std::set<int>& ports);

} // namespace hasten::detail
