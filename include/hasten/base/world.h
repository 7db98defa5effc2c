// The world that a process belongs to. It is read from the variables of the launcher (torchrun,
// hasten launch, Open MPI, MPICH and Intel MPI, Slurm). Without them the process is alone.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace hasten {

/// Maximum number of processes of a world (WORLD_SIZE and similar variables, --nproc).
inline constexpr int kMaxWorldSize = 65'536;

/// Rank and world size of this process, and where the ranks meet.
struct World {
  /// 0 … world_size - 1, unique among all hosts.
  int rank = 0;
  /// Number of processes, ≥ 1.
  int world_size = 1;
  /// 0 … local_world_size - 1, unique on this host.
  int local_rank = 0;
  /// Number of processes on this host, ≥ 1.
  int local_world_size = 1;
  /// Host on which rank 0's store listens.
  std::string master_addr = "127.0.0.1";
  /// TCP port of the store, 1 … 65535; 0 in a world of one. If all ranks are on one host, the port
  /// only determines the name of a Unix socket, and nothing listens at the port.
  int master_port = 0;
  /// True if the launcher's agent serves a store at master_port (TORCHELASTIC_USE_AGENT_STORE).
  /// Rank 0 is then a client, too.
  bool agent_store = false;
  /// A file that every rank can access and no other run uses. Rank 0 chooses a port and writes
  /// its address into the file; master_addr and master_port are ignored. The file is removed
  /// once all ranks have met. A file that a killed run left does no harm. Empty: use
  /// master_addr and master_port.
  std::string store_file{};
  /// Cores that the launcher reserved for this rank (SLURM_CPUS_PER_TASK). 0 if the ranks of
  /// a host share the cores.
  int cpus_per_task = 0;
  /// The launcher whose variables were used: "hasten launch", "torchrun" (Kubeflow sets the same),
  /// "Open MPI", "PMI", "Slurm", or "alone".
  std::string source = "alone";
  /// Other launchers whose variables were set but not used, for example "Slurm's". Empty if
  /// there were none.
  std::string passed_over{};

  bool is_main() const { return rank == 0; }
};

/// Reads the world from the environment. Uses the first launcher of this list whose variables are
/// all set, and ignores the others:
///
///   torchrun  RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; LOCAL_RANK and
///             LOCAL_WORLD_SIZE come together or default to 0 and 1 (Kubeflow)
///   Open MPI  OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
///   PMI       PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS (MPICH and
///             Intel MPI)
///   Slurm     SLURM_STEP_NUM_TASKS, _STEP_NODELIST, _STEP_TASKS_PER_NODE, _PROCID,
///             _LOCALID, _NODEID, _JOB_ID: srun sets them in a step
///   PMI       PMI_RANK, PMI_SIZE, PMI_LOCAL_RANK, PMI_LOCAL_SIZE
///
/// mpirun comes before Slurm because in a job it starts helpers by srun, and its ranks see the
/// helpers' step. Slurm is not used without SLURM_STEP_NUM_TASKS: sbatch and salloc set
/// SLURM_NTASKS before anything is started. It is also not used in the terminal of srun --pty
/// with several tasks, where a shell is one of the tasks.
///
/// Address of the store: torchrun sets it. Ranks of one host meet at 127.0.0.1. In a Slurm step
/// the first host of the node list is the master. MASTER_ADDR overrides these; mpirun on several
/// hosts needs it. MASTER_PORT overrides the port that is derived from the job. If MASTER_PORT is
/// not set, HASTEN_STORE_FILE sets World::store_file, and address and port are not needed: RANK,
/// WORLD_SIZE and this file are complete.
///
/// An empty variable counts as not set. Without any of these variables, or with only MASTER_ADDR
/// and MASTER_PORT in a Slurm job outside a step, the world has one rank.
/// hasten launch serves the store of the world with this MASTER_PORT at the Unix socket
/// HASTEN_STORE_SOCKET. Otherwise rank 0 serves it; on one host at a Unix socket, too.
/// Local. Throws InputError if variables are set but no launcher's are complete (it names what is
/// missing for each), and if the variables of the launcher that is used contradict each other (it
/// names all that do).
World world_from_environment();

/// A description for the log: "world of 4 ranks by Slurm, 2 on this host, master at node1:15042;
/// torchrun's variables are ignored".
std::string describe(const World& world);

/// Number of cores that this process may use: those of its affinity mask, or the cgroup quota (v1
/// or v2, of its group or any group above) if that is less. The quota is rounded down, because
/// one thread more than the quota is throttled. ≥ 1.
int allowed_cores();

/// Number of threads for one of `local_world_size` ranks: the first number of OMP_NUM_THREADS if
/// it is set (InputError unless ≥ 1), else allowed_cores() / local_world_size, ≥ 1.
int threads_per_rank(int local_world_size);
/// The same for a rank of `world`. Uses cpus_per_task if it is set.
int threads_per_rank(const World& world);

/// A warning if `local_world_size` ranks of `threads` threads are more than the cores that this
/// process may use; else empty.
std::string oversubscription(int local_world_size, int threads);

namespace detail {

/// The smallest cgroup quota in cores, infinity if there is none. Reads proc/self/cgroup,
/// proc/self/mountinfo and the mounts that they name, all below `root`.
double cgroup_cores(const std::filesystem::path& root);

/// The hosts of Slurm's short form, in order: "n[08-10,12],login" is n08, n09, n10, n12, login.
/// Empty if `text` has another form or names more than 65536 hosts.
std::vector<std::string> expand_host_list(const std::string& text);
/// Number of tasks on each host, from Slurm's short form: "2(x3),1" is 2, 2, 2, 1. Empty if
/// `text` has another form.
std::vector<int> expand_task_counts(const std::string& text);

} // namespace detail

} // namespace hasten
