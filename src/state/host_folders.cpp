// Note [Host folders]
// Hosts without a common file system each have a folder of their own, which has the shared files and
// the rank files of the host's ranks. A folder belongs to the lowest rank that sees it. A host looks for the
// others' marks, files with random names, since two hosts may both have a folder of one name.
// Saving: every folder is complete, on disk and under a temporary name before any is renamed. If a rename
// fails or a host dies between the renames, the folders are no whole state, and readers say so.
// Loading: the folders are of one save if their shared files are equal; state.json has a random number.
#include "host_folders.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <set>
#include <thread>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"

namespace hasten {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ManifestEntry, size, xxh3)

namespace detail {

namespace fs = std::filesystem;

// Bytes in memory of a file that is sent.
constexpr uint64_t kChunk = uint64_t{16} << 20;

using Files = std::map<std::string, ManifestEntry>;

bool is_rank_file(const std::string& name) {
  return name.starts_with("state_rank_") && name.ends_with(".safetensors");
}

bool on_several_hosts(const Communicator& communicator) {
  return std::ssize(ranks_of_host(communicator)) < communicator.world_size();
}

std::string host_of(int rank, const std::string& name) {
  return "rank " + std::to_string(rank) + "'s host " + name;
}

HostMark::HostMark(const Communicator& communicator, const fs::path& place)
    : first_(ranks_of_host(communicator).front()) {
  if (communicator.rank() != first_) {
    return;
  }
  std::error_code error;
  fs::create_directories(place, error);
  const std::string name = ".hasten.tmp-" + std::to_string(std::random_device{}()) + "-" +
                           std::to_string(std::random_device{}());
  if (!FileDescriptor(
          ::open((place / name).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666))) {
    throw_file_error(kSaveWhere, place, errno);
  }
  file_ = place / name;
}

HostMark::~HostMark() {
  std::error_code error;
  if (!file_.empty()) {
    fs::remove(file_, error);
  }
}

nlohmann::json HostMark::said() const {
  return {{"host", host_name()}, {"first", first_}, {"name", file_.filename().string()}};
}

std::vector<int> HostFolders::writers() const {
  const std::set<int> all(writer.begin(), writer.end());
  return {all.begin(), all.end()};
}

std::vector<int> HostFolders::ranks_of(int owner) const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < writer.size(); ++rank) {
    if (writer[rank] == owner) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  return ranks;
}

nlohmann::json HostFolders::placement() const {
  auto hosts = nlohmann::json::array();
  for (const int owner : writers()) {
    hosts.push_back(
        {{"name", marks[static_cast<size_t>(owner)].at("host")}, {"ranks", ranks_of(owner)}});
  }
  std::random_device random;
  return {{"id", format_hex((uint64_t{random()} << 32) | random())}, {"hosts", std::move(hosts)}};
}

HostFolders one_folder(int world_size) {
  return {std::vector(static_cast<size_t>(world_size), 0), {}};
}

/// The lowest of the first `count` ranks whose mark is in the place; -1: none.
int marked_by(const fs::path& place, const std::vector<nlohmann::json>& marks, int count) {
  for (int rank = 0; rank < count; ++rank) {
    std::error_code error;
    const auto name = marks[static_cast<size_t>(rank)].at("name").get<std::string>();
    if (!name.empty() && fs::exists(place / name, error)) {
      return rank;
    }
  }
  return -1;
}

HostFolders find_host_folders(Communicator& c, const char* where, const fs::path& place,
                              const std::vector<nlohmann::json>& marks, int tries) {
  const int first = marks[static_cast<size_t>(c.rank())].at("first").get<int>();
  HostFolders folders{{}, marks};
  const auto seen = on_every_rank(c, where, [&] {
    int found = first;
    for (int i = 0; c.rank() == first && found != 0 && i < tries; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(i > 0 ? 20 : 0));
      found = marked_by(place, marks, first + 1);
    }
    return nlohmann::json(found);
  });
  for (const auto& mark : marks) {
    folders.writer.push_back(seen[mark.at("first").get<size_t>()].get<int>());
  }
  return folders;
}

void require_apart(const HostFolders& folders, int rank, const fs::path& place) {
  const int own = folders.writer[static_cast<size_t>(rank)];
  if (folders.several() && own == rank && marked_by(place, folders.marks, own) >= 0) {
    throw Error(kSaveWhere, place.string() + " has files of another host, which were seen late",
                "a file system that shows all hosts a new file at once", "save again");
  }
}

