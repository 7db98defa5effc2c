// See algorithm.h. Only held by shared_ptr.
#pragma once

namespace gloo::transport {

class Device;

} // namespace gloo::transport
