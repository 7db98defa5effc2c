#include <gtest/gtest.h>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/hub/download.h"
#include "hub/hub_home.h"
#include "support/error_of.h"
#include "support/full_disk.h"

namespace hasten {

namespace files = std::filesystem;
using testing_support::error_of;
using testing_support::FullDisk;
using testing_support::HubAnswer;
using testing_support::HubHome;
using testing_support::HubRequest;
using testing_support::ScopedEnvironment;

namespace detail {

// What is thrown if the hub answers each request for `path` so.
std::string hub_refusal(const HubAnswer& answer, const std::string& path = "/api/") {
  HubHome home;
  home.hub.fault = [&](const HubRequest& request) {
    return request.path.find(path) == std::string::npos ? std::nullopt : std::optional(answer);
  };
  const std::string error = error_of<InputError>([&] { home.fetch(); });
  EXPECT_EQ(error.find("hf_secret"), error.npos) << error;
  EXPECT_FALSE(files::exists(home.repository / "refs/main"));
  return error;
}

void expect_hub_said(const std::string& error, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(error.find(part), error.npos) << part << "\nin " << error;
  }
}

} // namespace detail

TEST(HubErrors, ARepositoryThatIsNotThereIsSaidSo) {
  for (const int status : {401, 404}) {
    detail::expect_hub_said(detail::hub_refusal({.status = status}),
                            {"[hub::download] name=org/tiny: neither a file or folder here nor a "
                             "repository of http://127.0.0.1",
                             "check the spelling", "the one sent has none"});
  }
}

TEST(HubErrors, AGatedRepositoryIsSaidWithThePageToVisit) {
  detail::expect_hub_said(
      detail::hub_refusal({.status = 403}),
      {"no access: private or gated", "accept the conditions on http://127.0.0.1", "/org/tiny"});
  detail::expect_hub_said(
      detail::hub_refusal({.status = 401, .headers = {"X-Error-Code: GatedRepo"}}, "config.json"),
      {"name=org/tiny, file=config.json: no access"});
}

TEST(HubErrors, AnUnknownRevisionIsNotAnUnknownRepository) {
  const HubHome home;
  detail::expect_hub_said(error_of<InputError>([&] { home.fetch("org/tiny@v9"); }),
                          {"name=org/tiny: no revision=v9", "/org/tiny/tree/main"});
}

TEST(HubErrors, AHubWithoutANetworkOrWithoutTlsIsSaidAtOnce) {
  const HubHome home;
  std::string closed;
  {
    const testing_support::HubServer gone;
    closed = gone.url();
  }
  const ScopedEnvironment none{{{"HF_ENDPOINT", closed}}};
  detail::expect_hub_said(
      error_of<InputError>([&] { home.fetch(); }),
      {"no connection to " + closed, (home.home / "hub").string(), "https_proxy"});
  const ScopedEnvironment tls{{{"HF_ENDPOINT", "https" + home.hub.url().substr(4)}}};
  detail::expect_hub_said(error_of<InputError>([&] { home.fetch(); }),
                          {"no secure connection to https://127.0.0.1", "SSL_CERT_FILE"});
}

TEST(HubErrors, AProxyThatFailsIsNamed) {
  const HubHome home;
  testing_support::HubServer proxy;
  proxy.fault = [](const HubRequest&) { return std::optional(HubAnswer{.status = 407}); };
  for (const char* endpoint : {"http://hub.example", "https://hub.example"}) { // GET, and CONNECT
    const ScopedEnvironment both{{{"HF_ENDPOINT", endpoint},
                                  {"no_proxy", {}},
                                  {"http_proxy", proxy.url()},
                                  {"https_proxy", proxy.url()}}};
    detail::expect_hub_said(error_of<InputError>([&] { home.fetch(); }),
                            {"name=org/tiny: the proxy wants a name and a password",
                             "set https_proxy to http://USER:PASSWORD@HOST:PORT"});
    const ScopedEnvironment none{
        {{"http_proxy", "http://127.0.0.1:9"}, {"https_proxy", "http://127.0.0.1:9"}}};
    detail::expect_hub_said(error_of<InputError>([&] { home.fetch(); }),
                            {"no connection to " + std::string(endpoint), "127.0.0.1 port 9",
                             "check the spelling, the network, https_proxy and HF_ENDPOINT"});
  }
}