void require_replicas(const HostFolders& folders, int64_t replicas, const char* where) {
  const int64_t most = std::ssize(folders.writers());
  if (replicas < 1 || replicas > most) {
    throw InputError(where,
                     "save_replicas=" + std::to_string(replicas) +
                         (most == 1 ? ", but all ranks save into one folder, on one disk"
                                    : " on " + std::to_string(most) + " hosts"),
                     most == 1 ? "1" : "1 to the number of hosts with folders of their own");
  }
}

/// A file that one folder has and others get.
struct Transfer {
  std::string name{};
  ManifestEntry entry{};
  int from = 0;
  std::vector<int> to{};
};

/// Sends or receives a file. After an error it goes on, so that no peer waits, and returns the error.
std::exception_ptr transfer_file(Communicator& group, int root, const Transfer& what,
                                 const fs::path& folder, FolderCommit* commit) {
  const bool sends = group.rank() == root;
  const fs::path path = (sends ? folder : commit->folder()) / what.name;
  std::exception_ptr failed;
  FileDescriptor file;
  std::unique_ptr<FileWriter> writer;
  const auto attempt = [&](const auto& step) {
    try {
      if (!failed) {
        step();
      }
    } catch (...) {
      failed = std::current_exception();
    }
  };
  attempt([&] {
    if (sends) {
      file = FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    } else {
      fs::create_directories(path.parent_path());
      writer = std::make_unique<FileWriter>("io::FolderCommit", path);
    }
  });
  const at::Tensor chunk =
      at::zeros({static_cast<int64_t>(std::min(what.entry.size, kChunk))}, at::kByte);
  for (uint64_t at = 0; at < what.entry.size; at += kChunk) {
    const auto count = std::min(kChunk, what.entry.size - at);
    auto* bytes = chunk.data_ptr<uint8_t>();
    attempt([&] {
      if (sends && read_at(file.get(), bytes, count, at) != static_cast<ssize_t>(count)) {
        throw InputError(kLoadWhere, path.string() + ": cannot be read");
      }
    });
    group.broadcast(chunk.narrow(0, 0, static_cast<int64_t>(count)), root, "file of a state");
    attempt([&] {
      if (!sends) {
        writer->write({reinterpret_cast<const char*>(bytes), count});
      }
    });
  }
  attempt([&] {
    if (!sends) {
      writer->finish();
      if (const auto got = describe_file(path); got.xxh3 != what.entry.xxh3) {
        throw InputError(
            kLoadWhere,
            what.name + " of rank " + std::to_string(what.from) + "'s folder: xxh3=" + got.xxh3,
            what.entry.xxh3 + ", as its manifest says");
      }
      commit->set_entry(what.name, what.entry);
    }
  });
  return failed;
}

/// Transfers files from `folder` into the folders of commits. All ranks pass the same list. Collective.
void transfer_files(Communicator& c, const std::vector<Transfer>& list, const fs::path& folder,
                    FolderCommit* commit) {
  std::map<std::vector<int>, std::shared_ptr<Communicator>> groups;
  std::exception_ptr failed;
  for (const Transfer& what : list) {
    std::vector<int> ranks = what.to;
    ranks.push_back(what.from);
    std::ranges::sort(ranks);
    if (!std::ranges::binary_search(ranks, c.rank())) {
      continue;
    }
    auto& group = groups[ranks];
    if (!group) {
      CommunicatorOptions options = c.options();
      options.name += " files";
      options.check_shapes = ShapeCheck::never; // all know the sizes
      group = c.new_group(ranks, options);
    }
    const auto root = std::ranges::lower_bound(ranks, what.from) - ranks.begin();
    auto error = transfer_file(*group, static_cast<int>(root), what, folder, commit);
    failed = failed ? failed : error;
  }
  for (const auto& [ranks, group] : groups) {
    group->close();
  }
  if (failed) {
    std::rethrow_exception(failed);
  }
}

void share_files(Communicator& c, const HostFolders& folders, int64_t replicas,
                 FolderCommit* commit) {
  const auto described = on_every_rank(c, kSaveWhere, [&] {
    return commit != nullptr ? nlohmann::json(commit->describe()) : nlohmann::json();
  });
  const auto files = [&](int rank) { return described[static_cast<size_t>(rank)].get<Files>(); };
  const auto owners = folders.writers();
  const auto count = owners.size();
  std::vector<Transfer> list;
  for (const auto& [name, entry] : files(0)) {
    Transfer shared{name, entry, 0, {}};
    for (const int owner : owners) {
      const auto& theirs = described[static_cast<size_t>(owner)];
      const auto found = theirs.find(name);
      if (!is_rank_file(name) && (found == theirs.end() || *found != nlohmann::json(entry))) {
        shared.to.push_back(owner);
      }
    }
    if (!shared.to.empty()) {
      list.push_back(std::move(shared));
    }
  }
  for (size_t next = 1; next < static_cast<size_t>(replicas); ++next) {
    for (const size_t odd : {0, 1}) { // neighbours do not wait for each other in a chain
      for (size_t i = odd; i < count; i += 2) {
        const int from = owners[(i + next) % count];
        for (const int rank : folders.ranks_of(from)) {
          const std::string name = rank_file_name(rank);
          list.push_back({name, files(from).at(name), from, {owners[i]}});
        }
      }
    }
  }
  on_every_rank(c, kSaveWhere, [&] {
    transfer_files(c, list, commit != nullptr ? commit->folder() : fs::path(), commit);
    if (commit != nullptr) {
      commit->prepare();
    }
    return nlohmann::json();
  });
}

