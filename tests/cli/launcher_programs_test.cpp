// hasten in worlds that other launchers start, and the output of ranks that it starts itself. The
// tests run mpirun and torchrun if they are installed.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "cli/small_reviews.h"

namespace hasten {

using testing_support::ProgramOptions;
using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::small_reviews;
using testing_support::TemporaryFolder;
using testing_support::train_arguments;

namespace detail {

using Words = std::vector<std::string>;

/// The first of `names` in PATH; empty: none.
std::string installed(const Words& names) {
  const char* variable = std::getenv("PATH");
  for (const std::string& name : names) {
    std::istringstream path(variable == nullptr ? "" : variable);
    for (std::string folder; std::getline(path, folder, ':');) {
      const std::string program = folder + "/" + name;
      if (::access(program.c_str(), X_OK) == 0) {
        return program;
      }
    }
  }
  return {};
}

Words with(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

/// A training of 24 rows into folder/out. `hasten` is given by its path.
Words training_with(const TemporaryFolder& folder, const Words& flags) {
  write_file_atomically(folder / "train.csv", small_reviews(24));
  Words words = train_arguments(folder.path(), flags);
  const auto bin = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  words[0] = (bin / "hasten").string();
  return words;
}

Words short_training(const TemporaryFolder& folder, const Words& more = {}) {
  return training_with(
      folder, with({"--max-steps", "3", "--batch-size", "4", "--save-strategy", "no"}, more));
}

std::string weights(const TemporaryFolder& folder) {
  return read_file(folder / "out/model.safetensors");
}

/// The weights after the same training with two processes that hasten starts.
const std::string& weights_of_two_ranks() {
  static const std::string bytes = [] {
    const TemporaryFolder folder;
    const ProgramRun run = run_program(short_training(folder, {"--nproc", "2"}));
    EXPECT_EQ(run.code, 0) << run.error;
    return weights(folder);
  }();
  return bytes;
}

/// Expects that the two ranks that `launcher` starts form one world.
void expect_members(const Words& launcher, const std::string& source,
                    const ProgramOptions& options = {}) {
  const TemporaryFolder folder;
  const ProgramRun run = run_program(with(launcher, short_training(folder)), options);
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_TRUE(run.said("world of 2 ranks by " + source)) << run.error;
  // Only rank 0 prints, and no process has started further ranks.
  EXPECT_EQ(run.out.find("epoch"), run.out.rfind("epoch")) << run.out;
  EXPECT_TRUE(weights(folder) == weights_of_two_ranks());
}

/// Options for an mpirun that rejects root and more ranks than cores.
ProgramOptions for_mpirun() {
  ProgramOptions options;
  options.environment = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                         {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                         {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
                         {"PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"}};
  return options;
}

/// Two processes with the variables that srun sets for a step of two tasks.
const char* kSlurmStep =
    "run() { n=$1; shift; SLURM_JOB_ID=$$ SLURM_STEP_ID=0 "
    "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=node7 "
    "SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0 SLURM_PROCID=$n "
    "SLURM_LOCALID=$n SLURM_NTASKS=2 \"$@\"; }; run 1 \"$@\" & run 0 \"$@\" && wait $!";

} // namespace detail

TEST(LauncherPrograms, TasksOfASlurmStepTrainAsHastensOwnRanksDo) {
  detail::expect_members({"/bin/sh", "-c", detail::kSlurmStep, "sh"}, "Slurm");
}

TEST(LauncherPrograms, RanksOfOpenMpisMpirunTrainAsHastensOwnRanksDo) {
  const std::string mpirun = detail::installed({"mpirun.openmpi", "mpirun"});
  if (mpirun.empty() ||
      run_program({mpirun, "--version"}, detail::for_mpirun()).out.find("Open MPI") ==
          std::string::npos) {
    GTEST_SKIP() << "no mpirun of Open MPI in PATH (Debian: openmpi-bin)";
  }
  detail::expect_members({mpirun, "-np", "2"}, "Open MPI", detail::for_mpirun());
}

TEST(LauncherPrograms, RanksOfMpichsMpiexecTrainAsHastensOwnRanksDo) {
  const std::string mpiexec = detail::installed({"mpiexec.hydra"});
  if (mpiexec.empty()) {
    GTEST_SKIP() << "no mpiexec.hydra in PATH (Debian: mpich)";
  }
  detail::expect_members({mpiexec, "-np", "2"}, "PMI");
}

TEST(LauncherPrograms, RanksOfTorchrunTrainAsHastensOwnRanksDo) {
  const std::string torchrun = detail::installed({"torchrun"});
  if (torchrun.empty()) {
    GTEST_SKIP() << "no torchrun in PATH (pip: torch)";
  }
  detail::expect_members({torchrun, "--standalone", "--nproc-per-node", "2", "--no-python"},
                         "torchrun");
}

TEST(LauncherPrograms, TorchrunShowsWhatTheRankThatFailedRecorded) {
  const std::string torchrun = detail::installed({"torchrun"});
  if (torchrun.empty()) {
    GTEST_SKIP() << "no torchrun in PATH (pip: torch)";
  }
  const TemporaryFolder folder;
  auto training = detail::short_training(folder);
  write_file_atomically(folder / "train.csv", "text,label\ngood,pos\nbad\n");
  const ProgramRun run = run_program(
      detail::with({torchrun, "--standalone", "--nproc-per-node", "2", "--no-python"}, training));
  EXPECT_NE(run.code, 0);
  const size_t summary = run.error.find("Root Cause");
  ASSERT_NE(summary, std::string::npos) << run.error;
  EXPECT_NE(run.error.find("train.csv:3", summary), std::string::npos) << run.error;
}

TEST(LauncherPrograms, HalfSlurmAndHalfTorchrunIsRefusedBeforeAnythingStarts) {
  const TemporaryFolder folder;
  for (const char* nproc : {"1", "2"}) {
    const ProgramRun run = run_program(detail::short_training(folder, {"--nproc", nproc}),
                                       {.environment = {{"RANK", "0"},
                                                        {"WORLD_SIZE", "2"},
                                                        {"SLURM_STEP_NUM_TASKS", "2"},
                                                        {"SLURM_PROCID", "0"}}});
    EXPECT_EQ(run.code, 2);
    EXPECT_TRUE(run.said("torchrun: MASTER_ADDR is not set")) << run.error;
    EXPECT_TRUE(run.said("Slurm: SLURM_LOCALID is not set")) << run.error;
    EXPECT_EQ(std::count(run.error.begin(), run.error.end(), '\n'), 1);
    EXPECT_FALSE(std::filesystem::exists(folder / "out"));
  }
}

TEST(LauncherPrograms, OutputFlagsInsideAWorldBelongToItsLauncher) {
  const TemporaryFolder folder;
  const ProgramRun run = run_program(detail::with({"/bin/sh", "-c", detail::kSlurmStep, "sh"},
                                                  detail::short_training(folder, {"--tee", "3"})));
  EXPECT_EQ(run.code, 2);
  EXPECT_TRUE(run.said("--tee inside the world of another launcher")) << run.error;
  EXPECT_TRUE(run.said("WORLD_SIZE=2 by Slurm")) << run.error;
  EXPECT_EQ(std::count(run.error.begin(), run.error.end(), '\n'), 1);
}

TEST(LauncherPrograms, TrainingWithALogFolderKeepsWhatEachRankSaid) {
  const TemporaryFolder folder;
  const ProgramRun run =
      run_program(detail::short_training(folder, {"--nproc", "2", "--log-dir", folder / "logs"}));
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_TRUE(run.said("[rank0]: ")) << run.error;
  EXPECT_EQ(run.out.rfind("[rank0]: ", 0), 0u) << run.out;
  const std::string first = read_file(folder / "logs/0/stdout.log");
  EXPECT_NE(first, "");
  EXPECT_EQ(first.find("[rank"), std::string::npos) << first;
  EXPECT_EQ(read_file(folder / "logs/1/stdout.log"), "");
  EXPECT_TRUE(detail::weights(folder) == detail::weights_of_two_ranks());
}

TEST(LauncherPrograms, AnErrorInCommonIsPrintedOnce) {
  const TemporaryFolder folder;
  const auto training = detail::training_with(
      folder,
      {"--eval-split", "0.25", "--load-best-model-at-end", "--metric-for-best-model", "sharpness"});
  const char* message = "metric_for_best_model=sharpness is not";
  const ProgramRun own = run_program(detail::with(training, {"--nproc", "2"}));
  EXPECT_EQ(own.code, 2);
  EXPECT_EQ(own.times(message), 1u) << own.error;
  EXPECT_EQ(own.times("\n"), 1u) << own.error;
  const ProgramRun launched =
      run_program(detail::with({"hasten", "launch", "--nproc", "2"}, training));
  EXPECT_EQ(launched.code, 2);
  EXPECT_EQ(launched.times(message), 1u) << launched.error;
  EXPECT_TRUE(launched.said(" exited with code 2 first\n")) << launched.error;
}

TEST(LauncherPrograms, AnErrorOfOneRankAloneIsPrintedUnderEachLauncher) {
  const TemporaryFolder folder;
  const TemporaryFolder empty;
  auto training = detail::short_training(folder);
  *std::find(training.begin(), training.end(), (folder / "train.csv").string()) = "train.csv";
  const std::string script = "[ ${RANK:-$SLURM_PROCID} = 0 ] && cd " + folder.path().string() +
                             " || cd " + empty.path().string() + "; exec \"$@\"";
  const auto ranks = detail::with({"/bin/sh", "-c", script, "sh"}, training);
  for (const auto& launcher : {detail::Words{"hasten", "launch", "--nproc", "2"},
                               detail::Words{"/bin/sh", "-c", detail::kSlurmStep, "sh"}}) {
    const ProgramRun run = run_program(detail::with(launcher, ranks));
    EXPECT_EQ(run.code, 2);
    EXPECT_EQ(run.times("train.csv does not exist"), 1u) << run.error;
    EXPECT_TRUE(run.said("rank 1")) << run.error;
  }
}

TEST(LauncherPrograms, AFailureInARankThatPrintsNothingIsShown) {
  const TemporaryFolder folder;
  for (const std::vector<std::string>& flags :
       {std::vector<std::string>{"--log-dir", folder / "logs", "--redirects", "3"},
        std::vector<std::string>{"--local-ranks-filter", "1"}}) { // rank 0 would print it
    auto training = detail::short_training(folder, detail::with({"--nproc", "2"}, flags));
    write_file_atomically(folder / "train.csv", "text,label\ngood,pos\nbad\n");
    const ProgramRun run = run_program(training);
    EXPECT_EQ(run.code, 2);
    EXPECT_TRUE(run.said("exited with code 2 first: ")) << run.error;
    EXPECT_TRUE(run.said("train.csv:3")) << run.error;
  }
}

} // namespace hasten
