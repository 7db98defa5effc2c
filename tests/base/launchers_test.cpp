// The environments that launchers set, and the worlds that are read from them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <sstream>

#include "hasten/base/error.h"
#include "hasten/base/world.h"
#include "support/environment.h"

namespace hasten {

using testing_support::EnvironmentValues;
using testing_support::ScopedEnvironment;

// Sets "NAME=value NAME=value …" and no other variable of a launcher.
static EnvironmentValues launcher_variables(const std::string& text) {
  EnvironmentValues values = testing_support::without_launchers();
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    values.emplace_back(word.substr(0, equals), word.substr(equals + 1));
  }
  return values;
}

// The variables that sbatch and salloc set for two hosts and eight tasks; then those of srun.
static const std::string kSlurmJob =
    "SLURM_JOB_ID=1234567 SLURM_JOBID=1234567 SLURM_JOB_NAME=train "
    "SLURM_JOB_NODELIST=gpu[08-09] SLURM_NODELIST=gpu[08-09] SLURM_NNODES=2 "
    "SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=8 SLURM_NPROCS=8 "
    "SLURM_NTASKS_PER_NODE=4 SLURM_TASKS_PER_NODE=4(x2) "
    "SLURM_JOB_CPUS_PER_NODE=16(x2) SLURM_CPUS_ON_NODE=16 ";
static const std::string kSlurmBatch =
    kSlurmJob +
    "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_GTIDS=0 "
    "SLURM_TASK_PID=812 SLURMD_NODENAME=gpu08 ";
static const std::string kSlurmTask5 =
    kSlurmJob +
    "SLURM_STEP_ID=0 SLURM_STEPID=0 SLURM_STEP_NODELIST=gpu[08-09] "
    "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=8 "
    "SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_PROCID=5 SLURM_LOCALID=1 "
    "SLURM_NODEID=1 SLURM_GTIDS=4,5,6,7 SLURM_LAUNCH_NODE_IPADDR=10.0.0.8 ";
static const std::string kSlurmPty =
    "SLURM_JOB_ID=1808417 SLURM_JOB_NAME=bash SLURM_NODELIST=gpu08 "
    "SLURM_TASKS_PER_NODE=8 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 "
    "SLURM_PTY_PORT=39933 SLURM_PTY_WIN_COL=209 SLURM_PTY_WIN_ROW=43 "
    "SLURM_STEP_NODELIST=gpu08 SLURM_STEP_NUM_NODES=1 ";
static const std::string kOpenMpi =
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1 "
    "OMPI_UNIVERSE_SIZE=2 OMPI_MCA_ess_base_jobid=1941307393 PMIX_RANK=1 "
    "PMIX_NAMESPACE=1941307393 ";
static const std::string kTorchrun =
    "RANK=3 WORLD_SIZE=8 LOCAL_RANK=3 LOCAL_WORLD_SIZE=4 GROUP_RANK=0 "
    "GROUP_WORLD_SIZE=2 ROLE_RANK=3 ROLE_WORLD_SIZE=8 MASTER_ADDR=gpu08 "
    "MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True ";

struct LauncherCase {
  const char* name;
  std::string variables;
  /// "launcher rank/world_size local_rank/local_world_size master". A port "*" is derived from
  /// the job.
  const char* world;
  const char* passed_over;
};

static const char* kAlone = "alone 0/1 0/1 127.0.0.1:0";
static const char* kTask5 = "Slurm 5/8 1/4 gpu08:19567";
static const char* kRank3 = "torchrun 3/8 3/4 gpu08:29500";
static const char* kOnThisHost = "Open MPI 1/2 1/2 127.0.0.1:*";

