// Two network namespaces act as two hosts with a cable between them. Rank 0 is on one host, rank 1
// on the other, or each has a launcher. Both also have a docker0, which is listed first. Where the
// machine does not permit namespaces, most are skipped.
#include <gtest/gtest.h>

#include "cli/small_reviews.h"

namespace hasten {

using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::small_reviews;
using testing_support::TemporaryFolder;
using testing_support::train_arguments;

namespace detail {

// Runs in a new mount and network namespace, so that nothing remains afterwards. `on HOST COMMAND…`
// runs a command on a host. hosts.a and hosts.b are the hosts' /etc/hosts.
constexpr const char* kTwoHosts = R"(
set -e
mount -t tmpfs none /run
for h in a b; do
  ip netns add $h
  ip -n $h link set lo up
  ip -n $h link add docker0 type veth peer name docker1
  ip -n $h addr add 172.17.0.1/16 dev docker0
  ip -n $h link set docker0 up
done
ip link add eth0 netns a type veth peer name eth0 netns b
ip -n a addr add 10.77.0.1/24 dev eth0
ip -n b addr add 10.77.0.2/24 dev eth0
ip -n a link set eth0 up
ip -n b link set eth0 up
printf '127.0.0.1 localhost\n127.0.1.1 master\n' > $DIR/hosts.a
printf '127.0.0.1 localhost\n10.77.0.1 master\n' > $DIR/hosts.b
on() {
  h=$1; shift
  HASTEN_TEST_HOST=$h ip netns exec $h unshare --uts sh -c \
    'hostname ${0##*.}; mount --bind $0 /etc/hosts; exec "$@"' $DIR/hosts.$h "$@"
}
rank() {
  export RANK=$2 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
  on $1 "$PROGRAM" train --model bert-tiny --train-file ${DATA:-$DIR/train.csv} \
    --output-dir $DIR/out --batch-size 4 --save-strategy no $FLAGS 2>> $DIR/err$2
}
launch() { # HOST NODE FLAGS…: two ranks; each host has its own output folder; b's clock is late
  h=$1; n=$2; shift 2
  [ $h = b ] && clock=$LATE_CLOCK || clock=
  on $h env LD_PRELOAD=$clock "$PROGRAM" train --model bert-tiny --train-file $DIR/train.csv --batch-size 2 \
    --nproc-per-node 2 --nnodes 2 --node-rank $n --master-addr $MASTER_ADDR \
    --master-port $MASTER_PORT "$@" 2>> $DIR/err$n
  echo $? >> $DIR/codes$n
}
export MASTER_ADDR=master MASTER_PORT=29511
)";

// Without namespaces: processes of one host, at 127.0.0.1.
constexpr const char* kOneHostAsTwo = R"(
on() { HASTEN_TEST_HOST=$1 sh -c 'shift; exec "$@"' sh "$@"; }
MASTER_ADDR=127.0.0.1
)";

/// Runs `script` after kTwoHosts. If that is not possible, `skipped` has the reason, and if
/// `instead`, it runs after kOneHostAsTwo.
ProgramRun on_two_hosts(const TemporaryFolder& folder, const std::string& script,
                        std::vector<std::pair<std::string, std::string>> environment,
                        std::string& skipped, bool instead = false) {
  write_file_atomically(folder / "train.csv", small_reviews(24));
  write_file_atomically(folder / "hosts.sh", kTwoHosts);
  const auto bin = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  environment.emplace_back("DIR", folder.path().string());
  environment.emplace_back("PROGRAM", (bin / "hasten").string());
  environment.emplace_back("LATE_CLOCK", (bin / "late_clock.so").string());
  write_file_atomically(folder / "script.sh", script);
  const auto run = [&](const std::string& what) {
    return run_program({"/bin/sh", "-c", what},
                       {.environment = environment, .deadline = std::chrono::seconds(120)});
  };
  const auto with_hosts = [&](const std::string& what) {
    return run("exec unshare --mount --net sh -c '. $DIR/hosts.sh; " + what + "'");
  };
  const ProgramRun trial = with_hosts("on a true");
  if (trial.code != 0) {
    skipped = "no network namespaces here: " + trial.error;
    if (!instead) {
      return trial;
    }
    const std::string all = kTwoHosts;
    write_file_atomically(folder / "hosts.sh", all.substr(all.find("rank() {")) + kOneHostAsTwo);
  }
  ProgramRun result = skipped.empty() ? with_hosts(". $DIR/script.sh")
                                      : run("set -e; . $DIR/hosts.sh; . $DIR/script.sh");
  EXPECT_FALSE(result.timed_out);
  return result;
}

