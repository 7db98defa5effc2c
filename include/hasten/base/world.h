// The world a process is part of, read from torchrun's environment variables
// or, where none is set, alone.
#pragma once

#include <filesystem>
#include <string>

namespace hasten {

/// Who this process is among its peers.
struct World {
  /// 0 … world_size - 1, unique over all hosts.
  int rank = 0;
  /// Processes altogether, ≥ 1.
  int world_size = 1;
  /// 0 … local_world_size - 1, unique on this host.
  int local_rank = 0;
  /// Processes on this host, ≥ 1.
  int local_world_size = 1;
  /// Where rank 0's store listens.
  std::string master_addr = "127.0.0.1";
  /// TCP port of the store, 1 … 65535; 0 in a world of one.
  int master_port = 0;
  /// A descriptor that already listens on master_port, handed down by the
  /// launcher to rank 0 (HASTEN_LISTEN_FD); -1 where rank 0 binds by itself.
  int listen_fd = -1;
  /// True where the launcher's own agent already serves a store on master_port
  /// (TORCHELASTIC_USE_AGENT_STORE): then rank 0 is a client too.
  bool agent_store = false;
  /// Which environment this was read from, for the log: "torchrun" or "alone".
  std::string source = "alone";

  bool is_main() const { return rank == 0; }
};

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
/// MASTER_PORT (torchrun's contract); an empty variable counts as not set. None
/// set: a world of one. Any set: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
/// must be. LOCAL_RANK and LOCAL_WORLD_SIZE come together or default to 0 and 1
/// (Kubeflow).
/// HASTEN_LISTEN_FD is used where it is a socket that listens on MASTER_PORT, and
/// made close-on-exec; otherwise (a wrapper program closed it) it is passed over.
/// Local. Throws InputError that names every variable missing or contradictory.
World world_from_environment();

/// Cores this process may use: the affinity mask, or less where a cgroup (v1 or
/// v2, this one or any above it) has a quota; its fraction of a core is dropped,
/// because a thread more than the quota is throttled. ≥ 1.
int allowed_cores();

/// Threads one of `local_world_size` ranks should use: OMP_NUM_THREADS if it
/// is set (its first number, ≥ 1, else InputError), else
/// allowed_cores() / local_world_size, ≥ 1.
int threads_per_rank(int local_world_size);

namespace detail {

/// The least cgroup quota in cores, infinity where there is none. Reads
/// proc/self/cgroup, proc/self/mountinfo and the mounts they name below `root`.
double cgroup_cores(const std::filesystem::path& root);

} // namespace detail

} // namespace hasten
