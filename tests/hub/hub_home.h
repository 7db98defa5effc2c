// A hub, another host that it sends to, and a cache of its own.
#pragma once

#include <filesystem>
#include <string>

#include "hasten/base/files.h"
#include "hasten/hub/download.h"
#include "hub/hub_server.h"
#include "support/environment.h"
#include "support/temporary_folder.h"

namespace hasten::testing_support {

/// Without the environment of the machine.
inline EnvironmentValues hub_environment(const HubServer& hub, const TemporaryFolder& home) {
  return {{"HF_ENDPOINT", hub.url()}, {"HF_HOME", home.path()},     {"HF_HUB_CACHE", {}},
          {"HF_TOKEN", "hf_secret"},  {"HF_TOKEN_PATH", {}},        {"HUGGING_FACE_HUB_TOKEN", {}},
          {"HF_HUB_OFFLINE", {}},     {"TRANSFORMERS_OFFLINE", {}}, {"no_proxy", "127.0.0.1"}};
}

struct HubHome {
  static constexpr const char* kWeightsHash =
      "d08928a168952dcd1f23061570816ee3b9d5c5c01ec65e00adbda68d328f4dbb";
  static constexpr const char* kConfigHash = "46332c50668921e90868a1d44a2550bb60ffdb1d";

  HubServer hub{};
  HubServer storage{};
  TemporaryFolder home{};
  ScopedEnvironment environment{hub_environment(hub, home)};
  std::string weights = std::string(300'000, '\0');
  std::filesystem::path repository = home / "hub/models--org--tiny";
  DownloadOptions options{.first_wait = std::chrono::milliseconds(1)};

  HubHome() {
    for (size_t i = 0; i < weights.size(); ++i) {
      weights[i] = static_cast<char>(i * 7 + i / 256);
    }
    storage.others["/weights?signed=1"] = weights;
    hub.files["config.json"] = {R"({"model_type": "bert"})", kConfigHash};
    hub.files["vocab.txt"] = {"good\n", "vocab-1"};
    hub.files["model.safetensors"] = {weights, kWeightsHash, storage.url() + "/weights?signed=1"};
    hub.files["pytorch_model.bin"] = {"pickle", "pickle-1"};
    hub.files["README.md"] = {"# Tiny", "readme-1"};
  }

  std::filesystem::path fetch(const std::string& name = "org/tiny") const {
    return download(name, options);
  }
  std::filesystem::path snapshot() const { return repository / "snapshots" / hub.commit; }
  std::filesystem::path blob(const std::string& etag) const { return repository / "blobs" / etag; }
};

} // namespace hasten::testing_support
