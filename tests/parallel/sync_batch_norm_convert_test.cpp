// Models with torch's own layers: which of them are synchronised and for how long, and that all
// others equal torch's bit for bit.
#include "parallel/sync_batch_norm_rig.h"
#include "support/on_device.h"

namespace hasten::sync_norm_test {

using testing_support::fresh_communicator;
using torch::nn::BatchNormOptions;

struct SmallNetImpl : torch::nn::Cloneable<SmallNetImpl> {
  explicit SmallNetImpl(int64_t channels = 4) : width(channels) { SmallNetImpl::reset(); }
  void reset() override {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, width, 3)));
    first = register_module("first", torch::nn::BatchNorm2d(width));
    linear = register_module("linear", torch::nn::Linear(width * 4, 6));
    second = register_module("second", torch::nn::BatchNorm1d(6));
    to(testing_support::run_device(), torch::kDouble);
  }
  // x: [N, 2, 4, 4]
  Tensor forward(const Tensor& x) {
    const Tensor h = torch::relu(first->forward(conv->forward(x))).flatten(1);
    return second->forward(linear->forward(h));
  }
  int64_t width;
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d first{nullptr};
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d second{nullptr};
};
TORCH_MODULE(SmallNet);

static SmallNet net_of_seed(uint64_t seed) {
  torch::manual_seed(seed);
  return SmallNet();
}

// torch throws for one sample of [N, C] before a kernel is called.
static Split converted_split(int world) {
  return world == 1   ? Split{5}
         : world == 2 ? Split{2, 7}
         : world == 3 ? Split{2, 0, 4}
                      : Split{3, 0, 4, 2};
}

static Tensor images(const Split& split, uint64_t seed) {
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(seed);
  return on_device::randn({joined_rows(split), 2, 4, 4}, generator, torch::kDouble);
}

TEST(ConvertSyncBatchNorm, AModelEqualsOneProcessOnTheJoinedBatch) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  const Split split = converted_split(communicator->world_size());
  SmallNet net = net_of_seed(1), plain = net_of_seed(1);
  const auto conversion = convert_sync_batchnorm(net, communicator);
  EXPECT_EQ(conversion.layers, (std::vector<std::string>{"first", "second"}));
  for (uint64_t call = 0; call < 2; ++call) {
    const Tensor x = images(split, call);
    Norms wanted = run_layer(plain, x, x.flatten(1).narrow(1, 0, 6));
    const Tensor mine = rows_of(x, split, rank);
    expect_joined(*communicator, run_layer(net, mine, mine.flatten(1).narrow(1, 0, 6)), wanted,
                  split, 1e-12);
  }
}

TEST(ConvertSyncBatchNorm, LayersOfOtherModelsStayTorchsToTheBit) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  SmallNet other = net_of_seed(7), twin = net_of_seed(7);
  const Tensor x = on_device::randn({3, 2, 4, 4}, torch::kDouble);
  const Tensor dy = on_device::randn({3, 6}, torch::kDouble);
  const Norms before = run_layer(other, x, dy);
  SmallNet net = net_of_seed(1);
  CountedCommunicator counted(communicator);
  const auto conversion = convert_sync_batchnorm(net, counted.watched);
  counted.reset();
  const Norms after = run_layer(twin, x, dy);
  EXPECT_EQ(counted.forwards, 0);
  for (const auto& [name, tensor] : before.tensors) {
    EXPECT_TRUE(torch::equal(tensor, after.tensors.at(name))) << name;
  }
  // In evaluation the converted model also equals torch's.
  net->eval();
  SmallNet plain = net_of_seed(1);
  plain->eval();
  EXPECT_TRUE(torch::equal(net->forward(x), plain->forward(x)));
  // A clone is not converted.
  net->train();
  const auto clone = std::dynamic_pointer_cast<SmallNetImpl>(net->clone());
  plain->train();
  EXPECT_TRUE(torch::equal(clone->forward(x), plain->forward(x)));
  EXPECT_EQ(counted.forwards, 0) << rank;
}

TEST(ConvertSyncBatchNorm, LastsAsLongAsItsHandle) {
  CountedCommunicator counted(fresh_communicator());
  const int sent = counted.watched->world_size() > 1 ? 2 : 0; // per forward
  SmallNet net;
  const Tensor x = on_device::randn({3, 2, 4, 4}, torch::kDouble);
  const auto forward = [&] {
    counted.reset();
    net->forward(x);
    return counted.forwards;
  };
  {
    auto first = convert_sync_batchnorm(net, counted.watched);
    EXPECT_EQ(forward(), sent);
    if (sent > 0) {
      EXPECT_NE(error_of([&] {
                  static_cast<void>(convert_sync_batchnorm(net, counted.watched));
                }).find("already converted"),
                std::string::npos);
    }
    EXPECT_EQ(forward(), sent) << "what was refused left the first as it was";
    SyncBatchNormConversion moved = std::move(first);
    EXPECT_EQ(forward(), sent);
    moved.remove();
    EXPECT_EQ(forward(), 0);
    moved = convert_sync_batchnorm(net, counted.watched);
    EXPECT_EQ(forward(), sent);
  }
  EXPECT_EQ(forward(), 0);
  // A model that is destroyed before its handle leaves no mark that could match another tensor.
  const auto kept = convert_sync_batchnorm(net, counted.watched);
  for (int i = 0; i < 20; ++i) {
    net = SmallNet();
    EXPECT_EQ(forward(), 0);
  }
}

