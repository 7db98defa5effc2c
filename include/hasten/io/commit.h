// How a folder of files comes into being all at once: files are written into a
// temporary folder beside the target, synced, listed in a manifest with sizes and
// checksums, and appear under the target's name by one rename.
// Threading: one FolderCommit per thread; at most one per target at a time, which
// in a world of several ranks means: one rank saves.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>

namespace hasten {

/// What commit() does with what is at the target.
enum class CommitMode {
  /// The target must not exist, or be an empty folder.
  create,
  /// An existing folder is exchanged for the new one and then deleted. A crash
  /// leaves the old or the new folder under the name (or, on file systems that
  /// cannot exchange, the old one beside it as "<target>.old-…").
  replace,
  /// The new files are moved into the existing folder one by one, the manifest
  /// last; other files stay. A crash in between leaves no manifest.
  merge,
};

/// A folder in the making.
///   FolderCommit commit(target, CommitMode::replace);
///   commit.write("config.json", text);
///   write_safetensors(commit.folder() / "model.safetensors", tensors);
///   commit.commit();
class FolderCommit {
 public:
  /// Makes "<target>.tmp-<pid>-<n>" and the folders above the target.
  /// Throws InputError where they cannot be made, or `create` finds something.
  explicit FolderCommit(std::filesystem::path target, CommitMode mode = CommitMode::create);
  /// Removes the temporary folder unless committed. Never throws.
  ~FolderCommit();
  FolderCommit(const FolderCommit&) = delete;
  FolderCommit& operator=(const FolderCommit&) = delete;

  /// Where files are to be written; sub-folders are allowed.
  const std::filesystem::path& folder() const { return folder_; }
  const std::filesystem::path& target() const { return target_; }
  /// One file at once; `name` may contain folders, which are made.
  /// Throws Error naming the target and the reason (a full disk).
  void write(const std::string& name, std::string_view bytes);
  /// Syncs every file, writes the manifest, renames. Blocks until it is on disk.
  /// Cost: one read of every file for its checksum.
  /// Throws Error naming the target and the reason; the target is then as it was
  /// (`merge`: unless the failure was among the last renames).
  void commit();

 private:
  void commit_folder();
  void commit_files();

  std::filesystem::path target_;
  std::filesystem::path folder_{};
  CommitMode mode_;
  bool committed_ = false;
};

/// Name of the manifest in a committed folder. Its content:
///   {"format": 1, "files": {"config.json": {"size": 12, "xxh3": "2d06…"}}}
inline constexpr const char* kManifestFile = "manifest.json";

struct ManifestEntry {
  uint64_t size = 0; // bytes
  std::string xxh3{}; // 16 hex digits
};

/// The manifest, by path relative to the folder. Throws InputError where it is
/// missing (a folder that was never committed) or not one of ours.
std::map<std::string, ManifestEntry> read_manifest(const std::filesystem::path& folder);

/// Compares every listed file with its size and checksum; files that are not
/// listed are ignored. Cost: one read of all files.
/// Throws InputError naming the first that is missing or differs.
void verify_manifest(const std::filesystem::path& folder);

} // namespace hasten
