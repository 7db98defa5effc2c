// See algorithm.h. c10d's inline setTimeout() calls the one member function.
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

} // namespace gloo
