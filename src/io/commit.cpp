#include "hasten/io/commit.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <memory>
#include <system_error>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"

namespace hasten {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ManifestEntry, size, xxh3)

namespace detail {

constexpr const char* kCommitWhere = "io::FolderCommit";
constexpr const char* kManifestWhere = "io::verify_manifest";

} // namespace detail

ManifestEntry describe_file(const std::filesystem::path& path) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                       &XXH3_freeState);
  XXH3_64bits_reset(state.get());
  ManifestEntry entry;
  std::ifstream file(path, std::ios::binary);
  std::vector<char> block(1 << 20);
  while (file) {
    file.read(block.data(), static_cast<std::streamsize>(block.size()));
    const auto got = static_cast<size_t>(file.gcount());
    XXH3_64bits_update(state.get(), block.data(), got);
    entry.size += got;
  }
  if (!file.eof()) {
    throw InputError(detail::kManifestWhere, path.string() + ": cannot be read");
  }
  entry.xxh3 = format_hex(XXH3_64bits_digest(state.get()));
  return entry;
}

namespace detail {

// Relative paths of all regular files below `folder`, sorted.
std::vector<std::string> files_below(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) {
      names.push_back(entry.path().lexically_relative(folder).string());
    }
  }
  std::ranges::sort(names);
  return names;
}

// Errors name `target`.
void make_folders(const std::filesystem::path& path, const std::filesystem::path& target) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) {
    throw_file_error(kCommitWhere, target, error.value());
  }
}

void rename_or_throw(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    throw_file_error(kCommitWhere, to, errno);
  }
}

// Moves `folder` to `target`. The old folder is then at `folder`.
void exchange_folders(const std::filesystem::path& folder, const std::filesystem::path& target) {
  if (::renameat2(AT_FDCWD, folder.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) == 0) {
    return; // `folder` is now the old one, and the destructor removes it
  }
  if (errno != EINVAL && errno != ENOSYS) {
    throw_file_error(kCommitWhere, target, errno);
  }
  std::filesystem::path old;
  const int kept = make_beside(target, ".old-", old, [&](const auto& name) {
    const bool done = ::rename(target.c_str(), name.c_str()) == 0;
    return done ? 0 : errno == ENOTEMPTY ? EEXIST : errno;
  });
  if (kept != 0) {
    throw_file_error(kCommitWhere, target, kept);
  }
  if (::rename(folder.c_str(), target.c_str()) != 0) {
    const int error = errno;
    ::rename(old.c_str(), target.c_str());
    throw_file_error(kCommitWhere, target, error);
  }
  ::rename(old.c_str(), folder.c_str());
}

std::filesystem::path without_final_slash(const std::filesystem::path& path) {
  const std::filesystem::path normal = path.lexically_normal();
  return normal.has_filename() ? normal : normal.parent_path();
}

} // namespace detail

FolderCommit::FolderCommit(const std::filesystem::path& target, CommitMode mode)
    : target_(detail::without_final_slash(target)), mode_(mode) {
  std::error_code error;
  // The target of a symbolic link is the folder to replace.
  if (std::filesystem::is_symlink(target_, error)) {
    target_ = std::filesystem::weakly_canonical(target_, error);
  }
  const auto status = std::filesystem::status(target_, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_directory(status)) {
    detail::throw_file_error(detail::kCommitWhere, target_, ENOTDIR);
  }
  if (mode_ == CommitMode::create && std::filesystem::exists(status) &&
      !std::filesystem::is_empty(target_, error)) {
    throw InputError(detail::kCommitWhere,
                     target_.string() + ": the folder exists and is not empty",
                     "a new or empty folder", "use another folder, or allow overwriting it");
  }
  detail::make_folders(detail::folder_of(target_), target_);
  const int failed = make_beside(target_, ".tmp-", folder_, [](const auto& name) {
    return ::mkdir(name.c_str(), 0777) == 0 ? 0 : errno;
  });
  if (failed != 0) {
    detail::throw_file_error(detail::kCommitWhere, target_, failed);
  }
}

FolderCommit::~FolderCommit() {
  std::error_code ignored;
  // After `replace` this is the old folder. After `merge` it is empty.
  if (!committed_ || mode_ != CommitMode::create) {
    std::filesystem::remove_all(folder_, ignored);
  }
}