static const LauncherCase kLauncherCases[] = {
    {"sbatch's script", kSlurmBatch, kAlone, ""},
    {"sbatch's script that prepares its steps", kSlurmBatch + "MASTER_ADDR=gpu08 MASTER_PORT=29500",
     kAlone, ""},
    {"salloc's shell", kSlurmJob, kAlone, ""},
    {"salloc's shell as an interactive step",
     kSlurmPty + "SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1",
     "Slurm 0/1 0/1 127.0.0.1:23417", ""},
    {"srun --pty bash",
     kSlurmPty + "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1",
     "Slurm 0/1 0/1 127.0.0.1:23417", ""},
    {"srun", kSlurmTask5, kTask5, ""},
    {"srun --mpi=pmi2", kSlurmTask5 + "PMI_RANK=5 PMI_SIZE=8 PMI_FD=12 PMI_JOBID=1234567.0", kTask5,
     "PMI's"},
    {"srun where PMI knows its place on the host",
     kSlurmTask5 + "PMI_RANK=5 PMI_SIZE=8 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=4", kTask5, "PMI's"},
    {"srun with a master that the script chose",
     kSlurmTask5 + "MASTER_ADDR=gpu08-ib MASTER_PORT=6000", "Slurm 5/8 1/4 gpu08-ib:6000", ""},
    {"srun with ranks that the script exported by mistake", kSlurmTask5 + "RANK=0 WORLD_SIZE=8",
     kTask5, "torchrun's"},
    {"srun's second step on one host of a larger job",
     kSlurmJob + "SLURM_STEP_ID=1 SLURM_STEP_NODELIST=gpu09 SLURM_STEP_NUM_TASKS=2 "
                 "SLURM_STEP_TASKS_PER_NODE=2 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0",
     "Slurm 1/2 1/2 127.0.0.1:20576", ""},
    {"srun with more tasks on the first host",
     kSlurmJob + "SLURM_STEP_ID=0 SLURM_STEP_NODELIST=gpu[08-09],fat "
                 "SLURM_STEP_NUM_TASKS=7 SLURM_STEP_TASKS_PER_NODE=3(x2),1 "
                 "SLURM_PROCID=6 SLURM_LOCALID=0 SLURM_NODEID=2",
     "Slurm 6/7 0/1 gpu08:19567", ""},
    {"torchrun", kTorchrun, kRank3, ""},
    {"hasten launch of one process",
     "RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=6000 HASTEN_LAUNCHER=1",
     "hasten launch 0/1 0/1 127.0.0.1:6000", ""},
    {"torchrun, one agent a host by srun",
     kSlurmJob + kTorchrun +
         "SLURM_STEP_ID=0 SLURM_STEP_NODELIST=gpu[08-09] "
         "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) "
         "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0",
     kRank3, "Slurm's"},
    {"torchrun in sbatch's script", kSlurmBatch + kTorchrun, kRank3, ""},
    {"Kubeflow", "RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456",
     "torchrun 1/2 0/1 job-master-0:23456", ""},
    {"mpirun of Open MPI", kOpenMpi, kOnThisHost, ""},
    {"mpirun of Open MPI with a port", kOpenMpi + "MASTER_PORT=6000",
     "Open MPI 1/2 1/2 127.0.0.1:6000", ""},
    {"mpirun over two hosts",
     "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 "
     "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
     "MASTER_ADDR=gpu08 MASTER_PORT=6000",
     "Open MPI 3/4 1/2 gpu08:6000", ""},
    {"mpirun in salloc's shell", kSlurmJob + kOpenMpi, kOnThisHost, ""},
    {"mpirun in srun's shell",
     kSlurmPty + kOpenMpi + "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1",
     kOnThisHost, "Slurm's"},
    {"mpiexec of MPICH",
     "PMI_RANK=1 PMI_SIZE=3 PMI_FD=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=3 HYDI_CONTROL_FD=7",
     "PMI 1/3 1/3 127.0.0.1:*", ""},
    {"PMI without Slurm or Hydra", "PMI_RANK=1 PMI_SIZE=3 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=3",
     "PMI 1/3 1/3 127.0.0.1:*", ""},
};

TEST(Launchers, RealEnvironmentsGiveTheWorldThatTheirLauncherMeant) {
  for (const LauncherCase& c : kLauncherCases) {
    SCOPED_TRACE(c.name);
    const ScopedEnvironment environment(launcher_variables(c.variables));
    const World world = world_from_environment();
    std::string port = std::to_string(world.master_port);
    if (std::string(c.world).back() == '*') {
      EXPECT_GE(world.master_port, 15000);
      EXPECT_LT(world.master_port, 25000);
      EXPECT_EQ(world.master_port, world_from_environment().master_port);
      port = "*";
    }
    EXPECT_EQ(world.source + " " + std::to_string(world.rank) + "/" +
                  std::to_string(world.world_size) + " " + std::to_string(world.local_rank) + "/" +
                  std::to_string(world.local_world_size) + " " + world.master_addr + ":" + port,
              c.world);
    EXPECT_EQ(world.passed_over, c.passed_over);
  }
}

static std::string launcher_error(const std::string& variables) {
  const ScopedEnvironment environment(launcher_variables(variables));
  try {
    return "no error: " + describe(world_from_environment());
  } catch (const InputError& error) {
    return error.what();
  }
}

