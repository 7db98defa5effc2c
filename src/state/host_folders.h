// Hosts that share no file system: each has a folder of its own for its ranks' part of a state.
// Note [Host folders] in host_folders.cpp. Collective, blocking, unless a function says otherwise.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "hasten/comm/communicator.h"
#include "hasten/io/commit.h"
#include "state_contents.h"

namespace hasten::detail {

/// Local.
bool on_several_hosts(const Communicator& communicator);

/// "rank 2's host node-b".
std::string host_of(int rank, const std::string& name);

/// An empty file with a random name in the place where a host's folder will be. Other hosts look for it.
class HostMark {
 public:
  /// Makes the place and the file, on the first rank of each host. Local.
  HostMark(const Communicator& communicator, const std::filesystem::path& place);
  ~HostMark();
  HostMark(const HostMark&) = delete;
  HostMark& operator=(const HostMark&) = delete;
  /// What the ranks exchange.
  nlohmann::json said() const;

 private:
  int first_;
  std::filesystem::path file_{};
};

/// The folders that a world writes: one if all ranks see its place, else one for each file system.
struct HostFolders {
  /// [rank] The lowest rank that sees the same place. It makes and commits the folder.
  std::vector<int> writer{};
  /// [rank] Its host's name, and the mark's name.
  std::vector<nlohmann::json> marks{};

  /// One for each folder, ascending.
  std::vector<int> writers() const;
  bool several() const { return writers().size() > 1; }
  std::vector<int> ranks_of(int owner) const;
  /// Of state.json: an id, and the hosts' ranks.
  nlohmann::json placement() const;
};

/// All ranks write into one folder. Local.
HostFolders one_folder(int world_size);

/// Who sees whose place. `marks`: [rank] HostMark::said(). `tries`: how often, each 20 ms, a host looks for
/// rank 0's mark.
HostFolders find_host_folders(Communicator& communicator, const char* where,
                              const std::filesystem::path& place,
                              const std::vector<nlohmann::json>& marks, int tries);

/// Throws Error if the place of a lower writer is seen now, because a file system was late. Local.
void require_apart(const HostFolders& folders, int rank, const std::filesystem::path& place);

/// Throws InputError on all ranks unless there are enough folders. Local.
void require_replicas(const HostFolders& folders, int64_t replicas, const char* where);

/// Completes the folders that are written: the shared files become equal to rank 0's, bit for bit; what
/// differs is sent. Each folder gets the rank files of the next `replicas` - 1 folders. Then prepares
/// all commits. `commit`: of this rank; null if it writes no folder.
void share_files(Communicator& communicator, const HostFolders& folders, int64_t replicas,
                 FolderCommit* commit);

/// The folders of one saved state, or what is left of them; the same on all ranks.
struct SavedFolders {
  std::filesystem::path folder{}; // of this rank
  /// [rank] The lowest rank that sees the same folder.
  std::vector<int> owner{};
  std::vector<std::string> host{}; // [rank]
  /// By owner; empty for a folder that is missing.
  std::map<int, std::map<std::string, ManifestEntry>> files{};
  /// Why they are not one whole state; empty if they are.
  std::string fault{};

  /// Names of all files but the ranks'.
  std::set<std::string> shared_files() const;
  /// The lowest owner that has the file; -1: none.
  int source_of(const std::string& file) const;
};

/// Looks at the folders. `check` throws InputError for a folder from which nothing can be loaded; the
/// first rank that sees the folder calls it, if there are several. Throws for what went wrong with
/// the group alone.
SavedFolders look_at_folders(Communicator& communicator, const char* where,
                             const std::filesystem::path& folder,
                             const std::function<void()>& check);

/// Fetches the shared files that folders lack, and, if `held` is not null, the rank files that their ranks
/// read. Each folder that gets files is replaced in one step. Throws InputError for a fault.
void complete_folders(Communicator& communicator, const char* where, SavedFolders& folders,
                      const HeldRowsByName* held);

} // namespace hasten::detail
