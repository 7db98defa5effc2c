// Default time limits for waiting for other ranks. Threading: free functions.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <string_view>

namespace hasten {

/// Maximum wait for a rank that is alive but late: HASTEN_DDP_TIMEOUT seconds, else 600 s (torch
/// and transformers: 1800 s). Throws InputError like check_timeout.
std::chrono::milliseconds default_ddp_timeout();
/// Maximum time until a rank that died, froze or cannot be reached is reported:
/// HASTEN_HEARTBEAT_TIMEOUT seconds, else 5 s. Throws InputError like check_timeout.
std::chrono::milliseconds default_heartbeat_timeout();

/// Throws InputError "[where] name=seconds …" unless `seconds` is 0.1 to 1e7 (115 days).
void check_timeout(std::string_view where, const char* name, double seconds);

inline std::chrono::milliseconds from_seconds(double seconds) {
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

} // namespace hasten
