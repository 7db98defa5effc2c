// The world a process is part of, read from the variables that its launcher set
// (torchrun, hasten launch, Open MPI, MPICH and Intel MPI, Slurm) or, where there
// are none, alone.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

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
  /// TCP port of the store, 1 … 65535; 0 in a world of one. On one host the name of its
  /// Unix socket follows from it, and nobody listens at the port.
  int master_port = 0;
  /// True where the launcher's own agent already serves a store on master_port
  /// (TORCHELASTIC_USE_AGENT_STORE): then rank 0 is a client too.
  bool agent_store = false;
  /// A file that every rank sees and that nobody else uses: rank 0 chooses a port by
  /// itself and writes into it where it listens, and master_addr and master_port are
  /// not looked at. It is removed once all have met; one that a killed run left
  /// behind does no harm. Empty: the address and port above.
  std::string store_file{};
  /// Cores the launcher gave this rank for itself (SLURM_CPUS_PER_TASK); 0 where
  /// the ranks of a host share what they may use.
  int cpus_per_task = 0;
  /// Whose variables this was read from: "torchrun" (hasten launch and Kubeflow
  /// set the same), "Open MPI", "PMI", "Slurm", or "alone".
  std::string source = "alone";
  /// Other launchers' variables that were there too and were not used:
  /// "Slurm's"; empty where there were none.
  std::string passed_over{};

  bool is_main() const { return rank == 0; }
};

/// Reads who this process is. The first family of variables that is complete is
/// used alone; the others are passed over, whatever they say:
///
///   torchrun  RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; LOCAL_RANK and
///             LOCAL_WORLD_SIZE come together or default to 0 and 1 (Kubeflow)
///   Open MPI  OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
///   PMI       PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS (MPICH and
///             Intel MPI)
///   Slurm     SLURM_STEP_NUM_TASKS, _STEP_NODELIST, _STEP_TASKS_PER_NODE, _PROCID,
///             _LOCALID, _NODEID, _JOB_ID: what srun sets in a step
///   PMI       PMI_RANK, PMI_SIZE, PMI_LOCAL_RANK, PMI_LOCAL_SIZE
///
/// mpirun comes before Slurm since inside a job it starts its own helpers by srun,
/// whose step its ranks see. Without SLURM_STEP_NUM_TASKS Slurm says nothing:
/// sbatch and salloc set SLURM_NTASKS for what is not started yet. Nor does it in
/// the terminal of srun --pty with several tasks, where a shell is one of them.
///
/// Where the store is: torchrun says it. Ranks of one host meet on 127.0.0.1. In
/// Slurm's step the first host of its node list is the master. MASTER_ADDR, where
/// it is set, says another one, and must be set for mpirun over several hosts;
/// MASTER_PORT says another port than the one that follows from the job. Where
/// MASTER_PORT is not set, HASTEN_STORE_FILE names World::store_file, and neither
/// address nor port is needed: RANK and WORLD_SIZE with it are a whole world.
///
/// An empty variable counts as not set; with none set this is a world of one. So
/// it is with MASTER_ADDR and MASTER_PORT alone in a job of Slurm's without a step.
/// HASTEN_STORE_SOCKET, which hasten launch sets, is the Unix socket at which it serves
/// the store of the world that has this MASTER_PORT; without it rank 0 does, on one host
/// at a Unix socket too.
/// Local. Throws InputError where variables are set and no family is complete,
/// naming what each lacks, and where those of the family used contradict each
/// other, naming all that do.
World world_from_environment();

/// "world of 4 ranks by Slurm, 2 on this host, master at node1:15042; torchrun's
/// variables are passed over". For the log.
std::string describe(const World& world);

/// Cores this process may use: the affinity mask, or less where a cgroup (v1 or
/// v2, this one or any above it) has a quota; its fraction of a core is dropped,
/// because a thread more than the quota is throttled. ≥ 1.
int allowed_cores();

/// Threads one of `local_world_size` ranks should use: OMP_NUM_THREADS if it
/// is set (its first number, ≥ 1, else InputError), else
/// allowed_cores() / local_world_size, ≥ 1.
int threads_per_rank(int local_world_size);
/// The same for a rank of `world`, whose cpus_per_task counts where it is set.
int threads_per_rank(const World& world);

/// What to warn of where `local_world_size` ranks of `threads` threads are more
/// than the cores this process may use; empty where they are not.
std::string oversubscription(int local_world_size, int threads);

namespace detail {

/// The least cgroup quota in cores, infinity where there is none. Reads
/// proc/self/cgroup, proc/self/mountinfo and the mounts they name below `root`.
double cgroup_cores(const std::filesystem::path& root);

/// The hosts of Slurm's short form, in order: "n[08-10,12],login" is n08, n09, n10,
/// n12, login. Empty where `text` is not in that form, or names over 65536.
std::vector<std::string> expand_host_list(const std::string& text);
/// Tasks on each host of Slurm's short form: "2(x3),1" is 2, 2, 2, 1. Empty where
/// `text` is not in that form.
std::vector<int> expand_task_counts(const std::string& text);

} // namespace detail

} // namespace hasten