TEST(HubErrors, CertificatesThatAreMissingAreSaidSo) {
  const HubHome home;
  const ScopedEnvironment tls{{{"HF_ENDPOINT", "https" + home.hub.url().substr(4)},
                               {"REQUESTS_CA_BUNDLE", {}},
                               {"SSL_CERT_FILE", "/none.pem"}}};
  detail::expect_hub_said(error_of<InputError>([&] { home.fetch(); }),
                          {"no secure connection to https://127.0.0.1", "/none.pem",
                           "Expected a certificate that this machine trusts",
                           "install ca-certificates, or set SSL_CERT_FILE"});
}

TEST(HubErrors, WithoutATokenTheErrorSaysHowToGetOne) {
  for (const int status : {401, 403}) {
    HubHome home;
    const ScopedEnvironment none{{{"HF_TOKEN", {}}}};
    home.hub.fault = [&](const HubRequest&) { return std::optional(HubAnswer{.status = status}); };
    detail::expect_hub_said(error_of<InputError>([&] { home.fetch(); }),
                            {"set HF_TOKEN or run hf auth login"});
  }
}

TEST(HubErrors, AHubThatStaysBusyIsGivenUp) {
  detail::expect_hub_said(detail::hub_refusal({.status = 429}), {"the hub answered 429", "wait"});
  detail::expect_hub_said(detail::hub_refusal({.status = 502}),
                          {"the hub answered 502", "try again"});
}

TEST(HubErrors, APageOfALoginIsNoHub) {
  detail::expect_hub_said(detail::hub_refusal({.body = "<html>Welcome to the hotel</html>"}),
                          {"answers as no hub does", "whether the network asks for a login"});
}

