#include "hasten/hub/download.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <thread>

#include "hasten/base/log.h"
#include "hasten/text/pretrained_folder.h"
#include "hub/hub_home.h"
#include "support/error_of.h"

namespace hasten {

namespace files = std::filesystem;
using testing_support::HubAnswer;
using testing_support::HubHome;
using testing_support::HubRequest;
using testing_support::ScopedEnvironment;
using testing_support::TemporaryFolder;

namespace detail {

std::set<std::string> names_in(const files::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : files::directory_iterator(folder)) {
    names.insert(entry.path().filename());
  }
  return names;
}

} // namespace detail

TEST(HubDownload, TheCacheLooksAsHuggingfaceHubLeavesIt) {
  const HubHome home;
  EXPECT_EQ(home.fetch(), home.snapshot());
  EXPECT_EQ(read_file(home.repository / "refs/main"), home.hub.commit);
  EXPECT_EQ(files::read_symlink(home.snapshot() / "config.json"),
            std::string("../../blobs/") + HubHome::kConfigHash);
  EXPECT_EQ(read_file(home.snapshot() / "model.safetensors"), home.weights);
  EXPECT_EQ(read_file(home.blob("vocab-1")), "good\n");
  EXPECT_TRUE(files::exists(home.repository / ".no_exist" / home.hub.commit / "tokenizer.json"));
  EXPECT_FALSE(files::exists(home.repository / ".no_exist" / home.hub.commit / "vocab.txt"));
  EXPECT_TRUE(files::exists(home.home / "hub/.locks/models--org--tiny/vocab-1.lock"));
  EXPECT_EQ(pretrained_folder("org/tiny"), home.snapshot());
}

TEST(HubDownload, OnlyWhatIsNeededIsFetchedAndNeverAPickle) {
  HubHome home;
  home.fetch();
  EXPECT_EQ(detail::names_in(home.snapshot()),
            (std::set<std::string>{"config.json", "vocab.txt", "model.safetensors"}));
  EXPECT_EQ(home.hub.count("HEAD", "pytorch_model.bin"), 0u);
  home.options.include = {"*"};
  home.options.exclude = {"*.txt"};
  home.fetch();
  EXPECT_EQ(home.hub.count("GET", "README.md"), 1u);
  EXPECT_EQ(home.hub.count("GET", "pytorch_model.bin"), 0u);
  EXPECT_EQ(home.storage.count("GET"), 1u) << "what is there came again";
}

TEST(HubDownload, ACachedNameAsksTheHubNothingUnlessAnUpdateIsWanted) {
  HubHome home;
  home.fetch();
  const size_t requests = home.hub.requests().size();
  EXPECT_EQ(home.fetch(), home.snapshot());
  EXPECT_EQ(home.hub.requests().size(), requests);
  const auto old = home.snapshot();
  home.hub.commit = std::string(40, 'd');
  EXPECT_EQ(home.fetch(), old);
  home.options.update = true;
  EXPECT_EQ(home.fetch(), home.snapshot());
  EXPECT_EQ(pretrained_folder("org/tiny"), home.snapshot());
  EXPECT_EQ(home.storage.count("GET"), 1u) << "the new commit has the same weights";
}

TEST(HubDownload, RevisionsAreRememberedByName) {
  const HubHome home;
  EXPECT_EQ(home.fetch("org/tiny@refs/pr/1"), home.snapshot());
  EXPECT_EQ(read_file(home.repository / "refs/refs/pr/1"), home.hub.commit);
  EXPECT_FALSE(files::exists(home.repository / "refs/main"));
}