std::string text_of(const TemporaryFolder& folder, const char* name) {
  return std::filesystem::exists(folder / name) ? read_file(folder / name) : "";
}

} // namespace detail

// As in Debian, rank 0's host name has the address 127.0.1.1 on its own host.
TEST(Hosts, TwoTrainWhereTheMastersNameIsLoopbackAtHomeAndDocker0ComesFirst) {
  const TemporaryFolder folder;
  std::string skipped;
  const ProgramRun run = detail::on_two_hosts(
      folder, "rank a 0 & rank b 1; echo $? > $DIR/code1; wait $!; echo $? > $DIR/code0",
      {{"FLAGS", "--max-steps 3 --ddp-timeout 60"}}, skipped);
  if (!skipped.empty()) {
    GTEST_SKIP() << skipped;
  }
  EXPECT_EQ(detail::text_of(folder, "code0"), "0\n") << detail::text_of(folder, "err0");
  EXPECT_EQ(detail::text_of(folder, "code1"), "0\n") << detail::text_of(folder, "err1");
}

// Files of its own on each host: other labels, a missing file.
TEST(Hosts, WithOtherFilesAreNamedOnBothBeforeTraining) {
  const TemporaryFolder folder;
  std::string skipped;
  const ProgramRun run = detail::on_two_hosts(
      folder,
      "set +e; sed s/neg/bad/ $DIR/train.csv > $DIR/other.csv; "
      "rank a 0 & DATA=$DIR/other.csv rank b 1; wait $!; echo labels $? >> $DIR/codes; "
      "rank a 0 & DATA=$DIR/none.csv rank b 1; wait $!; echo file $? >> $DIR/codes",
      {{"FLAGS", "--max-steps 3 --ddp-timeout 60"}}, skipped);
  if (!skipped.empty()) {
    GTEST_SKIP() << skipped;
  }
  EXPECT_EQ(detail::text_of(folder, "codes"), "labels 2\nfile 2\n");
  for (const char* file : {"err0", "err1"}) {
    const std::string text = detail::text_of(folder, file);
    for (const char* part :
         {"rank 1's data has labels as bad, pos, rank 0 as neg, pos: hosts b and a",
          "none.csv does not exist"}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
    }
    EXPECT_EQ(text.find("metrics.jsonl"), std::string::npos) << text; // none has begun
  }
  EXPECT_NE(detail::text_of(folder, "err0").find("rank 1 on b failed: "), std::string::npos);
}

TEST(Hosts, AnInterfaceThatTheVariableNamesIsTaken) {
  const TemporaryFolder folder;
  std::string skipped;
  const ProgramRun run =
      detail::on_two_hosts(folder, "rank a 0 & rank b 1; wait $!",
                           {{"FLAGS", "--max-steps 3"}, {"GLOO_SOCKET_IFNAME", "eth9"}}, skipped);
  if (!skipped.empty()) {
    GTEST_SKIP() << skipped;
  }
  for (const char* file : {"err0", "err1"}) {
    const std::string text = detail::text_of(folder, file);
    EXPECT_NE(text.find("GLOO_SOCKET_IFNAME=eth9 is no interface with an address"),
              std::string::npos)
        << text;
  }
}

// The ranks can see each other's processes, as containers with one pid namespace can. They still
// monitor each other by heartbeats.
TEST(Hosts, ALostLinkIsNamedOnBothWithinTheHeartbeatLimit) {
  const TemporaryFolder folder;
  std::string skipped;
  const ProgramRun run = detail::on_two_hosts(
      folder,
      "set +e; rank a 0 & zero=$!; rank b 1 & one=$!; "
      "while ! grep -q metrics.jsonl $DIR/err0; do sleep 0.05; done; ip -n a link set eth0 down; "
      "wait $zero; echo $? > $DIR/code0; wait $one; echo $? > $DIR/code1",
      {{"FLAGS", "--max-steps 1000000"}, {"HASTEN_HEARTBEAT_TIMEOUT", "2"}}, skipped);
  if (!skipped.empty()) {
    GTEST_SKIP() << skipped;
  }
  for (const int rank : {0, 1}) {
    const std::string number = std::to_string(rank);
    const std::string text = detail::text_of(folder, ("err" + number).c_str());
    EXPECT_EQ(detail::text_of(folder, ("code" + number).c_str()), "1\n");
    EXPECT_NE(text.find("rank " + std::to_string(1 - rank) + " died or cannot be reached"),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("restart from the last checkpoint"), std::string::npos) << text;
  }
}

