// A server on this machine that answers as Hugging Face's hub does, with the faults that a test
// asks for.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hasten/base/files.h"
#include "hasten/base/process.h"

namespace hasten::testing_support {

struct HubRequest {
  std::string method{};
  std::string path{}; // with the query
  std::map<std::string, std::string> headers{}; // names in lower case

  bool has(const std::string& name) const { return headers.contains(name); }
};

struct HubAnswer {
  int status = 200;
  std::vector<std::string> headers{}; // "Name: value"
  std::string body{};
  /// Closes the connection after so many bytes of the body.
  size_t cut_after = std::string::npos;
  /// Leaves it open instead, until the client ends it.
  bool stalls = false;
};

struct ServedFile {
  std::string bytes{};
  std::string etag{};
  /// The URL of another host that HEAD and GET are sent to; empty: none, as for small files.
  std::string elsewhere{};
};

class HubServer {
 public:
  HubServer() {
    std::tie(listener_, port_) = listen_on_loopback();
    thread_ = std::thread([this] { serve(); });
  }
  ~HubServer() {
    stop_ = true;
    thread_.join();
    ::close(listener_);
  }
  HubServer(const HubServer&) = delete;
  HubServer& operator=(const HubServer&) = delete;

  std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }

  /// Set before the first request.
  std::string repository = "org/tiny";
  std::string commit = std::string(40, 'c');
  std::map<std::string, ServedFile> files{}; // by path in the repository
  std::map<std::string, std::string> others{}; // what this host serves besides, by path
  /// Empty: the answer of a hub.
  std::function<std::optional<HubAnswer>(const HubRequest&)> fault{};

  std::vector<HubRequest> requests() const {
    const std::lock_guard lock(mutex_);
    return requests_;
  }
  /// Requests of a method whose path has this text.
  size_t count(const std::string& method, const std::string& text = {}) const {
    const auto all = requests();
    return static_cast<size_t>(std::ranges::count_if(all, [&](const HubRequest& request) {
      return request.method == method && request.path.find(text) != std::string::npos;
    }));
  }

  /// True if another request comes before this one is answered. For `fault`.
  bool another_waits(int milliseconds) const {
    pollfd waiting{listener_, POLLIN, 0};
    return ::poll(&waiting, 1, milliseconds) == 1;
  }

 private:
  void serve() {
    while (!stop_) {
      pollfd waiting{listener_, POLLIN, 0};
      if (::poll(&waiting, 1, 20) != 1) {
        continue;
      }
      const int connection = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (const auto request = read_request(connection)) {
        {
          const std::lock_guard lock(mutex_);
          requests_.push_back(*request);
        }
        const auto wrong = fault ? fault(*request) : std::nullopt;
        send(connection, *request, wrong ? *wrong : answer(*request));
      }
      ::close(connection);
    }
  }

  static std::optional<HubRequest> read_request(int connection) {
    std::string text;
    while (text.find("\r\n\r\n") == std::string::npos) {
      char bytes[4096];
      const ssize_t count = ::recv(connection, bytes, sizeof bytes, 0);
      if (count <= 0 || bytes[0] == 0x16) { // 0x16: TLS, which this server does not speak
        return std::nullopt;
      }
      text.append(bytes, static_cast<size_t>(count));
    }
    HubRequest request;
    request.method = text.substr(0, text.find(' '));
    const size_t path = request.method.size() + 1;
    request.path = text.substr(path, text.find(' ', path) - path);
    for (size_t at = text.find("\r\n") + 2; at < text.size() - 2; at = text.find("\r\n", at) + 2) {
      const std::string line = text.substr(at, text.find("\r\n", at) - at);
      std::string name = line.substr(0, line.find(':'));
      std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
      request.headers[name] = line.substr(std::min(line.find(':') + 2, line.size()));
    }
    return request;
  }

