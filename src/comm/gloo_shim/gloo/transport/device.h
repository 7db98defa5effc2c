// See algorithm.h. Held by shared_ptr alone.
#pragma once

namespace gloo::transport {

class Device;

} // namespace gloo::transport
