// One request of HTTP. http.cpp has it by libcurl, no_http.cpp where libcurl's headers are missing.
// Private to src/hub.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace hasten::detail {

enum class HttpFailure {
  none,
  unreachable, // no such host, or nobody listens
  tls,
  cut // the connection ended early, or nothing came for a minute
};

struct HttpReply {
  HttpFailure failure = HttpFailure::none;
  std::string problem{}; // what libcurl says of it
  long status = 0;
  std::map<std::string, std::string> headers{}; // names in lower case
  std::string body{}; // unless the request has a sink

  std::string header(const std::string& name) const {
    const auto found = headers.find(name);
    return found == headers.end() ? std::string() : found->second;
  }
};

struct HttpRequest {
  const std::atomic<bool>& stop; // true: the transfer ends within a second
  std::string url{};
  bool head = false;
  /// The first byte of the file to send.
  int64_t from = 0;
  /// Gets the body of a reply with status 200 or 206, in parts. May throw.
  std::function<void(const HttpReply& so_far, std::string_view bytes)> sink{};
};

/// "https://host:port" in lower case, as it is written (hub_client.cpp).
std::string origin_of(std::string_view url);

bool http_available();

/// Sends a request and follows redirects, a HEAD within `origin` only: the reply is then the
/// redirect. The token is sent to URLs of this origin.
HttpReply http_request(HttpRequest request, const std::string& origin, const std::string& token);

} // namespace hasten::detail