TEST(Hosts, AKilledRankZeroIsNamedOnceOnTheHostThatIsLeft) {
  const TemporaryFolder folder;
  std::string skipped;
  const ProgramRun run =
      detail::on_two_hosts(folder,
                           "set +e; rank a 0 & rank b 1 & one=$!; "
                           "while ! grep -q metrics.jsonl $DIR/err0; do sleep 0.05; done; "
                           "for p in $(ip netns pids a); do "
                           "grep -qs hasten-worker /proc/$p/cmdline && kill -KILL $p; done; "
                           "wait $one; echo $? > $DIR/code1",
                           {{"FLAGS", "--max-steps 1000000"}}, skipped);
  if (!skipped.empty()) {
    GTEST_SKIP() << skipped;
  }
  const std::string text = detail::text_of(folder, "err1");
  EXPECT_EQ(detail::text_of(folder, "code1"), "1\n");
  EXPECT_NE(text.find("rank 0 died"), std::string::npos) << text;
  EXPECT_NE(text.find("restart from the last checkpoint"), std::string::npos) << text;
  EXPECT_EQ(text.find("error:"), text.rfind("error:")) << text;
}

// The guide's line, with a folder for each host. Local SGD is in the middle of a round at step 3.
TEST(Hosts, TwoTrainFromTheGuidesLineAndResumeFromTheirOwnFoldersBitForBit) {
  const TemporaryFolder folder;
  std::string skipped;
  detail::on_two_hosts(folder, R"(set +e
LD_PRELOAD=$LATE_CLOCK date +%s > $DIR/late; date +%s > $DIR/now
both() { launch a 0 --output-dir $DIR/$1.a $2 & launch b 1 --output-dir $DIR/$1.b $3; wait; }
for how in ddp hsdp local; do
  flags="--strategy hsdp"
  [ $how = ddp ] && flags="--strategy ddp"
  [ $how = local ] && flags="--local-sgd-steps 2"
  same="--max-steps 6 --save-strategy steps --save-steps 3 --eval-strategy no $flags"
  both $how "$same" "$same"
  again="$same --resume-from-checkpoint $DIR/$how"
  both $how.again "$again.a/checkpoint-3" "$again.b/checkpoint-3"
  cmp $DIR/$how.a/model.safetensors $DIR/$how.again.a/model.safetensors && echo $how >> $DIR/equal
  ls $DIR/$how.a/checkpoint-3 | grep -c rank_[23] >> $DIR/of.b
done)",
                       {}, skipped, true);
  const std::string said = detail::text_of(folder, "err0") + detail::text_of(folder, "err1");
  EXPECT_EQ(detail::text_of(folder, "equal"), "ddp\nhsdp\nlocal\n") << said;
  EXPECT_EQ(detail::text_of(folder, "codes0"), "0\n0\n0\n0\n0\n0\n");
  EXPECT_EQ(detail::text_of(folder, "codes1"), "0\n0\n0\n0\n0\n0\n");
  EXPECT_EQ(detail::text_of(folder, "of.b"), "0\n0\n0\n"); // are on host b's disk alone
  EXPECT_LT(std::stoll(detail::text_of(folder, "late")) + 290,
            std::stoll(detail::text_of(folder, "now")));
  EXPECT_NE(said.find("world of 4 ranks on 2 hosts (a: 0-1, b: 2-3): memory inside a host, Gloo"),
            std::string::npos)
      << said;
}

TEST(Hosts, ACutCableEndsTheLaunchersOfBothWithTheOthersName) {
  const TemporaryFolder folder;
  std::string skipped;
  detail::on_two_hosts(
      folder,
      "set +e; run=\"--max-steps 1000000 --save-strategy no --output-dir $DIR/out\"; "
      "launch a 0 $run & launch b 1 $run & "
      "until grep -qs metrics.jsonl $DIR/err0; do sleep 0.05; done; ip -n a link set eth0 down; wait",
      {{"HASTEN_HEARTBEAT_TIMEOUT", "2"}}, skipped);
  if (!skipped.empty()) {
    GTEST_SKIP() << skipped;
  }
  const std::pair<const char*, const char*> expected[] = {{"0", "host b (node 1, ranks 2-3)"},
                                                          {"1", "host a (node 0, ranks 0-1)"}};
  for (const auto& [node, other] : expected) {
    const std::string said = detail::text_of(folder, (std::string("err") + node).c_str());
    EXPECT_EQ(detail::text_of(folder, (std::string("codes") + node).c_str()), "1\n") << said;
    EXPECT_NE(said.find(other), std::string::npos) << said;
  }
}

} // namespace hasten
