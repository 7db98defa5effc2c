// Models of deferred_init: FullyShard makes the whole model on no rank, and the values equal those
// of other models.
#include <nlohmann/json.hpp>

#include "hasten/core/deferred_init.h"
#include "hasten/core/memory.h"
#include "parallel/fully_shard_rig.h"
#include "support/run_device.h"

namespace hasten::shard_test {

static Net deferred_net(uint64_t seed, int depth) {
  return deferred_init([&] { return Net(seed, depth); }, {.resident_bytes = 0});
}

TEST(FullyShard, TenStepsOfADeferredModelEqualThoseOfOneThatWasWhole) {
  for (const auto strategy : {ShardingStrategy::fsdp, ShardingStrategy::zero1}) {
    auto communicator =
        fresh_communicator({.timeout = std::chrono::seconds(20),
                            .name = "deferred" + std::to_string(static_cast<int>(strategy))});
    const int rank = communicator->rank();
    const auto seed = static_cast<uint64_t>(rank) + 1;
    Net whole(seed, 3);
    Net deferred = deferred_net(seed, 3);
    FullyShard plain(communicator, whole.ptr(), blocks_of(whole), {.strategy = strategy});
    FullyShard sharded(communicator, deferred.ptr(), blocks_of(deferred), {.strategy = strategy});
    EXPECT_FALSE(is_deferred(*deferred));
    for (int turn = 0; turn < 10; ++turn) {
      const double loss = shard_step(plain, whole, rank, turn, 2);
      EXPECT_EQ(shard_step(sharded, deferred, rank, turn, 2), loss);
      descend(whole, 0.01);
      descend(deferred, 0.01);
    }
    for (size_t i = 0; i < plain.parameters().size(); ++i) {
      EXPECT_TRUE(torch::equal(plain.parameters()[i].parameter, sharded.parameters()[i].parameter))
          << plain.parameters()[i].name;
    }
  }
}

// The model has 8 blocks of 256 KiB and a root of 64 KiB. The memory is a rank's shards, one block,
// and the log's memory for each operator that draws random values.
TEST(FullyShard, ADeferredModelIsNeverWholeOnARank) {
  install_memory_meter();
  auto communicator = testing_support::fresh_communicator_without_memory();
  const int world = communicator->world_size();
  const int64_t block = 256 << 10;
  const int64_t before = memory_stats(testing_support::run_device()).live_bytes;
  const auto make = [] {
    torch::nn::Sequential net;
    for (int i = 0; i < 8; ++i) {
      net->push_back(torch::nn::Linear(torch::nn::LinearOptions(256, 256).bias(false)));
    }
    return net;
  };
  reset_peak_memory(testing_support::run_device());
  auto net = deferred_init(make, {.resident_bytes = 0});
  FullyShard sharded(communicator, net.ptr(), repeated_blocks(*net),
                     {.device = testing_support::run_device()});
  const int64_t peak = memory_stats(testing_support::run_device()).peak_bytes - before;
  // The thread that sends a message may keep its block for a moment.
  const int64_t rows = 8 * ((256 + world - 1) / world) * 1024;
  EXPECT_LE(peak, rows + 3 * block);
  EXPECT_GE(peak, 8 * block / world);
  EXPECT_LE(memory_stats(testing_support::run_device()).live_bytes - before,
            rows + block + (64 << 10));
}

TEST(FullyShard, ADeferredModelMeetsAWholeOneOnAnotherRank) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  const auto seed = static_cast<uint64_t>(rank) + 1;
  for (const int odd : {0, 1}) {
    Net net = rank % 2 == odd ? deferred_net(seed, 2) : Net(seed, 2);
    FullyShard sharded(communicator, net.ptr(), blocks_of(net));
    expect_equal_parameters(sharded, *Net(1, 2), 0);
  }
}

TEST(Ddp, ADeferredModelGetsRankZerosValues) {
  auto communicator = fresh_communicator();
  Net net = deferred_net(static_cast<uint64_t>(communicator->rank()) + 1, 2);
  Ddp ddp(communicator, net.ptr());
  Net wanted(1, 2);
  for (const auto& item : wanted->named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value(), net->named_parameters()[item.key()])) << item.key();
  }
}

} // namespace hasten::shard_test