TEST(HubErrors, AFileThatStaysDamagedIsNeverKept) {
  HubHome home;
  home.storage.fault = [&](const HubRequest&) {
    return std::optional(HubAnswer{.body = std::string(300'000, 'x')});
  };
  detail::expect_hub_said(error_of<InputError>([&] { home.fetch(); }),
                          {"file=model.safetensors came damaged twice", HubHome::kWeightsHash});
  EXPECT_EQ(home.storage.requests().size(), 2u);
  EXPECT_FALSE(files::exists(home.blob(HubHome::kWeightsHash)));
  EXPECT_FALSE(files::exists(home.blob(std::string(HubHome::kWeightsHash) + ".incomplete")));
  EXPECT_FALSE(files::exists(home.snapshot() / "model.safetensors"));
}

TEST(HubErrors, AFullDiskKeepsWhatCame) {
  HubHome home;
  {
    const FullDisk full;
    try {
      home.fetch();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::full_disk) << error.what();
    }
  }
  home.fetch();
  EXPECT_EQ(home.storage.requests().back().headers.at("range"), "bytes=4096-");
  EXPECT_EQ(read_file(home.snapshot() / "model.safetensors"), home.weights);
}

TEST(HubErrors, TheDiskIsLookedAtBeforeTheFirstByteOfTheWeights) {
  HubHome home;
  home.hub.fault = [&](const HubRequest& request) -> std::optional<HubAnswer> {
    if (request.path.find("model.safetensors") == std::string::npos) {
      return std::nullopt;
    }
    return HubAnswer{.status = 302,
                     .headers = {"Location: " + home.storage.url() + "/weights?signed=1",
                                 std::string("X-Linked-Etag: ") + HubHome::kWeightsHash,
                                 "X-Linked-Size: 1000000000000000"}};
  };
  detail::expect_hub_said(error_of<InputError>([&] { home.fetch(); }),
                          {"needs 909 TiB", "free", "HF_HUB_CACHE"});
  EXPECT_EQ(home.storage.requests().size(), 0u);
}

TEST(HubErrors, NamesThatTheHubCannotHaveNeverReachIt) {
  const HubHome home;
  for (const char* name : {"", "../x", "org/../x", "org/x/y", "/etc", "org/x\n", "org/x@../main",
                           "org\x01/x", "a--b", "-x"}) {
    detail::expect_hub_said(error_of<InputError>([&] { home.fetch(name); }),
                            {"is no name of a repository"});
  }
  EXPECT_EQ(home.hub.requests().size(), 0u);
}

TEST(HubErrors, AHubCannotWriteOutsideOfTheCache) {
  for (const char* path : {"../../../../evil.json", "a/../../evil.json", "/proc/evil.json",
                           "a//evil.json", "a\\evil.json"}) {
    HubHome home;
    home.hub.files[path] = {"evil", "evil-1"};
    home.options.include = {"*evil*"};
    detail::expect_hub_said(error_of<InputError>([&] { home.fetch(); }), {"outside of its folder"});
    EXPECT_EQ(home.hub.count("HEAD"), 0u);
  }
  for (const char* etag : {"../../evil", "..", "", "a/b"}) {
    HubHome home;
    home.hub.files["config.json"].etag = etag;
    detail::expect_hub_said(error_of<InputError>([&] { home.fetch(); }), {"sends no ETag"});
  }
  HubHome home;
  home.hub.files.erase("model.safetensors");
  home.hub.files["model.safetensors.index.json"] = {R"({"weight_map": {"a": "../../../evil"}})",
                                                    "i"};
  detail::expect_hub_said(error_of<InputError>([&] { home.fetch(); }), {"outside of its folder"});
}

TEST(HubErrors, ARepositoryOfPicklesIsSaidSo) {
  HubHome home;
  home.hub.files.erase("model.safetensors");
  detail::expect_hub_said(error_of<InputError>([&] { home.fetch(); }),
                          {"no weights in safetensors", "pytorch_model.bin", "reads no pickles"});
}

TEST(HubErrors, ATokenWithAControlCharacterIsNeverSentOrShown) {
  const HubHome home;
  const ScopedEnvironment token{{{"HF_TOKEN", "hf_secret\r\nX-Other: 1"}}};
  const std::string error = error_of<InputError>([&] { home.fetch(); });
  detail::expect_hub_said(error, {"the token has a space or a control character"});
  EXPECT_EQ(error.find("hf_secret"), error.npos);
  EXPECT_EQ(home.hub.requests().size(), 0u);
}

TEST(HubErrors, OfflineNothingIsAsked) {
  const HubHome home;
  for (const char* name : {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}) {
    const ScopedEnvironment offline{{{name, "1"}}};
    EXPECT_FALSE(can_download());
    detail::expect_hub_said(error_of<InputError>([&] { home.fetch(); }), {"HF_HUB_OFFLINE"});
    download_missing("org/tiny", home.options); // the caller says what is missing
  }
  EXPECT_EQ(home.hub.requests().size(), 0u);
}

TEST(HubErrors, WithoutAnAnswerWhatTheCacheHasIsUsed) {
  HubHome home;
  home.options.files = HubFiles::config;
  home.fetch();
  home.options.files = HubFiles::model;
  home.hub.fault = [](const HubRequest&) { return std::optional(HubAnswer{.status = 500}); };
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel level, std::string_view line) {
    if (level == LogLevel::warning) {
      lines.emplace_back(line);
    }
  });
  download_missing("org/tiny", home.options);
  set_log_sink({});
  ASSERT_EQ(lines.size(), 1u);
  detail::expect_hub_said(lines[0], {"the hub answered 500"});
  EXPECT_THROW(download_missing("org/other", home.options), InputError);
}

} // namespace hasten
