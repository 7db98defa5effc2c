// SyncBatchNorm compared with torch's layers on the joined batch. Worlds 1 to 4. Ranks have
// different numbers of samples, or none.
#include "parallel/sync_batch_norm_rig.h"
#include "support/on_device.h"

namespace hasten::sync_norm_test {

using testing_support::fresh_communicator;
using torch::nn::BatchNormOptions;

const std::vector<std::vector<int64_t>> kTails{{}, {6}, {3, 2}, {2, 3, 2}}; // follow [N, C]

TEST(SyncBatchNorm, EqualsOneProcessOnTheJoinedBatch) {
  auto communicator = fresh_communicator();
  for (const Split& split : splits(communicator->world_size())) {
    for (const auto& tail : kTails) {
      SCOPED_TRACE(testing::Message() << split[0] << " rows, " << tail.size());
      SyncBatchNorm norm(BatchNormOptions(kChannels), communicator);
      give_values(norm, torch::kDouble);
      OneProcess plain(static_cast<int64_t>(tail.size()) + 2, BatchNormOptions(kChannels));
      for (uint64_t call = 0; call < 2; ++call) {
        const Tensor x = joined_values(split, tail, 10 + call);
        const Tensor dy = joined_values(split, tail, 20 + call) - 20;
        const int rank = communicator->rank();
        expect_joined(*communicator,
                      run_layer(norm, rows_of(x, split, rank), rows_of(dy, split, rank)),
                      plain.run(x, dy, torch::kDouble), split, 1e-12);
      }
    }
  }
}

// fp32 and bf16 compared with torch in fp64 on the same values. The values are near 20, so an fp32
// mean has an error of 1e-6. A bf16 result is rounded once.
TEST(SyncBatchNorm, IsAsPreciseAsItsTypes) {
  auto communicator = fresh_communicator();
  const Split split = splits(communicator->world_size()).back();
  const int rank = communicator->rank();
  for (const auto& [type, tolerance] :
       {std::pair{torch::kFloat, 5e-5}, std::pair{torch::kBFloat16, 3e-2}}) {
    SyncBatchNorm norm(BatchNormOptions(kChannels), communicator);
    give_values(norm, torch::kFloat); // statistics and parameters stay fp32
    OneProcess plain(4, BatchNormOptions(kChannels));
    const Tensor x = joined_values(split, {5, 4}, 3).to(type);
    const Tensor dy = (joined_values(split, {5, 4}, 4) - 20).to(type);
    const Norms mine = run_layer(norm, rows_of(x, split, rank), rows_of(dy, split, rank));
    EXPECT_EQ(mine.tensors.at("y").scalar_type(), type);
    EXPECT_EQ(mine.tensors.at("dx").scalar_type(), type);
    EXPECT_EQ(mine.tensors.at("weight gradient").scalar_type(), torch::kFloat);
    Norms wanted = plain.run(x.to(torch::kDouble), dy.to(torch::kDouble), torch::kDouble);
    // These are sums of many terms, so their error is larger.
    wanted.tensors.erase("weight gradient");
    wanted.tensors.erase("bias gradient");
    expect_joined(*communicator, mine, wanted, split, tolerance);
  }
}

TEST(SyncBatchNorm, ChannelsLastStaysChannelsLast) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  for (const Split& split : splits(communicator->world_size())) {
    for (const int64_t dims : {4, 5}) {
      const std::vector<int64_t> tail(static_cast<size_t>(dims - 2), 4);
      const auto format =
          dims == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
      SyncBatchNorm norm(BatchNormOptions(kChannels), communicator);
      give_values(norm, torch::kDouble);
      OneProcess plain(dims, BatchNormOptions(kChannels));
      const Tensor x = joined_values(split, tail, 5);
      const Tensor dy = joined_values(split, tail, 6) - 20;
      const Norms mine = run_layer(norm, rows_of(x, split, rank).contiguous(format),
                                   rows_of(dy, split, rank)); // not in the memory format of x
      EXPECT_TRUE(mine.tensors.at("y").is_contiguous(format));
      expect_joined(*communicator, mine, plain.run(x, dy, torch::kDouble), split, 1e-12);
      if (communicator->world_size() > 1) { // the gradient of a leaf always has the leaf's format
        const Tensor in = rows_of(x, split, rank).contiguous(format);
        const Tensor inner = in.requires_grad_() * 1;
        bool kept = false;
        inner.register_hook([&](const Tensor& gradient) {
          kept = gradient.numel() == 0 || gradient.is_contiguous(format);
        });
        norm->forward(inner).backward(rows_of(dy, split, rank));
        EXPECT_TRUE(kept);
      }
    }
  }
}

TEST(SyncBatchNorm, TakesTheMeanOfAllBatchesWhereMomentumIsNone) {
  auto communicator = fresh_communicator();
  const Split split = splits(communicator->world_size()).front();
  const auto options = BatchNormOptions(kChannels).momentum(std::nullopt);
  SyncBatchNorm norm(options, communicator);
  give_values(norm, torch::kDouble);
  OneProcess plain(3, options);
  for (uint64_t call = 0; call < 3; ++call) {
    const Tensor x = joined_values(split, {4}, call);
    const int rank = communicator->rank();
    expect_joined(*communicator, run_layer(norm, rows_of(x, split, rank), rows_of(x, split, rank)),
                  plain.run(x, x, torch::kDouble), split,
                  1e-9); // dy is near 20, so sums are near 1e3
  }
}