std::set<std::string> SavedFolders::shared_files() const {
  std::set<std::string> names;
  for (const auto& [owner, theirs] : files) {
    for (const auto& [name, entry] : theirs) {
      if (!is_rank_file(name)) {
        names.insert(name);
      }
    }
  }
  return names;
}

int SavedFolders::source_of(const std::string& file) const {
  for (const auto& [owner, theirs] : files) {
    if (theirs.contains(file)) {
      return owner;
    }
  }
  return -1;
}

/// Names two folders whose shared files differ. state.json first, because it differs between any two
/// saves.
std::string difference(const SavedFolders& folders, const std::vector<std::string>& paths) {
  const auto shared = folders.shared_files();
  std::vector<std::string> names = {kStateFile};
  names.insert(names.end(), shared.begin(), shared.end());
  for (const std::string& name : names) {
    const int one = folders.source_of(name);
    for (const auto& [owner, files] : folders.files) {
      const auto found = files.find(name);
      if (found != files.end() && found->second.xxh3 != folders.files.at(one).at(name).xxh3) {
        const auto text = [&](int rank) {
          const auto r = static_cast<size_t>(rank);
          return paths[r] + " on " + host_of(rank, folders.host[r]) + " (" +
                 folders.files.at(rank).at(name).xxh3 + ")";
        };
        return "the hosts' folders are of different saves: " + name + " differs between " +
               text(one) + " and " + text(owner);
      }
    }
  }
  return {};
}

/// Throws InputError if a file that some rank must read is in no folder.
void require_rank_files(const SavedFolders& folders) {
  const nlohmann::json state = read_state_json(folders.folder);
  const auto far = [&](int rank) { return folders.source_of(rank_file_name(rank)) >= 0 ? 0 : 1; };
  const int world = static_cast<int>(folders.owner.size());
  for (int rank = 0; rank < world; ++rank) {
    for (const int file : rank_files_read(state, rank, world, {}, far)) {
      if (far(file) == 0) {
        continue;
      }
      std::string without;
      for (const auto& [owner, files] : folders.files) {
        without += !files.empty()
                       ? ""
                       : "; " + host_of(owner, folders.host[static_cast<size_t>(owner)]) +
                             " has no " + folders.folder.filename().string();
      }
      throw InputError(kLoadWhere,
                       "no host has " + rank_file_name(file) + ", the file of rank " +
                           std::to_string(file) + without,
                       "the folders of all hosts that saved",
                       "bring that host back, copy its folder to another host, or use an earlier "
                       "save");
    }
  }
}

