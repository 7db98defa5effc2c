#include "http.h"

namespace hasten::detail {

bool http_available() { return false; }

HttpReply http_request(HttpRequest, const std::string&, const std::string&) {
  return {.failure = HttpFailure::unreachable, .problem = "built without libcurl"};
}

} // namespace hasten::detail
