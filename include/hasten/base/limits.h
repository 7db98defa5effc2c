// Upper limits that more than one part checks.
// Threading: constants.
#pragma once

namespace hasten {

/// Maximum number of processes of a world (WORLD_SIZE and similar variables, --nproc).
inline constexpr int kMaxWorldSize = 65'536;

} // namespace hasten
