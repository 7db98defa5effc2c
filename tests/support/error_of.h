// The message of an exception.
#pragma once

#include <string>

#include "hasten/base/error.h"

namespace hasten::testing_support {

/// What `call` throws; empty if it throws nothing. Exceptions of other types pass.
template <typename Caught = Error, typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Caught& error) {
    return error.what();
  }
  return {};
}

} // namespace hasten::testing_support
