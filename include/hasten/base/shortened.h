// Shortens text for messages.
// Threading: free functions.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace hasten {

/// Cuts words of more than 512 bytes in the middle, then the whole text to `limit` bytes. So a
/// short word after a very long one is kept, for example the name of a line after its value. Never
/// cuts a UTF-8 character. Error calls it for each part of its message, log() for each line.
std::string shortened(std::string_view text, size_t limit = 2048);

} // namespace hasten
