#include "hasten/text/pretrained_folder.h"

#include <gtest/gtest.h>

#include "hasten/base/error.h"
#include "hasten/text/tokenizer.h"
#include "support/environment.h"
#include "support/error_of.h"
#include "support/hub_cache.h"
#include "support/temporary_folder.h"

namespace hasten {

using testing_support::add_to_hub_cache;
using testing_support::error_of;
using testing_support::ScopedEnvironment;
using testing_support::TemporaryFolder;

namespace detail {

// A cache below HF_HOME, with two commits of one repository, and one of another.
struct HubCache {
  TemporaryFolder home{};
  TemporaryFolder files{};
  ScopedEnvironment environment{{{"HF_HOME", home.path()}, {"HF_HUB_CACHE", {}}}};
  std::string old_commit = std::string(40, 'a');
  std::string new_commit = std::string(40, 'b');
  std::filesystem::path old_folder{}, new_folder{}, short_folder{};

  HubCache() {
    WordPieceTokenizer({"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good"}, {})
        .save_pretrained(files.path());
    const auto hub = home / "hub";
    old_folder = add_to_hub_cache(hub, "org/model.v2", files.path(), old_commit, "refs/pr/1");
    new_folder = add_to_hub_cache(hub, "org/model.v2", files.path(), new_commit);
    short_folder = add_to_hub_cache(hub, "short-name", files.path(), old_commit);
  }
};

std::string refusal(const std::string& name) {
  return error_of<InputError>([&] { pretrained_folder(name); });
}

} // namespace detail

TEST(PretrainedFolder, NamesAreFoundInTheCacheByBranchAndByCommit) {
  const detail::HubCache cache;
  EXPECT_EQ(pretrained_folder("short-name"), cache.short_folder);
  EXPECT_EQ(pretrained_folder("org/model.v2"), cache.new_folder);
  EXPECT_EQ(pretrained_folder("org/model.v2@main"), cache.new_folder);
  EXPECT_EQ(pretrained_folder("org/model.v2@refs/pr/1"), cache.old_folder);
  EXPECT_EQ(pretrained_folder("org/model.v2@" + cache.old_commit), cache.old_folder);
  EXPECT_EQ(AutoTokenizer::from_pretrained("org/model.v2").encode("good").ids,
            (std::vector<int64_t>{2, 5, 3}));
}

TEST(PretrainedFolder, AnExistingPathWinsAndIsReturnedAsItIs) {
  const detail::HubCache cache;
  const TemporaryFolder here;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(here.path());
  std::filesystem::create_directory("short-name");
  EXPECT_EQ(pretrained_folder("short-name"), "short-name");
  EXPECT_EQ(hf_download_command("short-name"), "");
  std::filesystem::current_path(before);
  EXPECT_EQ(pretrained_folder(here.path().string()), here.path());
}

TEST(PretrainedFolder, TheCacheIsWhereHuggingfaceHubLooks) {
  const detail::HubCache cache;
  const TemporaryFolder other;
  const auto file = cache.files.path();
  const auto by_variable = add_to_hub_cache(other / "a", "m", file, "1");
  const auto by_xdg = add_to_hub_cache(other / "x/huggingface/hub", "m", file, "2");
  const auto by_home = add_to_hub_cache(other / "h/.cache/huggingface/hub", "m", file, "3");
  const auto below_home = add_to_hub_cache(other / "h/own/hub", "m", file, "4");
  const ScopedEnvironment all{{{"HF_HUB_CACHE", other / "a"},
                               {"HF_HOME", other / "none"},
                               {"XDG_CACHE_HOME", other / "x"},
                               {"HOME", other / "h"}}};
  EXPECT_EQ(pretrained_folder("m"), by_variable);
  const ScopedEnvironment tilde{{{"HF_HUB_CACHE", ""}, {"HF_HOME", "~/own"}}};
  EXPECT_EQ(pretrained_folder("m"), below_home);
  const ScopedEnvironment xdg{{{"HF_HOME", {}}}};
  EXPECT_EQ(pretrained_folder("m"), by_xdg);
  const ScopedEnvironment home{{{"XDG_CACHE_HOME", {}}}};
  EXPECT_EQ(pretrained_folder("m"), by_home);
}

TEST(PretrainedFolder, WhatIsNotThereIsRefusedWithTheCommandThatDownloadsIt) {
  const detail::HubCache cache;
  const std::string hub = (cache.home / "hub").string();
  std::string error = detail::refusal("org/none");
  EXPECT_NE(error.find("[text::pretrained_folder] name=org/none does not exist"), error.npos);
  EXPECT_NE(error.find("is not in " + hub), error.npos) << error;
  EXPECT_NE(error.find("Fix: hf download org/none."), error.npos) << error;
  error = detail::refusal("org/model.v2@v3");
  EXPECT_NE(error.find("revision=v3"), error.npos) << error;
  EXPECT_NE(error.find("hf download org/model.v2 --revision v3."), error.npos) << error;
  std::filesystem::remove_all(cache.new_folder); // its reference stays
  EXPECT_NE(detail::refusal("org/model.v2").find("hf download org/model.v2."), error.npos);
  error = error_of<InputError>([] { pretrained_folder("bert-tyni", "a", "b", {"bert-tiny"}); });
  EXPECT_NE(error.find("or one of bert-tiny. Fix: write bert-tiny."), error.npos) << error;
}

TEST(PretrainedFolder, PathsThatAreNoNamesOfARepositoryNeverReachTheCache) {
  const detail::HubCache cache;
  for (const char* name :
       {"", "/no/where", "./short-name", "a/b/c", "short-name/", "org//x", "a--b", "short-name@",
        "short-name@../refs/main", "short-name@/etc", "-x"}) {
    const std::string error = detail::refusal(name);
    EXPECT_NE(error.find(" does not exist. Expected"), error.npos) << error;
    EXPECT_EQ(error.find("hf download"), error.npos) << error;
  }
}

} // namespace hasten