SavedFolders look_at_folders(Communicator& c, const char* where, const fs::path& folder,
                             const std::function<void()>& check) {
  SavedFolders folders{.folder = folder};
  const int first = ranks_of_host(c).front();
  const auto seen = on_every_rank(c, where, [&] {
    nlohmann::json mine = {{"host", host_name()}, {"first", first}, {"path", folder.string()}};
    std::error_code error;
    if (c.rank() != first || !fs::is_directory(folder, error)) {
      return mine;
    }
    try {
      mine["files"] = read_manifest(folder);
      struct stat file {};
      ::stat((folder / kManifestFile).c_str(), &file);
      // The same on all hosts that share the folder.
      mine["key"] = {file.st_ino, file.st_mtim.tv_sec, file.st_mtim.tv_nsec};
    } catch (const InputError& failure) {
      mine["fault"] = failure.what();
    }
    return mine;
  });
  std::map<nlohmann::json, int> owners;
  std::vector<std::string> paths;
  const auto blame = [&](size_t rank, const nlohmann::json& said) {
    if (said.contains("fault") && folders.fault.empty()) {
      folders.fault = host_of(static_cast<int>(rank), folders.host[rank]) + ": " +
                      said.at("fault").get<std::string>();
    }
  };
  for (size_t rank = 0; rank < seen.size(); ++rank) {
    const auto& of_host = seen[seen[rank].at("first").get<size_t>()];
    const int host_first = seen[rank].at("first").get<int>();
    const int owner = of_host.contains("key")
                          ? owners.emplace(of_host.at("key"), host_first).first->second
                          : host_first;
    folders.owner.push_back(owner);
    folders.host.push_back(seen[rank].at("host").get<std::string>());
    paths.push_back(seen[rank].at("path").get<std::string>());
    folders.files[owner] =
        seen[static_cast<size_t>(owner)].value("files", nlohmann::json::object()).get<Files>();
    blame(rank, seen[rank]);
  }
  if (folders.files.size() == 1 || !folders.fault.empty()) {
    return folders; // all ranks see one
  }
  if (owners.empty()) {
    folders.fault = folder.string() + " is not a folder on any host";
    return folders;
  }
  folders.fault = difference(folders, paths);
  if (!folders.fault.empty()) {
    return folders;
  }
  const auto checked = on_every_rank(c, where, [&] {
    const auto mine = folders.files.find(c.rank());
    try {
      if (mine != folders.files.end() && !mine->second.empty()) {
        check();
        require_rank_files(folders);
      }
    } catch (const InputError& failure) {
      return nlohmann::json{{"fault", failure.what()}};
    }
    return nlohmann::json::object();
  });
  for (size_t rank = 0; rank < checked.size(); ++rank) {
    blame(rank, checked[rank]);
  }
  return folders;
}

/// Puts files into the folders that lack them: owners, by file. Collective.
void fetch(Communicator& c, const char* where, SavedFolders& folders,
           const std::map<std::string, std::set<int>>& lacking) {
  std::vector<Transfer> list;
  bool gets = false;
  for (const auto& [name, owners] : lacking) {
    const int from = folders.source_of(name);
    list.push_back({name, folders.files.at(from).at(name), from, {owners.begin(), owners.end()}});
    gets = gets || owners.contains(c.rank());
  }
  if (list.empty()) {
    return;
  }
  std::unique_ptr<FolderCommit> commit;
  on_every_rank(c, where, [&] {
    if (!gets) {
      return nlohmann::json();
    }
    const auto& here = folders.files.at(c.rank());
    commit = std::make_unique<FolderCommit>(
        folders.folder, here.empty() ? CommitMode::create : CommitMode::replace);
    for (const auto& [name, entry] : here) {
      std::error_code error;
      fs::create_directories((commit->folder() / name).parent_path());
      fs::create_hard_link(folders.folder / name, commit->folder() / name, error);
      if (error) {
        fs::copy_file(folders.folder / name, commit->folder() / name);
      }
      commit->set_entry(name, entry);
    }
    return nlohmann::json();
  });
  on_every_rank(c, where, [&] {
    transfer_files(c, list, folders.folder, commit.get());
    if (commit) {
      commit->commit();
    }
    return nlohmann::json();
  });
  for (const Transfer& done : list) {
    for (const int owner : done.to) {
      folders.files[owner].emplace(done.name, done.entry);
    }
  }
}

void complete_folders(Communicator& c, const char* where, SavedFolders& folders,
                      const HeldRowsByName* held) {
  if (!folders.fault.empty()) {
    on_every_rank(c, where, [&] {
      if (c.rank() == 0) {
        throw InputError(where, folders.fault);
      }
      return nlohmann::json();
    });
  }
  if (folders.files.size() == 1) {
    return;
  }
  std::map<std::string, std::set<int>> lacking;
  for (const std::string& name : folders.shared_files()) {
    for (const auto& [owner, files] : folders.files) {
      if (!files.contains(name)) {
        lacking[name].insert(owner);
      }
    }
  }
  fetch(c, where, folders, lacking);
  if (held == nullptr) {
    return;
  }
  const int owner = folders.owner[static_cast<size_t>(c.rank())];
  const auto reads = on_every_rank(c, where, [&] {
    return nlohmann::json(rank_files_read(
        read_state_json(folders.folder), c.rank(), c.world_size(), *held, [&](int rank) {
          const int source = folders.source_of(rank_file_name(rank));
          return source < 0 ? 2 : folders.files.at(owner).contains(rank_file_name(rank)) ? 0 : 1;
        }));
  });
  lacking.clear();
  for (size_t rank = 0; rank < reads.size(); ++rank) {
    for (const int file : reads[rank].get<std::set<int>>()) {
      if (!folders.files.at(folders.owner[rank]).contains(rank_file_name(file))) {
        lacking[rank_file_name(file)].insert(folders.owner[rank]);
      }
    }
  }
  fetch(c, where, folders, lacking);
}

} // namespace detail

} // namespace hasten