TEST(SyncBatchNorm, SendsTwiceALayerAndNothingInEvaluation) {
  CountedCommunicator counted(fresh_communicator());
  const int world = counted.watched->world_size();
  SyncBatchNorm norm(BatchNormOptions(kChannels), counted.watched);
  on_device::moved(norm);
  counted.reset();
  const Tensor x = on_device::randn({4, kChannels}) + counted.watched->rank();
  norm->forward(x.clone().requires_grad_()).sum().backward();
  EXPECT_EQ(counted.forwards, world > 1 ? 1 : 0);
  EXPECT_EQ(counted.backwards, world > 1 ? 1 : 0);
  counted.reset();
  norm->forward(x).sum().backward(); // x needs no gradient
  EXPECT_EQ(counted.backwards, 0);
  {
    const at::NoGradGuard no_grad; // still in training mode
    const Tensor before = norm->running_mean.clone();
    const Tensor y = norm->forward(x);
    EXPECT_FALSE(torch::equal(before, norm->running_mean));
    Tensor sum = y.sum(0);
    counted.watched->all_reduce(sum, ReduceOp::SUM, "sum of y");
    EXPECT_LE(largest(sum), 1e-5) << "not normalised by the joined mean";
  }
  counted.reset();
  norm->eval();
  const Tensor before = norm->running_mean.clone();
  const Tensor y = norm->forward(x.clone().requires_grad_());
  y.sum().backward();
  EXPECT_EQ(counted.forwards + counted.backwards, 0);
  EXPECT_TRUE(torch::equal(before, norm->running_mean));
  EXPECT_TRUE(torch::equal(y, torch::batch_norm(x, norm->weight, norm->bias, norm->running_mean,
                                                norm->running_var, false, 0.1, 1e-5, false)));
}

TEST(SyncBatchNorm, AloneIsTorchsToTheBit) {
  auto communicator = Communicator::create(World{}, {.name = "alone"});
  SyncBatchNorm norm(BatchNormOptions(kChannels), communicator);
  torch::nn::BatchNorm2d plain{BatchNormOptions(kChannels)};
  on_device::moved(norm);
  on_device::moved(plain);
  const Tensor x = on_device::randn({4, kChannels, 2, 2});
  const Norms mine = run_layer(norm, x, x);
  const Norms theirs = run_layer(plain, x, x);
  for (const auto& [name, tensor] : theirs.tensors) {
    EXPECT_TRUE(torch::equal(tensor, mine.tensors.at(name))) << name;
  }
  communicator->close();
}

// Groups of half of the world: even ranks, odd ranks.
TEST(SyncBatchNorm, JoinsTheRanksOfItsGroupAlone) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank(), world = communicator->world_size();
  std::vector<int> ranks;
  Split split;
  for (int r = rank % 2; r < world; r += 2) {
    ranks.push_back(r);
    split.push_back(r + 1);
  }
  CommunicatorOptions options = communicator->options();
  options.name += rank % 2 == 0 ? " even" : " odd";
  auto group = communicator->new_group(ranks, options);
  SyncBatchNorm norm(BatchNormOptions(kChannels), group);
  give_values(norm, torch::kDouble);
  OneProcess plain(3, BatchNormOptions(kChannels));
  const Tensor x = joined_values(split, {4}, 30 + rank % 2);
  const Tensor mine = rows_of(x, split, group->rank());
  expect_joined(*group, run_layer(norm, mine, mine - 20), plain.run(x, x - 20, torch::kDouble),
                split, 1e-11);
  group->close();
}

TEST(SyncBatchNorm, RefusesWhatItCannotNormalise) {
  auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  SyncBatchNorm norm(BatchNormOptions(kChannels), communicator);
  for (const Tensor& wrong :
       {on_device::ones({4}), on_device::ones({4, 2}), on_device::ones({2, 3, 1, 1, 1, 1}),
        on_device::ones({2, 3}, torch::kLong)}) {
    EXPECT_NE(error_of([&] { norm->forward(wrong); }).find("[N, 3, ...]"), std::string::npos);
  }
  if (world > 1) { // one row in the joined batch
    const int64_t rows = communicator->rank() == 0 ? 1 : 0;
    EXPECT_NE(error_of([&] {
                norm->forward(on_device::ones({rows, kChannels}));
              }).find("one value per channel"),
              std::string::npos);
    const Tensor x = on_device::randn({2, kChannels}).requires_grad_();
    const Tensor y = norm->forward(x).square().sum();
    EXPECT_NE(error_of([&] {
                torch::autograd::grad({y}, {x}, {}, std::nullopt, true);
              }).find("create_graph"),
              std::string::npos);
  }
  // All ranks have no samples; nothing may hang.
  if (world > 1) {
    const Tensor before = norm->running_mean.clone();
    const Tensor none = on_device::ones({0, kChannels}).requires_grad_();
    norm->forward(none).sum().backward();
    EXPECT_EQ(none.grad().sizes(), none.sizes());
    EXPECT_TRUE(torch::equal(before, norm->running_mean));
  }
}

TEST(SyncBatchNorm, RefusesOtherOptionsOnAnotherRankEverywhere) {
  auto communicator = fresh_communicator();
  if (communicator->world_size() == 1) {
    return;
  }
  const bool last = communicator->rank() + 1 == communicator->world_size();
  const auto expect_refused = [&](const BatchNormOptions& other, const char* what) {
    const std::string error =
        error_of([&] { SyncBatchNorm(last ? other : BatchNormOptions(kChannels), communicator); });
    EXPECT_NE(error.find(what), std::string::npos) << error;
  };
  expect_refused(BatchNormOptions(4), "num_features=4");
  expect_refused(BatchNormOptions(kChannels).eps(1e-3), "eps=0.001");
  expect_refused(BatchNormOptions(kChannels).momentum(0.5), "momentum=0.5");
  expect_refused(BatchNormOptions(kChannels).affine(false), "affine=0");
}

} // namespace hasten::sync_norm_test
