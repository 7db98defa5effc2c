// Creates a folder of files in one step. Files are written to a temporary folder next to the
// target and synced, and a manifest lists their sizes and checksums. One rename then gives the
// folder the target's name.
// Threading: one thread per FolderCommit, and one FolderCommit per target at a time: with several
// ranks, one rank saves.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace hasten {

/// What commit() does with an existing target.
enum class CommitMode {
  /// The target must not exist, or be an empty folder.
  create,
  /// Exchanges an existing folder for the new one and deletes the old one. A crash leaves the
  /// old or the new folder under the name. (On file systems that cannot exchange folders, the old
  /// one may be left next to it as "<target>.old-…".)
  replace,
  /// Moves the new files one by one into the existing folder, the manifest last. Other files
  /// stay. A crash in between leaves a folder without a manifest.
  merge,
};

struct ManifestEntry {
  uint64_t size = 0; // bytes
  std::string xxh3{}; // 16 hex digits
};

/// Reads the whole file. Throws InputError.
ManifestEntry describe_file(const std::filesystem::path& path);

/// A folder that is being written.
///   FolderCommit commit(target, CommitMode::replace);
///   commit.write("config.json", text);
///   write_safetensors(commit.folder() / "model.safetensors", tensors);
///   commit.commit();
class FolderCommit {
 public:
  /// Creates "<target>.tmp-<pid>-<n>" and the target's parent folders. Throws InputError if they
  /// cannot be created, or if the mode is `create` and the target is not empty.
  explicit FolderCommit(const std::filesystem::path& target, CommitMode mode = CommitMode::create);
  /// Removes the temporary folder unless committed. Never throws.
  ~FolderCommit();
  FolderCommit(const FolderCommit&) = delete;
  FolderCommit& operator=(const FolderCommit&) = delete;

  /// The folder to write files to. Sub-folders are allowed.
  const std::filesystem::path& folder() const { return folder_; }
  const std::filesystem::path& target() const { return target_; }
  /// Writes one file. `name` may contain folders, which are created.
  /// Throws Error that names the target and the reason, for example a full disk.
  void write(const std::string& name, std::string_view bytes);
  /// Syncs every file, writes the manifest and renames. Blocks until all is on disk.
  /// Cost: reads every file once for its checksum.
  /// Throws Error that names the target and the reason. The target is then unchanged (with
  /// `merge` unless one of the last renames failed).
  void commit();
  /// All of commit() but the rename. Afterwards the folder must not change.
  void prepare();
  /// Syncs and describes the files so far; one that was described before is not read again.
  const std::map<std::string, ManifestEntry>& describe();
  /// Says what describe() would find for a file that is in place and on disk.
  void set_entry(const std::string& name, ManifestEntry entry) { files_[name] = std::move(entry); }

 private:
  void commit_folder();
  void commit_files();

  std::filesystem::path target_;
  std::filesystem::path folder_{};
  CommitMode mode_;
  std::map<std::string, ManifestEntry> files_{};
  bool prepared_ = false;
  bool committed_ = false;
};

/// Name of the manifest in a committed folder. Its form:
///   {"format": 1, "files": {"config.json": {"size": 12, "xxh3": "2d06…"}}}
inline constexpr const char* kManifestFile = "manifest.json";

/// Reads the manifest; the keys are paths relative to the folder. Throws InputError if it is
/// missing (the folder was never committed) or is not a manifest of hasten.
std::map<std::string, ManifestEntry> read_manifest(const std::filesystem::path& folder);

/// Compares every listed file with its size and checksum. Ignores files that are not listed.
/// Cost: reads all files once.
/// Throws InputError that names the first file that is missing or differs.
void verify_manifest(const std::filesystem::path& folder);

} // namespace hasten
