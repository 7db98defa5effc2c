// States of hosts that share no disk: each has a folder of its own. Worlds 2 to 4.
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "accelerator/sharded_rig.h"
#include "accelerator/state_rig.h"
#include "hasten/base/files.h"
#include "hasten/io/commit.h"
#include "hasten/state/saved_state.h"
#include "support/on_hosts.h"

namespace hasten::host_folders_test {

namespace files = std::filesystem;
using sharded_test::Learning;
using state_test::expect_equal_bits;
using testing_support::on_hosts;
using testing_support::OnHosts;
using testing_support::two_hosts;

int world() { return testing_support::test_world().world_size; }

/// The folder of a host of this name, which no other host looks into.
files::path of_host(const files::path& base, int host) {
  return base / ("host" + std::to_string(host)) / "state";
}

std::string rank_file(int rank) { return "state_rank_" + std::to_string(rank) + ".safetensors"; }

std::vector<std::string> names_in(const files::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : files::directory_iterator(folder, error)) {
    names.push_back(entry.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

/// The error of load_state().
std::string load_error(Accelerator& accelerator, const files::path& folder) {
  return state_test::input_error([&] { accelerator.load_state(folder); });
}

/// A state of two steps on two hosts. Collective.
std::vector<at::Tensor> save_on_two_hosts(const files::path& base, Strategy strategy,
                                          int64_t replicas = 1) {
  const auto group = on_hosts(two_hosts(world()));
  Learning saving(strategy, group);
  saving.step(0);
  saving.step(1);
  saving.accelerator.save_state(of_host(base, group->host()), {.replicas = replicas});
  saving.step(2);
  return saving.whole();
}

/// Goes on from the folders with the ranks on these hosts, in the given folders.
std::vector<at::Tensor> go_on(const files::path& base, Strategy strategy,
                              const std::vector<int>& hosts) {
  const auto group = on_hosts(hosts);
  Learning then(strategy, group);
  then.step(5); // something else
  then.accelerator.load_state(of_host(base, group->host()));
  then.step(2);
  return then.whole();
}

TEST(HostFolders, EachHostHasTheFilesOfItsRanksAndGoesOnBitForBit) {
  if (world() == 1) {
    GTEST_SKIP() << "one host";
  }
  const auto base = state_test::common_folder();
  for (const Strategy strategy : {Strategy::ddp, Strategy::zero2, Strategy::fsdp, Strategy::hsdp}) {
    SCOPED_TRACE(strategy_name(strategy));
    const auto place = base / strategy_name(strategy);
    const auto later = save_on_two_hosts(place, strategy);
    const int host = two_hosts(world())[static_cast<size_t>(testing_support::test_world().rank)];
    std::vector<std::string> expected = {"manifest.json", "model.safetensors", "state.json",
                                         "state.safetensors"};
    for (int rank = 0; rank < world(); ++rank) {
      if (two_hosts(world())[static_cast<size_t>(rank)] == host) {
        expected.push_back(rank_file(rank));
      }
    }
    std::ranges::sort(expected);
    EXPECT_EQ(names_in(of_host(place, host)), expected);
    expect_equal_bits(go_on(place, strategy, two_hosts(world())), later);
    EXPECT_EQ(names_in(of_host(place, host)), expected) << "nothing was fetched";
    EXPECT_EQ(names_in(of_host(place, host).parent_path()), std::vector<std::string>{"state"});
  }
}

// Generators, the place in the data and an object of each rank; also from a folder per rank, and
// from a common one.
TEST(HostFolders, ARunWithDropoutGoesOnInTheMiddleOfAnEpoch) {
  if (world() == 1) {
    GTEST_SKIP() << "one host";
  }
  const auto base = state_test::common_folder();
  std::vector<int> apart;
  for (int rank = 0; rank < world(); ++rank) {
    apart.push_back(rank);
  }
  int number = 0;
  for (const auto& hosts : {two_hosts(world()), apart}) {
    for (const bool common : {false, true}) {
      const auto group = on_hosts(hosts);
      const auto folder = of_host(base / std::to_string(number++), common ? 0 : group->host());
      state_test::Session whole(group, 2, 13);
      whole.train([&](state_test::Place place) {
        if (place.epoch == 1 && place.turn == 0) {
          whole.accelerator.save_state(folder);
        }
      });
      const auto expected = whole.everything();
      state_test::Session resumed(on_hosts(hosts), 2, 13, 5);
      resumed.prepared();
      resumed.accelerator.load_state(folder);
      resumed.train();
      expect_equal_bits(resumed.everything(), expected);
      EXPECT_EQ(read_file(folder / "state.json").find("placement") == std::string::npos, common);
    }
  }
}

TEST(HostFolders, RanksOnOtherHostsFetchWhatTheirsLack) {
  if (world() != 4) {
    GTEST_SKIP() << "for four ranks";
  }
  const auto base = state_test::common_folder();
  for (const Strategy strategy : {Strategy::ddp, Strategy::fsdp, Strategy::hsdp}) {
    const std::vector<std::vector<int>> placements = {
        {0, 1, 2, 3}, {1, 1, 0, 0}, {0, 1, 0, 1}, {2, 2, 1, 0}, {1, 1, 1, 0}};
    for (size_t i = 0; i < placements.size(); ++i) {
      SCOPED_TRACE(std::string(strategy_name(strategy)) + " " + std::to_string(i));
      const auto place = base / strategy_name(strategy) / std::to_string(i);
      const auto later = save_on_two_hosts(place, strategy);
      expect_equal_bits(go_on(place, strategy, placements[i]), later);
      const auto own =
          of_host(place, placements[i][static_cast<size_t>(testing_support::test_world().rank)]);
      EXPECT_NO_THROW(verify_manifest(own));
      EXPECT_TRUE(files::exists(own / rank_file(testing_support::test_world().rank)));
    }
  }
}

TEST(HostFolders, AFileThatNoHostHasIsNamedWithItsRank) {
  if (world() < 2) {
    GTEST_SKIP() << "one host";
  }
  const auto base = state_test::common_folder();
  save_on_two_hosts(base, Strategy::fsdp);
  const auto group = on_hosts(two_hosts(world()));
  Learning then(Strategy::fsdp, group);
  const auto before = then.whole();
  if (group->is_main()) {
    files::remove_all(of_host(base, 1));
  }
  group->barrier("removed");
  const std::string text = load_error(then.accelerator, of_host(base, group->host()));
  const int lost = (world() + 1) / 2;
  EXPECT_NE(text.find("no host has " + rank_file(lost) + ", the file of rank " +
                      std::to_string(lost) + "; rank " + std::to_string(lost) + "'s host "),
            std::string::npos)
      << text;
  expect_equal_bits(then.whole(), before);
}

TEST(HostFolders, WithTwoReplicasTheLossOfAnyDiskLosesNothing) {
  if (world() < 2) {
    GTEST_SKIP() << "one host";
  }
  const auto base = state_test::common_folder();
  for (const Strategy strategy : {Strategy::ddp, Strategy::fsdp, Strategy::hsdp}) {
    for (const int lost : {0, 1}) {
      SCOPED_TRACE(std::string(strategy_name(strategy)) + " without host " + std::to_string(lost));
      const auto place = base / strategy_name(strategy) / std::to_string(lost);
      const auto later = save_on_two_hosts(place, strategy, 2);
      testing_support::fresh_communicator()->barrier("saved");
      if (testing_support::test_world().rank == 0) {
        files::remove_all(of_host(place, lost));
      }
      testing_support::fresh_communicator()->barrier("lost");
      expect_equal_bits(go_on(place, strategy, two_hosts(world())), later);
      EXPECT_NO_THROW(verify_manifest(of_host(place, lost)));
      // The remaining host alone has all.
      expect_equal_bits(go_on(place, strategy, std::vector(static_cast<size_t>(world()), 1 - lost)),
                        later);
    }
  }
}

// State with the place of a rank's data is 26 KB here; a model and its moments are 24 MB.
TEST(HostFolders, ASaveSendsOnlyWhatDiffersBetweenHosts) {
  if (world() == 1) {
    GTEST_SKIP() << "one host";
  }
  const auto base = state_test::common_folder();
  const auto group = on_hosts(two_hosts(world()));
  Accelerator accelerator({}, group);
  torch::nn::Linear model(1000, 2000);
  AdamW adamw(model->parameters(), torch::optim::AdamWOptions(0.01));
  auto [prepared, optimizer] = accelerator.prepare(model, adamw);
  {
    auto window = accelerator.accumulate(model);
    const auto ones = torch::ones({1, 1000}, accelerator.device());
    accelerator.backward(model->forward(ones).sum(), 1);
    optimizer.step();
    optimizer.zero_grad();
  }
  const int64_t before = bytes_sent();
  accelerator.save_state(of_host(base, group->host()));
  EXPECT_LT(bytes_sent() - before, int64_t{1} << 20);
  const auto own = of_host(base, group->host());
  EXPECT_GT(files::file_size(own / "state.safetensors"), uintmax_t{15} << 20);
  group->barrier("saved");
  for (const char* name : {"model.safetensors", "state.safetensors", "state.json"}) {
    EXPECT_EQ(hash_hex(read_file(of_host(base, 0) / name)),
              hash_hex(read_file(of_host(base, 1) / name)));
  }
}

TEST(HostFolders, MoreReplicasThanDisksAreRefused) {
  const auto base = state_test::common_folder();
  const auto group = on_hosts(two_hosts(world()));
  Learning saving(Strategy::ddp, group);
  const auto refused = [&](const files::path& folder, int64_t replicas) {
    return state_test::input_error(
        [&] { saving.accelerator.save_state(folder, {.replicas = replicas}); });
  };
  EXPECT_NE(
      refused(base / "common", 2)
          .find("save_replicas=2, but all ranks save into one folder, on one disk. Expected 1"),
      std::string::npos);
  if (world() > 1) {
    const auto text = refused(of_host(base, group->host()), 3);
    EXPECT_NE(text.find("save_replicas=3 on 2 hosts"), std::string::npos) << text;
    group->barrier("refused");
    EXPECT_EQ(names_in(of_host(base, group->host()).parent_path()), std::vector<std::string>{});
  }
}

TEST(HostFolders, ADamagedByteAndAnotherSaveAreNamedWithTheirHosts) {
  if (world() < 2) {
    GTEST_SKIP() << "one host";
  }
  const auto base = state_test::common_folder();
  save_on_two_hosts(base, Strategy::fsdp);
  const auto group = on_hosts(two_hosts(world()));
  Learning then(Strategy::fsdp, group);
  const auto before = then.whole();
  const auto folder = of_host(base, group->host());
  const int other = (world() + 1) / 2;
  if (group->is_main()) {
    std::fstream file(of_host(base, 1) / rank_file(other), std::ios::in | std::ios::out);
    file.seekp(-1, std::ios::end);
    file.put('x');
  }
  group->barrier("damaged");
  std::string text = load_error(then.accelerator, folder);
  EXPECT_NE(text.find("rank " + std::to_string(other) + "'s host "), std::string::npos) << text;
  EXPECT_NE(text.find((of_host(base, 1) / rank_file(other)).string() + ": xxh3="),
            std::string::npos)
      << text;
  save_on_two_hosts(base / "again", Strategy::fsdp);
  text = load_error(then.accelerator,
                    of_host(group->host() == 0 ? base : base / "again", group->host()));
  EXPECT_NE(text.find("the hosts' folders are of different saves: state.json differs between " +
                      of_host(base, 0).string() + " on rank 0's host "),
            std::string::npos)
      << text;
  EXPECT_NE(text.find(of_host(base / "again", 1).string() + " on rank " + std::to_string(other)),
            std::string::npos)
      << text;
  expect_equal_bits(then.whole(), before);
}

TEST(HostFolders, AFullDiskOnOneHostLeavesTheOldStateOnAll) {
  if (world() < 2) {
    GTEST_SKIP() << "one host";
  }
  const auto base = state_test::common_folder();
  const auto later = save_on_two_hosts(base, Strategy::fsdp);
  const auto group = on_hosts(two_hosts(world()));
  const auto folder = of_host(base, group->host());
  const std::string before = read_file(folder / "manifest.json");
  Learning saving(Strategy::fsdp, group);
  saving.step(1);
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const rlimit full{group->host() == 1 ? rlim_t{100} : old.rlim_cur, old.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &full);
  std::string text;
  try {
    saving.accelerator.save_state(folder);
  } catch (const Error& error) {
    text = error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &old);
  EXPECT_NE(text.find("File too large"), std::string::npos) << text;
  group->barrier("failed");
  EXPECT_EQ(read_file(folder / "manifest.json"), before);
  EXPECT_EQ(names_in(folder.parent_path()), std::vector<std::string>{"state"});
  group->barrier("looked");
  expect_equal_bits(go_on(base, Strategy::fsdp, two_hosts(world())), later);
}

TEST(HostFolders, TheFoldersOfHostsConsolidateToTheModelOfACommonFolder) {
  if (world() < 2) {
    GTEST_SKIP() << "one host";
  }
  const auto base = state_test::common_folder();
  for (const Strategy strategy : {Strategy::fsdp, Strategy::hsdp}) {
    const auto place = base / strategy_name(strategy);
    save_on_two_hosts(place, strategy);
    const auto group = on_hosts(two_hosts(world()));
    Learning saving(strategy, group);
    saving.step(0);
    saving.step(1);
    saving.accelerator.save_state(place / "common");
    if (group->is_main()) {
      const std::vector<files::path> folders = {of_host(place, 1), of_host(place, 0)};
      consolidate_state(folders, place / "joined.safetensors");
      consolidate_state({place / "common"}, place / "common.safetensors");
      EXPECT_EQ(hash_hex(read_file(place / "joined.safetensors")),
                hash_hex(read_file(place / "common.safetensors")));
      const auto text = state_test::input_error(
          [&] { consolidate_state({folders[0], place / "common"}, place / "bad.safetensors"); });
      EXPECT_NE(text.find("are of different saves"), std::string::npos) << text;
      EXPECT_FALSE(files::exists(place / "bad.safetensors"));
    }
  }
}

// Two hosts of one machine see one disk, a third does not.
TEST(HostFolders, HostsThatShareADiskWithEachOtherButNotWithRankZeroUseOneFolder) {
  if (world() < 3) {
    GTEST_SKIP() << "for three hosts";
  }
  const auto base = state_test::common_folder();
  std::vector<int> hosts;
  for (int rank = 0; rank < world(); ++rank) {
    hosts.push_back(rank);
  }
  const auto group = on_hosts(hosts);
  const auto folder = of_host(base, std::min(group->host(), 1));
  Learning saving(Strategy::fsdp, group);
  saving.step(0);
  saving.accelerator.save_state(folder);
  saving.step(1);
  Learning then(Strategy::fsdp, on_hosts(hosts));
  then.accelerator.load_state(folder);
  then.step(1);
  expect_equal_bits(then.whole(), saving.whole());
  EXPECT_EQ(files::exists(folder / rank_file(0)), group->host() == 0);
  EXPECT_EQ(files::exists(folder / rank_file(2)), group->host() != 0);
  EXPECT_EQ(names_in(folder.parent_path()), std::vector<std::string>{"state"});
}

} // namespace hasten::host_folders_test