  HubAnswer answer(const HubRequest& request) const {
    if (request.path == "/api/models/" + repository + "/revision/main" ||
        request.path == "/api/models/" + repository + "/revision/refs%2Fpr%2F1") {
      nlohmann::json listing = {{"id", repository}, {"sha", commit}};
      listing["siblings"] = nlohmann::json::array();
      for (const auto& [path, file] : files) {
        listing["siblings"].push_back({{"rfilename", path}});
      }
      return {.body = listing.dump()};
    }
    if (request.path.starts_with("/api/models/" + repository + "/tree/" + commit)) {
      auto tree = nlohmann::json::array(); // what huggingface_hub asks for
      for (const auto& [path, file] : files) {
        const size_t size = file.bytes.size();
        tree.push_back({{"type", "file"}, {"path", path}, {"size", size}, {"oid", file.etag}});
        if (file.etag.size() == 64) {
          tree.back()["lfs"] = {{"oid", file.etag}, {"size", size}, {"pointerSize", 130}};
        }
      }
      return {.headers = {"Content-Type: application/json"}, .body = tree.dump()};
    }
    if (const auto other = others.find(request.path); other != others.end()) {
      return part_of(request, other->second);
    }
    const std::string start = "/" + repository + "/resolve/" + commit + "/";
    const auto file = request.path.starts_with(start)
                          ? files.find(request.path.substr(start.size()))
                          : files.end();
    if (file == files.end()) {
      const bool known = request.path.find(repository + "/") != std::string::npos;
      return {.status = known ? 404 : 401,
              .headers = {known ? "X-Error-Code: RevisionNotFound" : "X-Error-Code: RepoNotFound"}};
    }
    const auto& [bytes, etag, elsewhere] = file->second;
    HubAnswer found = elsewhere.empty()
                          ? part_of(request, bytes)
                          : HubAnswer{.status = 302, .headers = {"Location: " + elsewhere}};
    found.headers.push_back("X-Repo-Commit: " + commit);
    found.headers.push_back((elsewhere.empty() ? "ETag: \"" : "X-Linked-Etag: \"") + etag + "\"");
    if (!elsewhere.empty()) {
      found.headers.push_back("X-Linked-Size: " + std::to_string(bytes.size()));
      found.headers.push_back("ETag: \"of-the-other-host\"");
    }
    return found;
  }

  static HubAnswer part_of(const HubRequest& request, const std::string& bytes) {
    if (!request.has("range")) {
      return {.body = bytes};
    }
    const size_t from = std::stoul(request.headers.at("range").substr(6)); // "bytes=N-"
    return {.status = 206,
            .headers = {"Content-Range: bytes " + std::to_string(from) + "-" +
                        std::to_string(bytes.size() - 1) + "/" + std::to_string(bytes.size())},
            .body = bytes.substr(from)};
  }

  static void send(int connection, const HubRequest& request, const HubAnswer& answer) {
    std::string text =
        "HTTP/1.1 " + std::to_string(answer.status) +
        " Answer\r\nConnection: close\r\nContent-Length: " + std::to_string(answer.body.size()) +
        "\r\n";
    for (const std::string& header : answer.headers) {
      text += header + "\r\n";
    }
    text += "\r\n";
    send_all(connection, text);
    if (request.method != "HEAD") {
      send_all(connection, std::string_view(answer.body).substr(0, answer.cut_after));
    }
    if (answer.stalls) {
      pollfd ended{connection, POLLRDHUP, 0};
      ::poll(&ended, 1, 60'000);
    }
  }

  static void send_all(int connection, std::string_view text) {
    while (!text.empty()) {
      const ssize_t count = ::send(connection, text.data(), text.size(), MSG_NOSIGNAL);
      if (count <= 0) {
        return;
      }
      text.remove_prefix(static_cast<size_t>(count));
    }
  }

  int listener_ = -1;
  int port_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_{};
  mutable std::mutex mutex_{};
  std::vector<HubRequest> requests_{};
};

} // namespace hasten::testing_support
