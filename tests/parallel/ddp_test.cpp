#include "hasten/parallel/ddp.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "hasten/core/gradient_place.h"
#include "hasten/core/linear.h"
#include "parallel/ddp_rig.h"
#include "support/on_device.h"

namespace hasten::ddp_test {

torch::nn::Sequential deep_net(uint64_t seed) {
  torch::manual_seed(seed);
  torch::nn::Sequential net;
  for (int i = 0; i < 6; ++i) {
    net->push_back(torch::nn::Linear(32, 32));
    net->push_back(torch::nn::Tanh());
  }
  net->to(testing_support::run_device(), torch::kDouble);
  return net;
}

// 33 KiB of fp64 per layer's weight, so that each has its own bucket.
constexpr DdpOptions kSmallBuckets{.bucket_cap_mb = 8.0 / 1024, .first_bucket_mb = 4.0 / 1024};

TEST(Ddp, NRanksEqualOneRankOnTheJoinedBatch) {
  auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  const int rank = communicator->rank();
  auto net = deep_net(static_cast<uint64_t>(rank) + 1);
  Ddp ddp(communicator, net.ptr(), kSmallBuckets);
  ASSERT_GE(ddp.bucket_sizes().size(), 6u);
  auto plain = deep_net(1);
  const auto wanted = plain_gradient(
      *plain, world, [&](int r) { return plain->forward(rows_of(r, 32)).square().sum(); });
  for (int turn = 0; turn < 3; ++turn) { // from the second on in the learned order
    net->zero_grad();
    ddp.begin();
    for (const bool last : {false, true}) { // two batches of the same rows
      const Tensor loss = net->forward(rows_of(rank, 32)).square().sum();
      ddp.start_backward(last);
      loss.backward();
      ddp.finish_backward();
    }
    ddp.finish(0.5);
    expect_equal_gradients(*net, wanted);
    for (int64_t slot = 0; slot < 12; ++slot) {
      EXPECT_EQ(ddp.gradients().installed(slot), world > 1)
          << "a view of the buffer; a rank alone copies nothing";
    }
    if (world > 1) {
      EXPECT_GE(ddp.reduction().overlapped, 5) << "reduced while backward runs";
      EXPECT_EQ(ddp.order_is_learned(), true);
    }
  }
}

// One weight serves two layers, one layer is unused by rank 0, and each window has two batches.
struct PlacedNet : torch::nn::Module {
  explicit PlacedNet(uint64_t seed) {
    torch::manual_seed(seed);
    shared = register_parameter("shared", torch::randn({32, 32}));
    odd = register_parameter("odd", torch::randn({32, 32}));
    last = register_parameter("last", torch::randn({48, 32}));
  }
  Tensor loss(int rank, int batch, at::ScalarType dtype) const {
    Tensor x = rows_of(rank, 32, batch).repeat({40, 1}).to(dtype);
    for (const Tensor& weight : {shared, shared, rank > 0 ? odd : shared}) {
      x = torch::tanh(fast_linear(x, weight.to(dtype)) / 8);
    }
    return fast_linear(x, last.to(dtype)).square().sum();
  }
  Tensor shared, odd, last;
};

TEST(Ddp, LayersMakeTheirGradientsInTheBuffers) {
  auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  const int rank = communicator->rank();
  if (!testing_support::run_device().is_cpu()) {
    GTEST_SKIP() << "gradients are made in place on CPUs";
  }
  auto net = std::make_shared<PlacedNet>(static_cast<uint64_t>(rank) + 1);
  DdpOptions options = kSmallBuckets;
  options.find_unused_parameters = true;
  Ddp ddp(communicator, net, options);
  PlacedNet plain(1);
  const auto wanted = plain_gradient(plain, world, [&](int r) {
    return plain.loss(r, 0, at::kDouble) + plain.loss(r, 1, at::kDouble);
  });
  for (int turn = 0; turn < 3; ++turn) {
    net->zero_grad();
    ddp.begin();
    int64_t places = 0;
    for (const int batch : {0, 1}) {
      const detail::GradientPlaceScope scope([&](const Tensor& parameter) {
        const Tensor place = ddp.gradients().reserve_gradient_place(parameter);
        places += place.defined();
        return place;
      });
      const Tensor loss = net->loss(rank, batch, at::kFloat);
      ddp.start_backward(batch == 1, {.loss = loss});
      loss.backward();
      ddp.finish_backward();
    }
    ddp.finish(1);
    EXPECT_EQ(places, world == 1 ? 0 : rank == 0 ? 2 : 3);
    for (const auto& [name, gradient] : wanted) {
      const Tensor mine = net->named_parameters()[name].grad();
      ASSERT_EQ(mine.defined(), gradient.defined()) << name;
      if (mine.defined()) {
        EXPECT_LE(((mine - gradient).norm() / gradient.norm()).item<double>(), 1e-5) << name;
      }
    }
  }
}

TEST(Ddp, ReducesInOneOrderWhatEachRankUses) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  auto net = deep_net(1);
  DdpOptions options = kSmallBuckets;
  options.find_unused_parameters = true;
  Ddp ddp(communicator, net.ptr(), options);
  // Each rank uses different layers in a different order. No rank may wait forever.
  const auto loss = [&](int r) {
    Tensor x = rows_of(r, 32);
    for (int i = 0; i < 3; ++i) {
      const int layer = 2 * ((r + 2 * i) % 6);
      x = net[static_cast<size_t>(layer)]->as<torch::nn::Linear>()->forward(x);
    }
    return x.sum();
  };
  for (int turn = 0; turn < 2; ++turn) {
    net->zero_grad();
    reduce_once(ddp, rank, loss);
    ddp.gradients().install(); // a world of one rank has its gradients elsewhere
    Tensor own = ddp.gradients().buffers()[0].clone().reshape({1, -1});
    const Tensor all = communicator->all_gather_rows(own, "check");
    EXPECT_EQ((all - own).abs().max().item<double>(), 0);
    EXPECT_GT(own.abs().max().item<double>(), 0);
  }
}

