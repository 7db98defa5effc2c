// Launchers of several hosts, as processes of this one: HASTEN_TEST_HOST is the name of each host.
#include <gtest/gtest.h>

#include "cli/small_reviews.h"

namespace hasten {

using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::TemporaryFolder;

namespace detail {

// `on HOST NODE COMMAND…` runs hasten with the flags of two hosts, and leaves its stderr and its exit
// code in the folder.
constexpr const char* kLaunchers = R"(
cd $DIR
on() {
  h=$1; n=$2; shift 2
  c=$1; shift
  HASTEN_TEST_HOST=$h "$PROGRAM" $c --nnodes ${NODES:-2} --node-rank $n --master-addr 127.0.0.1 \
    --master-port $PORT --nproc ${NPROC:-2} $FLAGS "$@" 2> $h.err
  echo $? > $h.code
}
launch() { h=$1; n=$2; shift 2; on $h $n launch "$@"; }
)";

/// Runs the script after kLaunchers, in `folder`.
ProgramRun run_launchers(const TemporaryFolder& folder, const std::string& script,
                         std::vector<std::pair<std::string, std::string>> environment = {}) {
  const auto [fd, port] = listen_on_loopback();
  FileDescriptor(fd).close();
  write_file_atomically(folder / "launchers.sh", kLaunchers);
  const auto bin = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  environment.emplace_back("DIR", folder.path().string());
  environment.emplace_back("PROGRAM", (bin / "hasten").string());
  environment.emplace_back("PORT", std::to_string(port));
  environment.emplace_back("HASTEN_HEARTBEAT_TIMEOUT", "2");
  const ProgramRun run = run_program({"/bin/sh", "-c", ". $DIR/launchers.sh\n" + script + "\nwait"},
                                     {.environment = environment});
  EXPECT_FALSE(run.timed_out);
  return run;
}

std::string left(const TemporaryFolder& folder, const std::string& name) {
  return std::filesystem::exists(folder / name) ? read_file(folder / name) : "";
}

void expect_said(const TemporaryFolder& folder, const char* host, const std::string& code,
                 const std::string& text) {
  const std::string error = left(folder, std::string(host) + ".err");
  EXPECT_EQ(left(folder, std::string(host) + ".code"), code + "\n") << error;
  EXPECT_NE(error.find(text), std::string::npos) << host << ": " << error;
}

} // namespace detail

TEST(Nodes, RanksOfAllHostsGetTorchrunsVariables) {
  const TemporaryFolder folder;
  detail::run_launchers(
      folder,
      "say='echo $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE "
      "$MASTER_ADDR $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_RUN_ID > $RANK'\n"
      "NPROC=1 launch b 1 sh -c \"$say\" & NPROC=2 launch a 0 sh -c \"$say\"",
      {{"FLAGS", "--rdzv-id run7"}});
  EXPECT_EQ(detail::left(folder, "0"), "3 0 2 0 2 127.0.0.1 0 run7\n");
  EXPECT_EQ(detail::left(folder, "1"), "3 1 2 0 2 127.0.0.1 0 run7\n");
  EXPECT_EQ(detail::left(folder, "2"), "3 0 1 1 2 127.0.0.1 0 run7\n");
  detail::expect_said(folder, "a", "0", "hosts: a (node 0, ranks 0-1), b (node 1, rank 2)");
}

TEST(Nodes, OneLauncherOnEachHostOfASlurmStepStartsItsRanks) {
  const TemporaryFolder folder;
  detail::run_launchers(
      folder,
      "step() { export SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=$1 SLURM_LOCALID=0 SLURM_NODEID=$1 "
      "SLURM_STEP_NODELIST='n[0-1]' SLURM_STEP_TASKS_PER_NODE='1(x2)' SLURM_JOB_ID=7; shift; "
      "launch \"$@\"; }\n"
      "step 0 a 0 sh -c 'echo > $RANK.$WORLD_SIZE' & step 1 b 1 sh -c 'echo > $RANK.$WORLD_SIZE'");
  for (const char* rank : {"0.4", "1.4", "2.4", "3.4"}) {
    EXPECT_TRUE(std::filesystem::exists(folder / rank)) << rank << detail::left(folder, "a.err");
  }
}

TEST(Nodes, TheFirstFailureIsPrintedOnEveryHost) {
  const TemporaryFolder folder;
  detail::run_launchers(folder,
                        "fail='if [ $RANK = 2 ]; then exit 7; fi; exec sleep 60'\n"
                        "launch a 0 sh -c \"$fail\" & launch b 1 sh -c \"$fail\"");
  for (const char* host : {"a", "b"}) {
    detail::expect_said(folder, host, "7",
                        "error: rank 2 on b (node 1, ranks 2-3) exited with code 7 first");
  }
}

