#include "hasten/base/timeouts.h"

#include <limits>

#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"

namespace hasten {

static std::chrono::milliseconds timeout_of(const char* variable, double otherwise) {
  if (const auto text = detail::environment_value(variable)) {
    otherwise = parse_number<double>(*text).value_or(std::numeric_limits<double>::quiet_NaN());
    check_timeout("base::timeouts", variable, otherwise);
  }
  return from_seconds(otherwise);
}

std::chrono::milliseconds default_ddp_timeout() { return timeout_of("HASTEN_DDP_TIMEOUT", 600); }

std::chrono::milliseconds default_heartbeat_timeout() {
  return timeout_of("HASTEN_HEARTBEAT_TIMEOUT", 5);
}

void check_timeout(std::string_view where, const char* name, double seconds) {
  if (!(seconds >= 0.1 && seconds <= 1e7)) { // NaN neither
    throw InputError(where, std::string(name) + "=" + format_digits(seconds),
                     "seconds, 0.1 to 1e7");
  }
}

} // namespace hasten