TEST(Launchers, HalfOfTwoFamiliesIsRefusedNamingWhatEachLacks) {
  const std::string text =
      launcher_error(kSlurmJob + "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 RANK=1 WORLD_SIZE=2");
  for (const char* part : {"torchrun: MASTER_ADDR is not set, MASTER_PORT is not set; Slurm: ",
                           "SLURM_LOCALID is not set", "SLURM_STEP_NODELIST is not set",
                           "all variables of one launcher"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
  EXPECT_EQ(text.find("SLURM_PROCID is"), std::string::npos) << text;
}

TEST(Launchers, ContradictionsInsideTheFamilyAreNamed) {
  const std::string step = kSlurmJob + "SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0 ";
  const std::pair<std::string, const char*> cases[] = {
      {step + "SLURM_STEP_NODELIST=a SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_NUM_TASKS=1",
       "SLURM_PROCID=1 with SLURM_STEP_NUM_TASKS=1"},
      {step + "SLURM_STEP_NODELIST=a[1-2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NUM_TASKS=2",
       "SLURM_STEP_NODELIST=a[1-2 is not a list of hosts"},
      {step + "SLURM_STEP_NODELIST=a[1-2] SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NUM_TASKS=2",
       "SLURM_STEP_TASKS_PER_NODE=2 with SLURM_STEP_NODELIST=a[1-2] and"},
      {step + "SLURM_STEP_NODELIST=a[1-2] SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_STEP_NUM_TASKS=2",
       "SLURM_LOCALID=1 with SLURM_STEP_TASKS_PER_NODE=1(x2)"},
      {"OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=2 "
       "OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2",
       "OMPI_COMM_WORLD_RANK=2 with OMPI_COMM_WORLD_SIZE=2"},
      {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 "
       "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
       "mpirun -x MASTER_ADDR="},
      {"PMI_RANK=1 PMI_SIZE=2", "MPI_LOCALNRANKS is not set"},
  };
  for (const auto& [variables, part] : cases) {
    const std::string text = launcher_error(variables);
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

TEST(Launchers, AShellOfSrunPtyIsAloneEvenAsOneOfSeveralTasks) {
  const ScopedEnvironment environment(launcher_variables(
      kSlurmPty + "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=4"));
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  ASSERT_GE(terminal, 0);
  const int saved = ::dup(STDIN_FILENO);
  const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ::dup2(terminal, STDIN_FILENO);
  EXPECT_EQ(world_from_environment().world_size, 1);
  // srun in the shell of salloc inherits the shell's variables. Its tasks have no terminal.
  ::dup2(nothing, STDIN_FILENO);
  EXPECT_EQ(world_from_environment().world_size, 4);
  ::dup2(saved, STDIN_FILENO);
  for (const int fd : {terminal, saved, nothing}) {
    ::close(fd);
  }
}

TEST(Launchers, WhoseWorldItIsCanBeSaid) {
  const ScopedEnvironment environment(launcher_variables(kSlurmTask5 + "RANK=0 WORLD_SIZE=8"));
  EXPECT_EQ(describe(world_from_environment()),
            "world of 8 ranks by Slurm, 4 on this host, master at gpu08:19567; "
            "torchrun's variables are ignored");
}

TEST(Launchers, SlurmsShortListsAreExpanded) {
  using Hosts = std::vector<std::string>;
  EXPECT_EQ(detail::expand_host_list("login"), Hosts{"login"});
  EXPECT_EQ(detail::expand_host_list("n[08-10,12],x7,r[1-2]s[0-1]-ib"),
            (Hosts{"n08", "n09", "n10", "n12", "x7", "r1s0-ib", "r1s1-ib", "r2s0-ib", "r2s1-ib"}));
  EXPECT_EQ(detail::expand_host_list("n[9-10]"), (Hosts{"n9", "n10"}));
  for (const char* bad : {"", "n[", "n[1", "n[2-1]", "n[a]", "n[]", "a,,b", "n[0-99999999]"}) {
    EXPECT_EQ(detail::expand_host_list(bad), Hosts{}) << bad;
  }
  using Counts = std::vector<int>;
  EXPECT_EQ(detail::expand_task_counts("2(x3),1"), (Counts{2, 2, 2, 1}));
  for (const char* bad : {"", "2(x", "2(x0)", "x", "2,,1", "1(x99999999)"}) {
    EXPECT_EQ(detail::expand_task_counts(bad), Counts{}) << bad;
  }
}

} // namespace hasten
