#include "hasten/parallel/ddp.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/communicator.h"
#include "support/world.h"

namespace hasten::ddp_test {

using at::Tensor;
using testing_support::fresh_communicator;

torch::nn::Sequential deep_net(uint64_t seed) {
  torch::manual_seed(seed);
  torch::nn::Sequential net;
  for (int i = 0; i < 6; ++i) {
    net->push_back(torch::nn::Linear(32, 32));
    net->push_back(torch::nn::Tanh());
  }
  net->to(torch::kDouble);
  return net;
}

// 33 KiB of fp64 a layer's weight, so that each goes alone.
constexpr DdpOptions kSmallBuckets{
    .bucket_cap_mb = 8.0 / 1024, .first_bucket_mb = 4.0 / 1024};

Tensor rows_of(int rank) {
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(50 + rank);
  return torch::randn({rank + 1, 32}, generator, torch::kDouble);
}

TEST(Ddp, NRanksEqualOneRankOnTheJoinedBatch) {
  auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  const int rank = communicator->rank();
  auto net = deep_net(static_cast<uint64_t>(rank) + 1);
  Ddp ddp(communicator, net.ptr(), kSmallBuckets);
  ASSERT_GE(ddp.bucket_sizes().size(), 6u);
  ddp.begin();
  for (const bool last : {false, true}) { // the same rows twice
    const Tensor loss = net->forward(rows_of(rank)).square().sum();
    ddp.start_backward(last);
    loss.backward();
    ddp.finish_backward();
  }
  if (world > 1) {
    EXPECT_GE(ddp.overlapped_buckets(), 5) << "reduced while backward runs";
  }
  ddp.finish(0.5);

  auto plain = deep_net(1);
  std::vector<Tensor> rows;
  for (int r = 0; r < world; ++r) {
    rows.push_back(rows_of(r));
  }
  plain->forward(torch::cat(rows)).square().sum().backward();
  for (const auto& item : plain->named_parameters()) {
    const Tensor mine = net->named_parameters()[item.key()].grad();
    EXPECT_LE((mine - item.value().grad()).abs().max().item<double>(), 1e-12)
        << item.key();
  }
}

TEST(Ddp, ReducesInLayoutOrderWhatEachRankUses) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  auto net = deep_net(1);
  Ddp ddp(communicator, net.ptr(), kSmallBuckets);
  ddp.begin();
  // Each rank uses other layers, in another order: nobody may wait for ever.
  Tensor x = rows_of(0);
  for (int i = 0; i < 3; ++i) {
    const int layer = 2 * ((rank + 2 * i) % 6);
    x = net[static_cast<size_t>(layer)]->as<torch::nn::Linear>()->forward(x);
  }
  ddp.start_backward(true);
  x.sum().backward();
  ddp.finish_backward();
  ddp.finish(1.0);
  Tensor own = ddp.gradients().buffer(0).clone().reshape({1, -1});
  const Tensor all = communicator->all_gather_rows(own, "check");
  EXPECT_EQ((all - own).abs().max().item<double>(), 0);
  EXPECT_GT(own.abs().max().item<double>(), 0);
}

TEST(Ddp, FirstBucketIsSmallAndAllCoverTheBuffers) {
  auto communicator = fresh_communicator();
  auto net = deep_net(1);
  Ddp ddp(
      communicator,
      net.ptr(),
      {.bucket_cap_mb = 16.0 / 1024, .first_bucket_mb = 1.0 / 1024});
  const auto sizes = ddp.bucket_sizes();
  EXPECT_EQ(sizes.front(), 32 + 1024)
      << "the last layer's bias, then its weight";
  EXPECT_EQ(sizes[1], 2 * (32 + 1024));
  int64_t sum = 0;
  for (const int64_t size : sizes) {
    sum += size;
  }
  EXPECT_EQ(sum, ddp.gradients().buffer(0).numel());
}

} // namespace hasten::ddp_test
