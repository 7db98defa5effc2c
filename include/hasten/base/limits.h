// The largest numbers that more than one part refuses to go beyond.
// Threading: constants.
#pragma once

namespace hasten {

/// Most processes of a world: of WORLD_SIZE and the like, and of --nproc.
inline constexpr int kMaxWorldSize = 65'536;

} // namespace hasten
