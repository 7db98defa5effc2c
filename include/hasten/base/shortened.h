// Text of any size, cut down for a message.
// Threading: free functions.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace hasten {

/// Words above 512 bytes are shortened in the middle, then the whole to `limit`: what
/// stands between long words is kept, the name of a line behind a value of a megabyte.
/// Characters of UTF-8 stay whole. Error does so with each part of its message, log()
/// with each line.
std::string shortened(std::string_view text, size_t limit = 2048);

} // namespace hasten
