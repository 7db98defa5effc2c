// The requests to the hub, repeated where that helps, and the errors of those that fail. Private to
// src/hub.
#pragma once

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/hub/download.h"
#include "hasten/text/pretrained_folder.h"
#include "http.h"

namespace hasten::detail {

/// The hub did not answer.
class HubUnreachable : public InputError {
 public:
  using InputError::InputError;
};

struct HubListing {
  std::string commit{};
  std::vector<std::string> files{}; // paths in the repository
};

struct HubFile {
  std::string path{};
  std::string etag{};
  int64_t size = -1; // -1: the hub does not say
};

/// What is thrown after HubClient::stop.
struct Stopped {};

/// Of one repository. All functions throw as download() does. Threading: any.
class HubClient {
 public:
  /// Ends what runs and what comes.
  std::atomic<bool> stop{false};

  HubClient(HubName name, const DownloadOptions& options);

  HubListing list();
  HubFile look_up(const std::string& commit, const std::string& path);
  /// Completes the file `partial`, which may have the first bytes. Calls `advance` with the number
  /// of bytes that came, negative where they have to come again.
  void fetch(const std::string& commit, const HubFile& file, const std::filesystem::path& partial,
             const std::function<void(int64_t)>& advance);

  /// Throws Stopped.
  void sleep(std::chrono::milliseconds pause = {}) const;
  /// "--model=org/name", and the file if it is not empty.
  std::string described(const std::string& path = {}) const;

 private:
  HttpReply ask(const std::function<HttpRequest()>& next, const std::string& path);
  [[noreturn]] void refuse(const HttpReply& reply, const std::string& path) const;
  std::string file_url(const std::string& commit, const std::string& path) const;

  HubName name_;
  std::string given_as_;
  std::chrono::milliseconds first_wait_;
  std::string endpoint_;
  std::string token_;
};

} // namespace hasten::detail