TEST(Ddp, FirstBucketIsSmallAndAllCoverTheBuffers) {
  auto communicator = fresh_communicator();
  auto net = deep_net(1);
  Ddp ddp(communicator, net.ptr(), {.bucket_cap_mb = 16.0 / 1024, .first_bucket_mb = 1.0 / 1024});
  const auto sizes = ddp.bucket_sizes();
  EXPECT_EQ(sizes.front(), 32 + 1024) << "the last layer's bias, then its weight";
  EXPECT_EQ(sizes[1], 2 * (32 + 1024));
  EXPECT_EQ(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}),
            ddp.gradients().buffers()[0].numel());
}

// Modules are normally registered in the order of use, and backward has the reverse order. Here
// they are registered in reverse, so the layout's first guess is wrong everywhere.
TEST(Ddp, LearnsTheBucketOrderFromRankZerosFirstBackward) {
  auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  const int rank = communicator->rank();
  Parts net(static_cast<uint64_t>(rank) + 1);
  Ddp ddp(communicator, net.ptr(), kTinyBuckets);
  const std::vector<int64_t> before = ddp.gradients().layout().order();
  // Ranks use the parts in different orders; rank 0's order is learned.
  const auto use = [](int r) {
    return r == 0 ? std::vector<int>{2, 0, 1} : std::vector<int>{1, 0, 2};
  };
  Parts plain(1);
  const auto wanted =
      plain_gradient(*plain, world, [&](int r) { return plain->loss(rows_of(r, 6), use(r)); });
  for (int turn = 0; turn < 3; ++turn) {
    reduce_once(ddp, rank, [&](int r) { return net->loss(rows_of(r, 6), use(r)); });
    expect_equal_gradients(*net, wanted);
    net->zero_grad();
  }
  const auto& layout = ddp.gradients().layout();
  if (world == 1) {
    EXPECT_EQ(layout.order(), before) << "nothing to reduce, nothing to learn";
    return;
  }
  std::vector<std::string> names;
  for (const int64_t slot : layout.order()) {
    names.push_back(layout.slots()[static_cast<size_t>(slot)].name);
  }
  for (size_t i = 0; i < 6; ++i) {
    const std::vector<std::string> parts{"part1", "part0", "part2"};
    EXPECT_EQ(names[i].substr(0, 5), parts[i / 2]) << i;
  }
  EXPECT_EQ(layout.slots()[static_cast<size_t>(layout.order()[1])].offset % 8, 0);

  // A new Ddp that loads the state starts with the learned order.
  NamedTensors tensors;
  nlohmann::json values;
  ddp.save_state(tensors, values);
  Parts again(1);
  Ddp resumed(communicator, again.ptr(), kTinyBuckets);
  resumed.load_state(tensors, values);
  EXPECT_EQ(resumed.gradients().layout().order(), layout.order())
      << "at once: a window under way is laid out in it";
  reduce_once(resumed, rank, [&](int r) { return again->loss(rows_of(r, 6), use(r)); });
  EXPECT_EQ(resumed.gradients().layout().order(), layout.order());
  expect_equal_gradients(*again, wanted);
  values["bucket_order"][0] = "part9.weight";
  EXPECT_NE(what_of([&] { resumed.load_state(tensors, values); }).find("part9.weight"),
            std::string::npos);
}

TEST(Ddp, ReportsHowMuchCommunicationWasExposed) {
  auto communicator = fresh_communicator();
  Parts net(1);
  Ddp ddp(communicator, net.ptr(), kTinyBuckets);
  reduce_once(ddp, communicator->rank(),
              [&](int r) { return net->loss(rows_of(r, 6), {0, 1, 2}); });
  const ReductionReport& report = ddp.reduction();
  if (communicator->world_size() == 1) {
    EXPECT_EQ(report.buckets, 0);
    EXPECT_EQ(report.communication_seconds, 0);
    return;
  }
  EXPECT_EQ(report.buckets, 6);
  EXPECT_EQ(report.overlapped, 6) << "the last, too, starts in a hook";
  EXPECT_EQ(report.bytes, 3 * (40 + 8) * 8);
  EXPECT_GT(report.communication_seconds, 0);
  EXPECT_GT(report.exposed_seconds, 0);
  EXPECT_LT(report.exposed_seconds, 20);
}