TEST(Nodes, AHostWhoseLauncherIsKilledIsNamedOnTheOthers) {
  const TemporaryFolder folder;
  for (const std::string victim : {"a", "b"}) {
    const std::string other = victim == "a" ? "b" : "a";
    detail::run_launchers(
        folder,
        "rm -f *.code; work='echo $$ > pid.$GROUP_RANK.$LOCAL_RANK; exec sleep 60'\n"
        "launch " +
            other + (other == "a" ? " 0" : " 1") +
            " sh -c \"$work\" & "
            "HASTEN_TEST_HOST=" +
            victim + " \"$PROGRAM\" launch --nproc 2 --nnodes 2 --node-rank " +
            (victim == "a" ? "0" : "1") +
            " --master-addr 127.0.0.1 --master-port $PORT sh -c \"$work\" 2> /dev/null & victim=$!\n"
            "until [ -s pid.0.1 -a -s pid.1.1 ]; do sleep 0.02; done; kill -KILL $victim; "
            "wait; rm -f pid.*");
    detail::expect_said(folder, other.c_str(), "1",
                        "host " + victim + " (node " +
                            (victim == "a" ? "0, ranks 0-1" : "1, ranks 2-3") +
                            ") cannot be reached, or its launcher has ended");
  }
}

TEST(Nodes, ASignalToOneLauncherReachesTheRanksOfAllHosts) {
  const TemporaryFolder folder;
  detail::run_launchers(
      folder,
      "work='trap \"touch $DIR/got.$RANK; exit 0\" TERM; touch $DIR/up.$RANK; sleep 60 & wait'\n"
      "launch a 0 sh -c \"$work\" & "
      "HASTEN_TEST_HOST=b \"$PROGRAM\" launch --nproc 2 --nnodes 2 --node-rank 1 "
      "--master-addr 127.0.0.1 --master-port $PORT sh -c \"$work\" 2> b.err & b=$!\n"
      "until [ -e up.0 -a -e up.1 -a -e up.2 -a -e up.3 ]; do sleep 0.02; done; "
      "kill -TERM $b; wait $b; echo $? > b.code");
  for (const char* rank : {"0", "1", "2", "3"}) {
    EXPECT_TRUE(std::filesystem::exists(folder / (std::string("got.") + rank))) << rank;
  }
  detail::expect_said(folder, "a", "143", "stopped by signal 15");
  detail::expect_said(folder, "b", "143", "stopped by signal 15");
}

TEST(Nodes, MissingHostsAndTwoWithOneNodeRankAreNamed) {
  const TemporaryFolder folder;
  detail::run_launchers(folder, "NODES=3; launch a 0 true & launch c 2 true",
                        {{"FLAGS", "--rdzv-conf join_timeout=4"}});
  for (const char* host : {"a", "c"}) {
    detail::expect_said(folder, host, "1", "missing: node rank 1");
  }
  detail::run_launchers(folder, "NODES=3; launch a 0 true & launch b 1 true & launch c 1 true");
  for (const char* host : {"a", "b", "c"}) {
    detail::expect_said(folder, host, "2", "two launchers have node_rank=1: host ");
  }
}

TEST(Nodes, AHostThatIsStartedAgainReplacesTheOneThatHasEnded) {
  const TemporaryFolder folder;
  detail::run_launchers(
      folder,
      "NODES=3; launch a 0 true & until [ -e a.err ]; do sleep 0.02; done; sleep 0.3\n"
      "HASTEN_TEST_HOST=b \"$PROGRAM\" launch --nproc 2 --nnodes 3 --node-rank 1 "
      "--master-addr 127.0.0.1 --master-port $PORT true & first=$!\n"
      "sleep 0.5; kill -KILL $first; launch b 1 true & launch c 2 true");
  for (const char* host : {"a", "b", "c"}) {
    detail::expect_said(folder, host, "0", "");
  }
}

TEST(Nodes, ByAnEndpointTheOthersAreNumberedByNameAndTheLastCallEnds) {
  const TemporaryFolder folder;
  detail::run_launchers(
      folder,
      "by() { h=$1; shift; HASTEN_TEST_HOST=$h \"$PROGRAM\" launch --nproc 1 --nnodes 3:4 "
      "--rdzv-endpoint [::1]:$PORT \"$@\" sh -c 'echo $GROUP_RANK/$GROUP_WORLD_SIZE > '$h; }\n"
      "by z --rdzv-conf is_host=1,last_call_timeout=1 & "
      "by b --rdzv-conf is_host=0 & by a --rdzv-conf is_host=0");
  EXPECT_EQ(detail::left(folder, "z"), "0/3\n");
  EXPECT_EQ(detail::left(folder, "a"), "1/3\n");
  EXPECT_EQ(detail::left(folder, "b"), "2/3\n");
}

TEST(Nodes, OtherFlagsAreAnErrorThatNamesBothHostsBeforeARankStarts) {
  const TemporaryFolder folder;
  detail::run_launchers(folder,
                        "run='--model bert-tiny --max-steps 2 --save-strategy no'\n"
                        "on a 0 train $run --output-dir out.a --learning-rate 1e-3 & "
                        "on b 1 train $run --output-dir out.b --learning-rate 2e-3");
  for (const char* host : {"a", "b"}) {
    detail::expect_said(folder, host, "2", "learning_rate: host b has 0.002, host a has 0.001");
    EXPECT_FALSE(std::filesystem::exists(folder / (std::string("out.") + host)));
  }
}

} // namespace hasten