void FolderCommit::write(const std::string& name, std::string_view bytes) {
  const std::filesystem::path path = folder_ / name;
  detail::make_folders(path.parent_path(), path);
  detail::FileWriter file("io::write_file", path);
  file.write(bytes);
  file.finish();
}

const std::map<std::string, ManifestEntry>& FolderCommit::describe() {
  try {
    for (const auto& name : detail::files_below(folder_)) {
      if (name != kManifestFile && !files_.contains(name)) {
        sync_path(folder_ / name);
        files_.emplace(name, describe_file(folder_ / name));
      }
    }
  } catch (const std::filesystem::filesystem_error& error) {
    detail::throw_file_error(detail::kCommitWhere, target_, error.code().value());
  }
  return files_;
}

void FolderCommit::prepare() {
  describe();
  try {
    auto files = files_;
    std::error_code ignored;
    if (mode_ == CommitMode::merge && std::filesystem::exists(target_ / kManifestFile, ignored)) {
      for (auto& [name, entry] : read_manifest(target_)) {
        files.emplace(name, std::move(entry)); // does not replace new entries
      }
    }
    write(kManifestFile, nlohmann::json{{"format", 1}, {"files", files}}.dump(2) + "\n");
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_)) {
      if (entry.is_directory()) {
        sync_path(entry.path());
      }
    }
    sync_path(folder_);
  } catch (const std::filesystem::filesystem_error& error) {
    detail::throw_file_error(detail::kCommitWhere, target_, error.code().value());
  }
  prepared_ = true;
}

void FolderCommit::commit() {
  if (committed_) {
    throw Error(detail::kCommitWhere, target_.string() + ": commit() was called twice");
  }
  if (!prepared_) {
    prepare();
  }
  if (mode_ == CommitMode::merge) {
    commit_files();
  } else {
    commit_folder();
  }
  committed_ = true;
  sync_path(detail::folder_of(target_));
}

void FolderCommit::commit_folder() {
  std::error_code ignored;
  if (mode_ == CommitMode::replace && std::filesystem::exists(target_, ignored)) {
    detail::exchange_folders(folder_, target_);
  } else {
    // rename() replaces an empty folder and fails for one that is not empty.
    detail::rename_or_throw(folder_, target_);
  }
}

void FolderCommit::commit_files() {
  const auto names = detail::files_below(folder_);
  detail::make_folders(target_, target_);
  std::error_code error;
  // Until the last rename the folder has no manifest, because its files are mixed.
  std::filesystem::remove(target_ / kManifestFile, error);
  for (const auto& name : names) {
    if (name != kManifestFile) {
      std::filesystem::create_directories((target_ / name).parent_path(), error);
      detail::rename_or_throw(folder_ / name, target_ / name);
      sync_path((target_ / name).parent_path());
    }
  }
  detail::rename_or_throw(folder_ / kManifestFile, target_ / kManifestFile);
  sync_path(target_);
}

std::map<std::string, ManifestEntry> read_manifest(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / kManifestFile;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    throw InputError(detail::kManifestWhere, path.string() + ": the file is missing",
                     "the manifest of a completely saved folder", "use an earlier save");
  }
  std::map<std::string, ManifestEntry> files;
  try {
    const auto json = read_json_file(detail::kManifestWhere, path);
    if (json.at("format") != 1) {
      throw InputError(detail::kManifestWhere,
                       path.string() + ": format=" + json.at("format").dump(), "1",
                       "read it with the version that wrote it");
    }
    json.at("files").get_to(files);
  } catch (const nlohmann::json::exception& error) {
    throw InputError(detail::kManifestWhere, path.string() + ": " + error.what());
  }
  return files;
}

void verify_manifest(const std::filesystem::path& folder) {
  for (const auto& [name, entry] : read_manifest(folder)) {
    const std::filesystem::path path = folder / name;
    std::error_code error;
    const auto size = std::filesystem::file_size(path, error);
    if (error) {
      throw InputError(detail::kManifestWhere, path.string() + ": " + error.message());
    }
    if (size != entry.size) {
      throw InputError(detail::kManifestWhere, path.string() + ": size=" + std::to_string(size),
                       std::to_string(entry.size) + " bytes, as saved");
    }
    if (const auto found = describe_file(path); found.xxh3 != entry.xxh3) {
      throw InputError(detail::kManifestWhere, path.string() + ": xxh3=" + found.xxh3,
                       entry.xxh3 + ", as saved");
    }
  }
}

} // namespace hasten
