#include "hasten/io/commit.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <fstream>
#include <set>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/io/safetensors.h"
#include "support/error_of.h"
#include "support/full_disk.h"
#include "support/temporary_folder.h"

namespace hasten {

using testing_support::error_of;
using testing_support::FullDisk;
using testing_support::TemporaryFolder;

static std::set<std::string> entries_of(const std::filesystem::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

static void put(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

TEST(FolderCommit, NothingIsThereBeforeCommitAndAllAfter) {
  const TemporaryFolder folder;
  const auto target = folder / "deep" / "model";
  FolderCommit commit(target);
  commit.write("config.json", "{}");
  commit.write("sub/a.txt", "a");
  put(commit.folder() / "by_hand", "b");
  EXPECT_FALSE(std::filesystem::exists(target));
  commit.commit();
  EXPECT_EQ(entries_of(target),
            (std::set<std::string>{"config.json", "sub", "by_hand", kManifestFile}));
  EXPECT_EQ(entries_of(folder / "deep"), (std::set<std::string>{"model"}));
  const auto manifest = read_manifest(target);
  EXPECT_EQ(manifest.size(), 3u);
  EXPECT_EQ(manifest.at("sub/a.txt").size, 1u);
  EXPECT_EQ(manifest.at("sub/a.txt").xxh3, hash_hex("a"));
  verify_manifest(target);
}

TEST(FolderCommit, WithoutCommitTheTemporaryFolderGoes) {
  const TemporaryFolder folder;
  {
    FolderCommit commit(folder / "model");
    commit.write("config.json", "{}");
    EXPECT_EQ(entries_of(folder.path()).size(), 1u);
  }
  EXPECT_TRUE(entries_of(folder.path()).empty());
}

TEST(FolderCommit, TemporaryFoldersAndFilesOfOthersStayAndAreNotInTheWay) {
  const TemporaryFolder folder;
  const auto other = [&](const std::string& name, int n) {
    return folder / (name + ".tmp-" + std::to_string(::getpid()) + "-" + std::to_string(n));
  };
  constexpr int kOthers = 1000;
  for (int n = 0; n < kOthers; ++n) {
    std::filesystem::create_directory(other("model", n));
    put(other("w.safetensors", n), "other");
  }
  FolderCommit commit(folder / "model");
  commit.write("a", "1");
  commit.commit();
  verify_manifest(folder / "model");
  write_safetensors(folder / "w.safetensors", {{"w", torch::zeros({2})}});
  EXPECT_EQ(entries_of(folder.path()).size(), 2 * kOthers + 2u);
}

TEST(FolderCommit, CreateRefusesAFilledFolderAndTakesAnEmptyOne) {
  const TemporaryFolder folder;
  put(folder / "model" / "mine", "precious");
  const auto message = error_of([&] { FolderCommit commit(folder / "model"); });
  EXPECT_NE(message.find((folder / "model").string()), std::string::npos);
  EXPECT_EQ(read_file(folder / "model" / "mine"), "precious");
  EXPECT_EQ(entries_of(folder.path()).size(), 1u);

  std::filesystem::create_directory(folder / "empty");
  FolderCommit commit(folder / "empty/");
  commit.write("a", "1");
  commit.commit();
  verify_manifest(folder / "empty");
}

TEST(FolderCommit, CreateRefusesAFolderFilledMeanwhile) {
  const TemporaryFolder folder;
  FolderCommit commit(folder / "model");
  commit.write("a", "1");
  put(folder / "model" / "mine", "precious");
  EXPECT_NE(error_of([&] { commit.commit(); }), "");
  EXPECT_EQ(entries_of(folder / "model"), (std::set<std::string>{"mine"}));
}

TEST(FolderCommit, ReplaceLeavesOnlyTheNewFiles) {
  const TemporaryFolder folder;
  for (const std::string name : {"first", "second"}) {
    FolderCommit commit(folder / "model", CommitMode::replace);
    commit.write(name, name);
    commit.commit();
  }
  EXPECT_EQ(entries_of(folder / "model"), (std::set<std::string>{"second", kManifestFile}));
  EXPECT_EQ(entries_of(folder.path()), (std::set<std::string>{"model"}));
}

TEST(FolderCommit, ReplaceThroughALinkReplacesWhatItLeadsTo) {
  const TemporaryFolder folder;
  put(folder / "real" / "old", "old");
  std::filesystem::create_directory_symlink("real", folder / "link");
  FolderCommit commit(folder / "link", CommitMode::replace);
  commit.write("new", "new");
  commit.commit();
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(read_file(folder / "real" / "new"), "new");
}

TEST(FolderCommit, MergeKeepsOtherFilesAndTheirManifestEntries) {
  const TemporaryFolder folder;
  put(folder / "out" / "metrics.jsonl", "{}");
  for (const std::string name : {"config.json", "vocab.txt", "config.json"}) {
    FolderCommit commit(folder / "out", CommitMode::merge);
    commit.write(name, name + std::to_string(commit.folder().string().size()));
    commit.commit();
  }
  EXPECT_EQ(entries_of(folder / "out"),
            (std::set<std::string>{"metrics.jsonl", "config.json", "vocab.txt", kManifestFile}));
  EXPECT_EQ(read_manifest(folder / "out").size(), 2u);
  verify_manifest(folder / "out");
  EXPECT_EQ(entries_of(folder.path()), (std::set<std::string>{"out"}));
}

TEST(FolderCommit, FullDiskIsNamedAndTheTargetIsUntouched) {
  const TemporaryFolder folder;
  const auto big = torch::zeros({10'000});
  for (const auto mode : {CommitMode::create, CommitMode::replace, CommitMode::merge}) {
    const auto target = folder / ("model" + std::to_string(int(mode)));
    if (mode != CommitMode::create) {
      FolderCommit commit(target);
      commit.write("config.json", "old");
      commit.commit();
    }
    std::string message;
    {
      FolderCommit commit(target, mode);
      commit.write("config.json", "new");
      const FullDisk full;
      message = error_of([&] {
        write_safetensors(commit.folder() / "model.safetensors", {{"w", big}});
        commit.commit();
      });
    }
    EXPECT_NE(message.find("File too large"), std::string::npos) << message;
    EXPECT_NE(message.find(target.string()), std::string::npos) << message;
    if (mode == CommitMode::create) {
      EXPECT_FALSE(std::filesystem::exists(target));
    } else {
      EXPECT_EQ(read_file(target / "config.json"), "old");
      verify_manifest(target);
    }
  }
  EXPECT_EQ(entries_of(folder.path()).size(), 2u); // no temporary folder
}

TEST(FolderCommit, DamageIsFoundByTheManifest) {
  const TemporaryFolder folder;
  const auto target = folder / "model";
  FolderCommit commit(target);
  commit.write("a", "1234");
  commit.write("b", "1234");
  commit.commit();
  put(target / "not_listed", "x");
  verify_manifest(target);
  put(target / "b", "123");
  EXPECT_NE(error_of([&] { verify_manifest(target); }).find("b: size=3"), std::string::npos);
  put(target / "b", "1235");
  EXPECT_NE(error_of([&] { verify_manifest(target); }).find("b: xxh3="), std::string::npos);
  std::filesystem::remove(target / "a");
  EXPECT_NE(error_of([&] { verify_manifest(target); }).find("/a: No such file"), std::string::npos);
  put(target / kManifestFile, "[1]");
  EXPECT_THROW(verify_manifest(target), InputError);
  std::filesystem::remove(target / kManifestFile);
  EXPECT_THROW(verify_manifest(target), InputError);
}

} // namespace hasten
