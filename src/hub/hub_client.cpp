#include "hub_client.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "hasten/base/files.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"

namespace hasten::detail {

constexpr const char* kWhere = "hub::download";

std::string origin_of(std::string_view url) {
  const size_t host = std::min(url.find("://"), url.size() - 3) + 3;
  std::string origin(url.substr(0, url.find_first_of("/?#", host)));
  std::ranges::transform(origin, origin.begin(), [](unsigned char c) { return std::tolower(c); });
  return origin;
}

std::string url_text(const std::string& text, const std::string& allowed) {
  std::string url;
  for (const unsigned char c : text) {
    char escaped[4];
    std::snprintf(escaped, sizeof escaped, "%%%02X", c);
    const bool plain = std::isalnum(c) || allowed.find(static_cast<char>(c)) != std::string::npos;
    url += plain ? std::string(1, static_cast<char>(c)) : escaped;
  }
  return url;
}

std::string endpoint_from_environment() {
  std::string endpoint = environment_value("HF_ENDPOINT").value_or("https://huggingface.co");
  endpoint.resize(endpoint.find_last_not_of('/') + 1);
  const bool web = endpoint.starts_with("https://") || endpoint.starts_with("http://");
  // An error prints the endpoint, and a password in it.
  if (!web || endpoint.find_first_of("@ \n\r\t") != std::string::npos) {
    throw InputError(kWhere, "HF_ENDPOINT is no address of a hub",
                     "https://HOST, without a user's name", "correct or unset HF_ENDPOINT");
  }
  return endpoint;
}

std::string token_of(std::string token) {
  for (const char* name : {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}) {
    token = token.empty() ? environment_value(name).value_or("") : token;
  }
  std::error_code error;
  const auto file = environment_path("HF_TOKEN_PATH").value_or(hf_home() / "token");
  if (token.empty() && std::filesystem::is_regular_file(file, error)) {
    token = read_file(file);
  }
  token.resize(token.find_last_not_of(" \r\n\t") + 1);
  token.erase(0, token.find_first_not_of(" \r\n\t"));
  if (!std::ranges::all_of(token, [](char c) { return c > ' ' && c < '\x7f'; })) {
    throw InputError(kWhere, "the token has a space or a control character", "hf_…",
                     "copy it again from " + endpoint_from_environment() + "/settings/tokens");
  }
  return token;
}

HubClient::HubClient(HubName name, const DownloadOptions& options)
    : name_(std::move(name)),
      given_as_(options.given_as),
      first_wait_(options.first_wait),
      endpoint_(endpoint_from_environment()),
      token_(token_of(options.token)) {}

std::string HubClient::described(const std::string& path) const {
  return given_as_ + "=" + name_.repository + (path.empty() ? "" : ", file=" + path);
}

void HubClient::refuse(const HttpReply& reply, const std::string& path) const {
  const std::string what = described(path) + ": ";
  const std::string page = endpoint_ + "/" + name_.repository;
  const std::string code = reply.header("x-error-code");
  if (reply.failure == HttpFailure::tls) {
    throw HubUnreachable(kWhere,
                         what + "no secure connection to " + endpoint_ + ": " + reply.problem,
                         "a certificate that this machine trusts",
                         "check the clock, install ca-certificates, or set SSL_CERT_FILE to the "
                         "certificates of your network");
  }
  if (reply.status == 407) {
    throw HubUnreachable(kWhere, what + "the proxy wants a name and a password", {},
                         "set https_proxy to http://USER:PASSWORD@HOST:PORT");
  }
  if (reply.failure != HttpFailure::none) {
    const std::string cache = hub_cache().string();
    throw HubUnreachable(
        kWhere,
        (path.empty() ? described() + " is no path and not in " + cache + ", and " : what) +
            "there is no connection to " + endpoint_ + ": " + reply.problem,
        "a path, a name in the cache, or a network",
        "check the spelling, the network, https_proxy and HF_ENDPOINT; or fetch it "
        "on another machine and copy the cache");
  }
  if (code == "RevisionNotFound") {
    throw InputError(kWhere, what + "no revision=" + name_.revision,
                     "a branch, a tag or a whole commit hash", "see " + page + "/tree/main");
  }
  if (code == "GatedRepo" || reply.status == 403) {
    throw InputError(kWhere, what + "no access: private or gated",
                     "a token of a user who has access",
                     "accept the conditions on " + page +
                         (token_.empty() ? ", then set HF_TOKEN or run hf auth login"
                                         : "; the token that was sent has no access yet"));
  }
  if (reply.status == 401 || reply.status == 404) {
    throw InputError(kWhere,
                     what +
                         (path.empty() ? "neither a file or folder here nor a repository of "
                                       : "not found on ") +
                         endpoint_,
                     "org/name as in the address of its page, or a path",
                     std::string("check the spelling; a private repository needs ") +
                         (token_.empty() ? "a token: set HF_TOKEN or run hf auth login"
                                         : "a token with access, and the one sent has none"));
  }
  const std::string status = "the hub answered " + std::to_string(reply.status);
  if (reply.status == 429) {
    throw HubUnreachable(kWhere, what + status + ": too many requests", {},
                         token_.empty() ? "wait some minutes, or set HF_TOKEN: users with a token "
                                          "may ask more often"
                                        : "wait some minutes");
  }
  throw HubUnreachable(kWhere, what + status, {}, "try again later; what came already is kept");
}

void HubClient::sleep(std::chrono::milliseconds pause) const {
  constexpr std::chrono::milliseconds kSlice{50};
  for (; pause.count() > 0 && !stop; pause -= kSlice) {
    std::this_thread::sleep_for(std::min(pause, kSlice));
  }
  if (stop) {
    throw Stopped();
  }
}

HttpReply HubClient::ask(const std::function<HttpRequest()>& next, const std::string& path) {
  constexpr int kAttempts = 5;
  constexpr int64_t kLongestWait = 120; // seconds that a server may ask for
  const std::string origin = origin_of(endpoint_);
  auto wait = first_wait_;
  int64_t from = 0;
  for (int attempt = 1;; ++attempt) {
    const HttpRequest request = next();
    if (request.from > from) { // the last one brought something
      attempt = 1;
      wait = first_wait_;
    }
    from = request.from;
    const HttpReply reply = http_request(request, origin, token_);
    sleep();
    const bool came = reply.failure == HttpFailure::none;
    if (came && (reply.status / 100 == 2 || (request.head && reply.status / 100 == 3))) {
      return reply;
    }
    const bool again =
        reply.failure == HttpFailure::cut ||
        (came && (reply.status == 408 || reply.status == 429 || reply.status >= 500));
    if (!again || attempt == kAttempts) {
      refuse(reply, path);
    }
    const auto asked = parse_number<int64_t>(reply.header("retry-after")).value_or(0);
    const auto pause = std::max<std::chrono::milliseconds>(
        wait, std::chrono::seconds(std::clamp<int64_t>(asked, 0, kLongestWait)));
    log_info(described(path) + ": " +
             (came ? "the hub answered " + std::to_string(reply.status) : reply.problem) +
             "; again in " + format_fixed(std::chrono::duration<double>(pause).count(), 1) + " s");
    sleep(pause);
    wait *= 2;
  }
}

HubListing HubClient::list() {
  const std::string url = endpoint_ + "/api/models/" + name_.repository + "/revision/" +
                          url_text(name_.revision, "-._~");
  const HttpReply reply = ask([&] { return HttpRequest{.stop = stop, .url = url}; }, {});
  HubListing listing;
  try {
    const auto json = nlohmann::json::parse(reply.body);
    listing.commit = json.at("sha");
    for (const auto& sibling : json.at("siblings")) {
      listing.files.push_back(sibling.at("rfilename"));
    }
  } catch (const nlohmann::json::exception&) {
    listing.commit.clear();
  }
  if (listing.commit.size() != 40 ||
      listing.commit.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw InputError(kWhere, described() + ": " + endpoint_ + " answers as no hub does", {},
                     "check HF_ENDPOINT, and whether the network asks for a login");
  }
  return listing;
}

std::string HubClient::file_url(const std::string& commit, const std::string& path) const {
  return endpoint_ + "/" + name_.repository + "/resolve/" + commit + "/" + url_text(path, "-._~/");
}

HubFile HubClient::look_up(const std::string& commit, const std::string& path) {
  const std::string url = file_url(commit, path);
  const HttpReply reply =
      ask([&] { return HttpRequest{.stop = stop, .url = url, .head = true}; }, path);
  const bool redirected = reply.status / 100 == 3;
  HubFile file{.path = path, .etag = reply.header("x-linked-etag")};
  std::string size = reply.header("x-linked-size");
  if (file.etag.empty()) {
    file.etag = reply.header("etag");
  }
  if (size.empty() && !redirected) {
    size = reply.header("content-length");
  }
  file.etag.erase(0, file.etag.starts_with("W/") ? 2 : 0);
  std::erase(file.etag, '"');
  file.size = parse_number<int64_t>(size).value_or(-1);
  const bool is_name = std::ranges::all_of(
      file.etag, [](unsigned char c) { return std::isalnum(c) || c == '-' || c == '_'; });
  if (file.etag.empty() || file.etag.size() > 200 || !is_name) { // it becomes a file's name
    throw InputError(kWhere, described(path) + ": " + endpoint_ + " sends no ETag", {},
                     "check HF_ENDPOINT; a mirror has to pass the hub's headers on");
  }
  return file;
}

void HubClient::fetch(const std::string& commit, const HubFile& file,
                      const std::filesystem::path& partial,
                      const std::function<void(int64_t)>& advance) {
  const FileDescriptor out(::open(partial.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
  const auto check = [&](bool good) {
    if (!good) {
      throw_file_error(kWhere, partial, errno);
    }
  };
  check(static_cast<bool>(out));
  int64_t at = ::lseek(out.get(), 0, SEEK_END);
  const auto begin_again = [&] {
    check(::ftruncate(out.get(), 0) == 0 && ::lseek(out.get(), 0, SEEK_SET) == 0);
    advance(-at);
    at = 0;
  };
  advance(at);
  if (at > file.size) {
    begin_again();
  }
  bool first = true; // bytes of a reply
  const auto take = [&](const HttpReply& reply, std::string_view bytes) {
    if (std::exchange(first, false) && reply.status == 200 && at > 0) {
      begin_again(); // the server sends the whole file
    }
    const int error = write_all(out.get(), bytes);
    errno = error;
    check(error == 0);
    at += static_cast<int64_t>(bytes.size());
    advance(static_cast<int64_t>(bytes.size()));
  };
  if (at != file.size) {
    ask(
        [&] {
          first = true;
          return HttpRequest{
              .stop = stop, .url = file_url(commit, file.path), .from = at, .sink = take};
        },
        file.path);
  }
  check(::fsync(out.get()) == 0);
}

} // namespace hasten::detail
