// Encodes many texts with several threads. Private to src/text.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "hasten/text/tokenizer.h"

namespace hasten::detail {

/// encode(i) of 0 to count - 1, in order. `threads` >= 1 share the calls; the result does not depend
/// on their number. Throws InputError with the first row that `encode` refuses.
std::vector<Encoding> encode_parallel(size_t count, int threads,
                                      const std::function<Encoding(size_t)>& encode);

} // namespace hasten::detail
