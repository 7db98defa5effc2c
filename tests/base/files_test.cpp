#include "hasten/base/files.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>

#include "hasten/base/error.h"
#include "support/temporary_folder.h"

namespace hasten {

using testing_support::TemporaryFolder;

static size_t count_entries(const std::filesystem::path& folder) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) {
    ++count;
  }
  return count;
}

TEST(Files, BytesComeBackAsTheyWereWritten) {
  const TemporaryFolder folder;
  std::string bytes(100'000, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>(i * 31);
  }
  for (const std::string& content : {std::string(), bytes}) {
    write_file_atomically(folder / "a", content);
    EXPECT_EQ(read_file(folder / "a"), content);
  }
  EXPECT_EQ(count_entries(folder.path()), 1u);
}

TEST(Files, FilesWithoutASizeAreReadToTheirEnd) {
  EXPECT_NE(read_file("/proc/self/status").find("Pid:"), std::string::npos);
}

TEST(Files, MissingFileIsNamedWithTheReason) {
  try {
    read_file("/nowhere/at/all");
    FAIL();
  } catch (const InputError& error) {
    EXPECT_STREQ(error.what(), "[base::read_file] /nowhere/at/all: No such file or directory.");
  }
  EXPECT_THROW(read_file("/proc/self"), InputError);
  EXPECT_THROW(write_file_atomically("/nowhere/at/all", "x"), InputError);
}

// A process with this pid has created them. It has ended, or it is writing in another container.
TEST(Files, TemporaryFilesOfOthersAreNotInTheWay) {
  const TemporaryFolder folder;
  constexpr int kOthers = 1000;
  for (int n = 0; n < kOthers; ++n) {
    std::ofstream(folder / ("a.tmp-" + std::to_string(::getpid()) + "-" + std::to_string(n)))
        << "other";
  }
  write_file_atomically(folder / "a", "mine");
  EXPECT_EQ(read_file(folder / "a"), "mine");
  EXPECT_EQ(count_entries(folder.path()), kOthers + 1u);
}

TEST(Files, FullDiskLeavesTheOldFileAndNoTemporaryOne) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "a", "old");
  // A limit on file sizes makes the write fail in the middle, like a full disk.
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{.rlim_cur = 4096, .rlim_max = before.rlim_max};
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string message;
  try {
    write_file_atomically(folder / "a", std::string(100'000, 'n'));
  } catch (const Error& error) {
    message = error.what();
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_NE(message.find((folder / "a").string()), std::string::npos);
  EXPECT_NE(message.find("File too large"), std::string::npos) << message;
  EXPECT_EQ(read_file(folder / "a"), "old");
  EXPECT_EQ(count_entries(folder.path()), 1u);
}

TEST(Files, PermissionsStayAndLinksAreFollowed) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "real", "old");
  ASSERT_EQ(::chmod((folder / "real").c_str(), 0640), 0);
  std::filesystem::create_symlink("real", folder / "link");
  write_file_atomically(folder / "link", "new");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(read_file(folder / "real"), "new");
  struct stat status {};
  ASSERT_EQ(::stat((folder / "real").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0640u);
}

// As root, a rename replaces even /dev/null.
TEST(Files, DevicesAndPipesAreRefusedAndStay) {
  const TemporaryFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink("pipe", folder / "link");
  for (const char* name : {"pipe", "link"}) {
    try {
      write_file_atomically(folder / name, "x");
      FAIL() << name << " was replaced";
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find("pipe is a device or a pipe"), std::string::npos)
          << error.what();
    }
    EXPECT_TRUE(std::filesystem::is_fifo(folder / "pipe"));
  }
  EXPECT_EQ(count_entries(folder.path()), 2u);
}

TEST(Files, HashIsXxh3) {
  // The published value of XXH3_64bits for the empty input.
  EXPECT_EQ(hash_hex(""), "2d06800538d394c2");
  EXPECT_EQ(hash_hex("a").size(), 16u);
  EXPECT_NE(hash_hex("a"), hash_hex("b"));
}

} // namespace hasten