TEST(HubDownload, AFileThatWasCutGoesOnWhereItEnded) {
  HubHome home;
  home.storage.fault = [&](const HubRequest& request) -> std::optional<HubAnswer> {
    if (request.has("range")) {
      return std::nullopt;
    }
    return HubAnswer{.body = home.weights, .cut_after = 100'000};
  };
  home.fetch();
  const auto requests = home.storage.requests();
  ASSERT_EQ(requests.size(), 2u);
  EXPECT_EQ(requests[1].headers.at("range"), "bytes=100000-");
  EXPECT_EQ(read_file(home.snapshot() / "model.safetensors"), home.weights);
}

TEST(HubDownload, ALaterCallGoesOnWhereTheLastEnded) {
  HubHome home;
  files::create_directories(home.repository / "blobs");
  const auto partial = home.blob(std::string(HubHome::kWeightsHash) + ".incomplete");
  write_file_atomically(partial, home.weights.substr(0, 250'000));
  home.fetch();
  ASSERT_EQ(home.storage.requests().size(), 1u);
  EXPECT_EQ(home.storage.requests()[0].headers.at("range"), "bytes=250000-");
  EXPECT_EQ(read_file(home.snapshot() / "model.safetensors"), home.weights);
  EXPECT_FALSE(files::exists(partial));
}

TEST(HubDownload, AServerWithoutRangesSendsTheWholeFileAgain) {
  HubHome home;
  home.storage.fault = [&, first = true](const HubRequest&) mutable -> std::optional<HubAnswer> {
    return HubAnswer{.body = home.weights,
                     .cut_after = std::exchange(first, false) ? 100'000 : std::string::npos};
  };
  home.fetch();
  EXPECT_EQ(home.storage.requests().size(), 2u);
  EXPECT_EQ(read_file(home.snapshot() / "model.safetensors"), home.weights);
}

TEST(HubDownload, ADamagedFileIsFetchedOnceMore) {
  HubHome home;
  home.storage.fault = [&, first = true](const HubRequest&) mutable -> std::optional<HubAnswer> {
    std::string bytes = home.weights;
    bytes[7] ^= std::exchange(first, false) ? 1 : 0;
    return HubAnswer{.body = bytes};
  };
  home.fetch();
  EXPECT_EQ(home.storage.requests().size(), 2u);
  EXPECT_EQ(read_file(home.snapshot() / "model.safetensors"), home.weights);
}

TEST(HubDownload, TheTokenGoesToTheHubAndToNoOtherHost) {
  HubHome home;
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  home.hub.fault = [first = true](const HubRequest&) mutable -> std::optional<HubAnswer> {
    return std::exchange(first, false) ? std::optional(HubAnswer{.status = 503}) : std::nullopt;
  };
  home.fetch();
  set_log_sink({});
  for (const HubRequest& request : home.hub.requests()) {
    EXPECT_EQ(request.headers.at("authorization"), "Bearer hf_secret") << request.path;
  }
  ASSERT_EQ(home.storage.requests().size(), 1u);
  EXPECT_FALSE(home.storage.requests()[0].has("authorization"));
  ASSERT_FALSE(lines.empty());
  for (const std::string& line : lines) {
    EXPECT_EQ(line.find("hf_secret"), line.npos) << line;
  }
}

TEST(HubDownload, ATokenIsReadFromTheFileOfALogin) {
  const HubHome home;
  write_file_atomically(home.home / "token", "hf_file\n");
  const ScopedEnvironment none{{{"HF_TOKEN", {}}}};
  home.fetch();
  EXPECT_EQ(home.hub.requests()[0].headers.at("authorization"), "Bearer hf_file");
}

TEST(HubDownload, AHubThatIsBusyIsAskedAgain) {
  HubHome home;
  home.hub.fault = [count = 0](const HubRequest&) mutable -> std::optional<HubAnswer> {
    ++count;
    return count == 1   ? std::optional(HubAnswer{.status = 429, .headers = {"Retry-After: 0"}})
           : count == 2 ? std::optional(HubAnswer{.status = 503})
                        : std::nullopt;
  };
  home.fetch();
  EXPECT_EQ(home.hub.count("GET", "/api/"), 3u);
}

TEST(HubDownload, AnIndexNamesTheShards) {
  HubHome home;
  home.hub.files.erase("model.safetensors");
  home.hub.files["model.safetensors.index.json"] = {
      R"({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}})", "i"};
  home.hub.files["model-1-of-2.safetensors"] = {"first", "s1"};
  home.hub.files["model-2-of-2.safetensors"] = {"second", "s2"};
  home.hub.files["consolidated.safetensors"] = {"both", "s3"};
  home.fetch();
  EXPECT_EQ(read_file(home.snapshot() / "model-2-of-2.safetensors"), "second");
  EXPECT_FALSE(files::exists(home.snapshot() / "consolidated.safetensors"));
  const size_t requests = home.hub.requests().size();
  home.fetch();
  EXPECT_EQ(home.hub.requests().size(), requests);
  files::remove(home.snapshot() / "model-2-of-2.safetensors"); // as after a cut
  home.fetch();
  EXPECT_TRUE(files::exists(home.snapshot() / "model-2-of-2.safetensors"));
}

TEST(HubDownload, FilesAreFetchedAtOnceByNoMoreThanMaxWorkers) {
  for (const int64_t max_workers : {8, 1}) {
    HubHome home;
    home.options.max_workers = max_workers;
    int together = 0;
    home.hub.fault = [&](const HubRequest& request) -> std::optional<HubAnswer> {
      const bool small =
          request.path.ends_with("config.json") || request.path.ends_with("vocab.txt");
      const bool first = small && together == 0;
      together += first && home.hub.another_waits(max_workers > 1 ? 10'000 : 50) ? 1 : 0;
      return std::nullopt;
    };
    home.fetch();
    EXPECT_EQ(together, max_workers > 1 ? 1 : 0);
    EXPECT_EQ(read_file(home.snapshot() / "vocab.txt"), "good\n");
  }
}

TEST(HubDownload, AnErrorInOneFileEndsTheOthersWhichGoOnLater) {
  HubHome home;
  testing_support::HubServer broken;
  home.hub.files.erase("model.safetensors");
  home.hub.files["model.safetensors.index.json"] = {
      R"({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})", "i"};
  home.hub.files["1.safetensors"] = {"first", "s1", broken.url() + "/1"};
  broken.others["/1"] = "first";
  home.hub.files["2.safetensors"] = {home.weights, HubHome::kWeightsHash,
                                     home.storage.url() + "/weights?signed=1"};
  const auto partial = home.blob(std::string(HubHome::kWeightsHash) + ".incomplete");
  broken.fault = [&](const HubRequest&) {
    for (std::error_code none; files::file_size(partial, none) != 100'000;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return std::optional(HubAnswer{.status = 404});
  };
  home.storage.fault = [&](const HubRequest&) {
    return std::optional(HubAnswer{.body = home.weights, .cut_after = 100'000, .stalls = true});
  };
  const auto start = std::chrono::steady_clock::now();
  const std::string error = testing_support::error_of<InputError>([&] { home.fetch(); });
  EXPECT_NE(error.find("file=1.safetensors: not found"), error.npos) << error;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  broken.fault = home.storage.fault = {};
  home.fetch();
  EXPECT_EQ(home.storage.requests().back().headers.at("range"), "bytes=100000-");
  EXPECT_EQ(read_file(home.snapshot() / "2.safetensors"), home.weights);
}

TEST(HubDownload, AFolderGetsTheFilesThemselves) {
  HubHome home;
  const TemporaryFolder folder;
  home.options.local_dir = folder / "model";
  EXPECT_EQ(home.fetch(), folder / "model");
  EXPECT_FALSE(files::is_symlink(folder / "model/config.json"));
  EXPECT_EQ(read_file(folder / "model/model.safetensors"), home.weights);
  EXPECT_FALSE(files::exists(home.repository));
  home.fetch();
  EXPECT_EQ(home.storage.count("GET"), 1u);
  write_file_atomically(folder / "model/model.safetensors", std::string(300'000, 'x'));
  home.fetch();
  EXPECT_EQ(read_file(folder / "model/model.safetensors"), home.weights);
}

TEST(HubDownload, AFileThatAnotherProcessFetchesIsWaitedFor) {
  HubHome home;
  const auto locks = home.home / "hub/.locks/models--org--tiny";
  files::create_directories(locks);
  files::create_directories(home.repository / "blobs");
  const detail::FileDescriptor lock(
      ::open((locks / "vocab-1.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  ASSERT_EQ(::flock(lock.get(), LOCK_EX), 0);
  std::thread fetching([&] { home.fetch(); });
  while (home.hub.count("HEAD", "vocab.txt") == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  write_file_atomically(home.blob("vocab-1"), "good\n"); // the other has ended
  ::flock(lock.get(), LOCK_UN);
  fetching.join();
  EXPECT_EQ(home.hub.count("GET", "vocab.txt"), 0u);
  EXPECT_TRUE(files::exists(home.snapshot() / "vocab.txt"));
}

TEST(HubDownload, ATokenizerOrAConfigurationIsFetchedAlone) {
  HubHome home;
  home.options.files = HubFiles::config;
  EXPECT_EQ(detail::names_in(home.fetch()), (std::set<std::string>{"config.json"}));
  home.options.files = HubFiles::tokenizer;
  EXPECT_EQ(detail::names_in(home.fetch()), (std::set<std::string>{"config.json", "vocab.txt"}));
  home.options.files = HubFiles::model; // what is missing is found out and fetched
  EXPECT_TRUE(files::exists(home.fetch() / "model.safetensors"));
}

} // namespace hasten