// A convolution whose weights are channels-last on the ranks in `last`.
struct ImagesImpl : torch::nn::Module {
  explicit ImagesImpl(bool last) {
    torch::manual_seed(3);
    conv = register_module("conv", torch::nn::Conv2d(3, 4, 3));
    to(testing_support::run_device(), torch::kDouble);
    if (last) {
      const torch::NoGradGuard no_grad;
      conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    }
  }
  Tensor loss(int rank) {
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(70 + rank);
    return conv->forward(on_device::randn({2, 3, 5, 5}, generator, torch::kDouble)).square().sum();
  }
  torch::nn::Conv2d conv{nullptr};
};
TORCH_MODULE(Images);

TEST(Ddp, ChannelsLastOnEveryRankIsTheJoinedBatch) {
  auto communicator = fresh_communicator();
  Images net(true);
  Ddp ddp(communicator, net.ptr());
  Images plain(false);
  const auto wanted =
      plain_gradient(*plain, communicator->world_size(), [&](int r) { return plain->loss(r); });
  for (int turn = 0; turn < 3; ++turn) { // from the second on in the learned order
    net->zero_grad();
    reduce_once(ddp, communicator->rank(), [&](int r) { return net->loss(r); });
    expect_equal_gradients(*net, wanted);
  }
  if (communicator->world_size() > 1) {
    EXPECT_EQ(net->conv->weight.grad().strides(), net->conv->weight.strides())
        << "optimizers walk both in one pass";
  }
}

TEST(Ddp, StridesThatDifferBetweenRanksAreRefusedByName) {
  auto communicator = fresh_communicator();
  if (communicator->world_size() == 1) {
    return;
  }
  Images net(communicator->rank() == 1);
  const std::string what = what_of([&] { Ddp(communicator, net.ptr()); });
  EXPECT_NE(what.find("rank 1's model has parameter \"conv.weight\""), std::string::npos) << what;
  EXPECT_NE(what.find("strides"), std::string::npos) << what;
}

// One rank converts the weights after construction, and the buckets are reordered later; gradients
// keep their places.
TEST(Ddp, StridesOfTheFirstDayStay) {
  auto communicator = fresh_communicator();
  Images net(false);
  Ddp ddp(communicator, net.ptr());
  if (communicator->rank() == 0) {
    net->conv->weight.set_data(
        net->conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
  }
  Images plain(false);
  const auto wanted =
      plain_gradient(*plain, communicator->world_size(), [&](int r) { return plain->loss(r); });
  for (int turn = 0; turn < 3; ++turn) {
    net->zero_grad();
    reduce_once(ddp, communicator->rank(), [&](int r) { return net->loss(r); });
    expect_equal_gradients(*net, wanted);
  }
}

// All kinds of tensors in one list. Some are sent alone and some together. There are more than fit
// into one operation. Some start after an odd number of bytes. One is not contiguous on one rank.
TEST(Ddp, EveryRankStartsWithRankZerosTensors) {
  auto communicator = fresh_communicator();
  struct Mixed : torch::nn::Module {
    explicit Mixed(int64_t first) {
      const auto ramp = [&](at::IntArrayRef sizes, at::ScalarType type) {
        const int64_t numel = c10::multiply_integers(sizes);
        return (on_device::arange(numel) + first).reshape(sizes).to(type);
      };
      register_buffer("mask", ramp({3}, torch::kBool));
      register_parameter("bias", ramp({5}, torch::kDouble));
      register_parameter("large", ramp({700, 401}, torch::kFloat));
      const Tensor scattered = ramp({6, 4}, torch::kFloat).t();
      register_parameter( // same shape on all ranks, not contiguous on rank 0
          "scattered", first == 0 ? scattered : scattered.contiguous(), false);
      register_buffer("counter", ramp({}, torch::kLong));
      register_buffer("empty", ramp({0, 2}, torch::kFloat));
      register_parameter("half", ramp({7}, torch::kBFloat16));
      for (int i = 0; i < 20; ++i) { // 4.8 MB
        register_parameter("middle" + std::to_string(i), ramp({60'000 - i}, torch::kFloat));
      }
    }
  };
  const auto net = std::make_shared<Mixed>(3 * communicator->rank());
  const Ddp ddp(communicator, net);
  const Mixed wanted(0);
  for (const auto& item : wanted.named_parameters()) {
    EXPECT_TRUE(torch::equal(net->named_parameters()[item.key()], item.value())) << item.key();
  }
  for (const auto& item : wanted.named_buffers()) {
    EXPECT_TRUE(torch::equal(net->named_buffers()[item.key()], item.value())) << item.key();
  }
  EXPECT_EQ(net->named_parameters()["scattered"].is_contiguous(), communicator->rank() > 0);
}

} // namespace hasten::ddp_test
