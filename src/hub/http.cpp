#include "http.h"

#include <curl/curl.h>

#include <algorithm>
#include <cctype>
#include <exception>
#include <memory>
#include <utility>

#include "hasten/base/process.h"
#include "library.h"

namespace hasten::detail {

// libcurl brings thirty libraries, so it is loaded when something is fetched and not by every
// `hasten --help`, and a package of hasten runs where it is missing.
struct Curl {
  Library library{open()};
  decltype(&::curl_easy_init) init = library.find("curl_easy_init");
  decltype(&::curl_easy_setopt) set = library.find("curl_easy_setopt");
  decltype(&::curl_easy_perform) perform = library.find("curl_easy_perform");
  decltype(&::curl_easy_getinfo) get = library.find("curl_easy_getinfo");
  decltype(&::curl_easy_strerror) describe = library.find("curl_easy_strerror");
  decltype(&::curl_easy_cleanup) cleanup = library.find("curl_easy_cleanup");
  decltype(&::curl_slist_append) append = library.find("curl_slist_append");
  decltype(&::curl_slist_free_all) free_list = library.find("curl_slist_free_all");

  static void* open() { // git brings the second
    void* const library = ::dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL);
    return library != nullptr ? library : ::dlopen("libcurl-gnutls.so.4", RTLD_NOW | RTLD_LOCAL);
  }
};

const Curl& curl() {
  static const Curl loaded;
  return loaded;
}

bool http_available() { return curl().library.handle != nullptr; }

// What the callbacks of one transfer share.
struct Transfer {
  const HttpRequest& request;
  HttpReply reply{};
  std::exception_ptr thrown{};
};

size_t take_header(char* bytes, size_t, size_t count, void* data) {
  auto& reply = static_cast<Transfer*>(data)->reply;
  std::string line(bytes, count);
  line.resize(line.find_last_not_of("\r\n \t") + 1);
  const size_t colon = line.find(':');
  if (line.starts_with("HTTP/")) {
    reply.headers.clear(); // of "100 Continue", or of a proxy
    reply.status = std::atol(line.c_str() + std::min(line.find(' '), line.size()));
  } else if (colon != std::string::npos) {
    std::string name = line.substr(0, colon);
    std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
    const size_t value = std::min(line.find_first_not_of(" \t", colon + 1), line.size());
    reply.headers[name] = line.substr(value);
  }
  return count;
}

size_t take_body(char* bytes, size_t, size_t count, void* data) {
  constexpr size_t kMostOfABody = size_t{64} << 20;
  auto& transfer = *static_cast<Transfer*>(data);
  HttpReply& reply = transfer.reply;
  try {
    if (transfer.request.sink && (reply.status == 200 || reply.status == 206)) {
      transfer.request.sink(reply, {bytes, count});
    } else if (reply.body.size() + count <= kMostOfABody) {
      reply.body.append(bytes, count);
    } else {
      return 0;
    }
  } catch (...) { // must not pass through libcurl
    transfer.thrown = std::current_exception();
    return 0;
  }
  return count;
}

HttpFailure failure_of(CURLcode code) {
  switch (code) {
    case CURLE_OK:
      return HttpFailure::none;
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_URL_MALFORMAT:
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_CONNECT:
      return HttpFailure::unreachable;
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_SSL_CERTPROBLEM:
    case CURLE_SSL_CIPHER:
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
      return HttpFailure::tls;
    default:
      return HttpFailure::cut;
  }
}

HttpReply one_request(const HttpRequest& request, const std::string& token, std::string& next) {
  Transfer transfer{request};
  const std::unique_ptr<CURL, decltype(curl().cleanup)> handle(curl().init(), curl().cleanup);
  const auto set = [&](CURLoption option, auto value) { curl().set(handle.get(), option, value); };
  curl_slist* list = nullptr;
  if (!token.empty()) {
    list = curl().append(list, ("Authorization: Bearer " + token).c_str());
  }
  const std::unique_ptr<curl_slist, decltype(curl().free_list)> headers(list, curl().free_list);
  set(CURLOPT_URL, request.url.c_str());
  set(CURLOPT_FOLLOWLOCATION, 0L);
  set(CURLOPT_NOBODY, request.head ? 1L : 0L);
  set(CURLOPT_HTTPHEADER, headers.get());
  set(CURLOPT_HEADEROPT, static_cast<long>(CURLHEADER_SEPARATE)); // a proxy gets no token
  set(CURLOPT_USERAGENT, "hasten/" HASTEN_VERSION);
  set(CURLOPT_NOSIGNAL, 1L);
  set(CURLOPT_BUFFERSIZE, 512L << 10);
  set(CURLOPT_CONNECTTIMEOUT, 10L);
  set(CURLOPT_LOW_SPEED_LIMIT, 1L);
  set(CURLOPT_LOW_SPEED_TIME, 60L);
  set(CURLOPT_HEADERFUNCTION, &take_header);
  set(CURLOPT_HEADERDATA, &transfer);
  set(CURLOPT_WRITEFUNCTION, &take_body);
  set(CURLOPT_WRITEDATA, &transfer);
  set(CURLOPT_NOPROGRESS, 0L);
  set(
      CURLOPT_XFERINFOFUNCTION, +[](void* stop, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
        return static_cast<const std::atomic<bool>*>(stop)->load() ? 1 : 0;
      });
  set(CURLOPT_XFERINFODATA, &request.stop);
  const std::string range = std::to_string(request.from) + "-";
  if (request.from > 0) { // not RESUME_FROM, which refuses a server that sends the whole file
    set(CURLOPT_RANGE, range.c_str());
  }
  for (const char* name : {"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"}) {
    if (const auto file = environment_value(name)) {
      set(CURLOPT_CAINFO, file->c_str());
    }
  }
  char problem[CURL_ERROR_SIZE] = ""; // names the host or the proxy
  set(CURLOPT_ERRORBUFFER, problem);
  const CURLcode code = curl().perform(handle.get());
  if (transfer.thrown) {
    std::rethrow_exception(transfer.thrown);
  }
  HttpReply& reply = transfer.reply;
  reply.failure = failure_of(code);
  reply.problem = problem[0] != '\0' ? problem : curl().describe(code);
  reply.problem.resize(reply.problem.find_last_not_of(" \n") + 1);
  char* location = nullptr;
  curl().get(handle.get(), CURLINFO_REDIRECT_URL, &location);
  next = location == nullptr ? "" : location;
  return reply;
}

HttpReply http_request(HttpRequest request, const std::string& origin, const std::string& token) {
  constexpr int kMostRedirects = 10;
  HttpReply reply;
  for (int redirect = 0; redirect <= kMostRedirects; ++redirect) {
    std::string next;
    const bool own = origin_of(request.url) == origin;
    reply = one_request(request, own ? token : std::string(), next);
    const bool safe =
        next.starts_with("https:") || (next.starts_with("http:") && !origin.starts_with("https:"));
    if (reply.failure != HttpFailure::none || next.empty() || !safe ||
        (request.head && origin_of(next) != origin)) {
      break;
    }
    request.url = std::move(next);
  }
  return reply;
}

} // namespace hasten::detail