TEST(ConvertSyncBatchNorm, ALayerThatTracksNothingIsKnownByItsWeight) {
  CountedCommunicator counted(fresh_communicator());
  const int world = counted.watched->world_size();
  torch::nn::Sequential net(
      torch::nn::BatchNorm1d(BatchNormOptions(kChannels).track_running_stats(false)));
  on_device::moved(net);
  const auto conversion = convert_sync_batchnorm(net, counted.watched);
  const Tensor x = on_device::randn({4, kChannels});
  counted.reset();
  net->forward(x);
  EXPECT_EQ(counted.forwards, world > 1 ? 1 : 0);
  counted.reset();
  net->eval(); // here torch also uses the batch's statistics, those of this rank
  EXPECT_LE(largest(net->forward(x).mean(0)), 1e-5);
  EXPECT_EQ(counted.forwards, 0);
  torch::nn::Sequential bare(
      torch::nn::BatchNorm1d(BatchNormOptions(kChannels).track_running_stats(false).affine(false)));
  if (world > 1) {
    EXPECT_NE(error_of([&] {
                static_cast<void>(convert_sync_batchnorm(bare, counted.watched));
              }).find("batch norm \"0\" has neither"),
              std::string::npos);
  }
}

// Samples that do not count are normalised with the other samples' statistics.
TEST(ConvertSyncBatchNorm, RowsThatDoNotCountChangeNothingForOthers) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank(), world = communicator->world_size();
  if (world == 1) {
    return;
  }
  const bool counts = rank + 1 < world;
  Split split(static_cast<size_t>(world), 4), counted = split;
  counted.back() = 0;
  torch::nn::BatchNorm1d norm{BatchNormOptions(kChannels)};
  give_values(norm, torch::kDouble);
  const auto conversion =
      convert_sync_batchnorm(norm, communicator, {.rows_count = [&] { return counts; }});
  OneProcess plain(3, BatchNormOptions(kChannels));
  const Tensor x = joined_values(counted, {5}, 8);
  const Tensor dy = joined_values(counted, {5}, 9) - 20;
  const Norms wanted = plain.run(x, dy, torch::kDouble);
  Norms mine = counts ? run_layer(norm, rows_of(x, counted, rank), rows_of(dy, counted, rank))
                      : run_layer(norm, joined_values({4}, {5}, 99),
                                  on_device::zeros({4, kChannels, 5}, torch::kDouble));
  if (!counts) {
    EXPECT_EQ(largest(mine.tensors.at("dx")), 0);
    const Tensor variance =
        (norm->running_var - 0.9) / 0.1 * (20 * (world - 1) - 1) / (20 * (world - 1)) +
        1e-5; // the joined variance, computed from running_var's first update
    const Tensor wanted_y =
        (joined_values({4}, {5}, 99) - (norm->running_mean * 10).view({1, 3, 1})) /
            variance.sqrt().view({1, 3, 1}) * norm->weight.view({1, 3, 1}) +
        norm->bias.view({1, 3, 1});
    EXPECT_LE(largest(mine.tensors.at("y") - wanted_y), 1e-9);
    const auto no_rows = on_device::zeros({0, kChannels, 5}, torch::kDouble);
    mine.tensors["y"] = mine.tensors["dx"] = no_rows;
  }
  expect_joined(*communicator, mine, wanted, counted, 1e-12);
}

TEST(ConvertSyncBatchNorm, RefusesAnotherModelOnAnotherRankEverywhere) {
  auto communicator = fresh_communicator();
  if (communicator->world_size() == 1) {
    return;
  }
  const bool last = communicator->rank() + 1 == communicator->world_size();
  const auto refusal = [&](const std::shared_ptr<torch::nn::Module>& model) {
    return error_of([&] { static_cast<void>(convert_sync_batchnorm(model, communicator)); });
  };
  const std::string wide = refusal(SmallNet(last ? 5 : 4).ptr());
  EXPECT_NE(wide.find("batch norm \"first\" as num_features=5"), wide.npos) << wide;
  torch::nn::Sequential one(torch::nn::BatchNorm1d(4));
  torch::nn::Sequential two(torch::nn::BatchNorm1d(4), torch::nn::BatchNorm1d(4));
  const std::string more = refusal(last ? two.ptr() : one.ptr());
  EXPECT_NE(more.find("batch norm \"1\""), more.npos) << more;
  two->to(testing_support::run_device(), torch::kDouble);
  const std::string typed = refusal(
      last ? two.ptr()
           : torch::nn::Sequential(torch::nn::BatchNorm1d(4), torch::nn::BatchNorm1d(4)).ptr());
  EXPECT_NE(typed.find("Double"), typed.npos) << typed;
}

} // namespace hasten::sync_norm_test
