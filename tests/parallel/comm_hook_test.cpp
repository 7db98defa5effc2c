// Hooks compared with the plain sum, and PowerSGD with its definition in fp64 in one process.
// Worlds 1 to 4. Each rank has its own gradients.
#include "hasten/parallel/comm_hook.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "parallel/ddp_rig.h"
#include "support/on_device.h"

namespace hasten::detail {
void orthonormalize_(at::Tensor matrix); // of power_sgd.cpp
}

namespace hasten::ddp_test {

// Rank r's gradients of turn t: a matrix [12, 10] and a vector [7] with padding in the bucket.
Tensor matrix_of(int rank, int turn) {
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(900 + rank + 50 * turn);
  return on_device::randn({12, 10}, generator, torch::kFloat);
}
Tensor vector_of(int rank, int turn) {
  return matrix_of(rank, turn).flatten().narrow(0, 0, 7).clone() * 3;
}

struct TwoImpl : torch::nn::Module {
  TwoImpl() {
    matrix = register_parameter("matrix", on_device::zeros({12, 10}));
    vector = register_parameter("vector", on_device::zeros({7}));
  }
  Tensor loss(int rank, int turn) {
    return (matrix * matrix_of(rank, turn)).sum() + (vector * vector_of(rank, turn)).sum();
  }
  Tensor matrix, vector;
};
TORCH_MODULE(Two);

struct HookRig {
  explicit HookRig(std::shared_ptr<CommHook> hook, DdpOptions options = {})
      : communicator(fresh_communicator()),
        world(communicator->world_size()),
        rank(communicator->rank()),
        ddp(communicator, net.ptr(), options) {
    ddp.register_comm_hook(std::move(hook));
  }
  void reduce(int turn, double factor = 1) {
    net->zero_grad();
    ddp.begin();
    ddp.start_backward(true, {.factor = [factor] { return factor; }});
    net->loss(rank, turn).backward();
    ddp.finish_backward();
    ddp.finish(factor);
  }
  Tensor sum(const std::function<Tensor(int)>& of_rank) const {
    Tensor sum = of_rank(0).to(torch::kDouble);
    for (int r = 1; r < world; ++r) {
      sum = sum + of_rank(r).to(torch::kDouble);
    }
    return sum;
  }
  void expect_equal_on_all_ranks() {
    const Tensor own = ddp.gradients().buffers()[0].clone().reshape({1, -1});
    const Tensor all = communicator->all_gather_rows(own, "check");
    EXPECT_EQ((all - own).abs().max().item<double>(), 0) << "to the bit";
  }
  std::shared_ptr<Communicator> communicator;
  int world, rank;
  Two net{};
  Ddp ddp;
};

double largest(const Tensor& tensor) {
  return tensor.abs().max().to(torch::kDouble).item<double>();
}

// Messages are rounded once and the fp32 sum once. The test computes the same, so results are equal
// bit for bit.
template <typename Hook>
void expect_wire(at::ScalarType wire) {
  HookRig rig(std::make_shared<Hook>());
  for (int turn = 0; turn < 3; ++turn) {
    rig.reduce(turn, 0.25);
    rig.expect_equal_on_all_ranks();
    const auto rounded = [&](auto of_rank) {
      if (rig.world == 1) {
        return of_rank(0) * 0.25f;
      }
      Tensor sum = (of_rank(0) * 0.25f).to(wire).to(torch::kFloat);
      for (int r = 1; r < rig.world; ++r) {
        sum = sum + (of_rank(r) * 0.25f).to(wire).to(torch::kFloat);
      }
      return sum.to(wire).to(torch::kFloat);
    };
    EXPECT_TRUE(
        torch::equal(rig.net->matrix.grad(), rounded([&](int r) { return matrix_of(r, turn); })));
    EXPECT_TRUE(
        torch::equal(rig.net->vector.grad(), rounded([&](int r) { return vector_of(r, turn); })));
  }
}

TEST(CommHook, Fp16OnTheWireRoundsOnceAndAddsInFp32) {
  expect_wire<Fp16CompressHook>(torch::kHalf);
}
TEST(CommHook, Bf16OnTheWireRoundsOnceAndAddsInFp32) {
  expect_wire<Bf16CompressHook>(torch::kBFloat16);
}

TEST(CommHook, RanksMustRegisterTheSame) {
  auto communicator = fresh_communicator();
  Two net;
  Ddp ddp(communicator, net.ptr());
  const auto rank = static_cast<uint64_t>(communicator->rank());
  const std::string what = what_of([&] {
    ddp.register_comm_hook(
        std::make_shared<PowerSgdHook>(PowerSgdOptions{.random_seed = rank == 0 ? 0u : 1u}));
  });
  EXPECT_EQ(what.empty(), communicator->world_size() == 1) << what;
}

// Values computed by hand, including signs. LAPACK's values depend on its kernels. For dependent
// columns even the space depends on them.
TEST(PowerSgd, OrthonormalizesTheSameWayOnEveryProcessor) {
  Tensor square = on_device::tensor({{3.0f, 1.0f}, {4.0f, 0.0f}});
  detail::orthonormalize_(square);
  EXPECT_TRUE(torch::equal(square, on_device::tensor({{0.6f, 0.8f}, {0.8f, -0.6f}}))) << square;
  Tensor dependent = on_device::tensor(
      {{0.0f, 0.0f, 0.0f}, {2.0f, 4.0f, 0.0f}, {0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f}});
  detail::orthonormalize_(dependent);
  EXPECT_TRUE(torch::equal(
      dependent,
      on_device::tensor(
          {{0.0f, 1.0f, 0.0f}, {1.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 1.0f}, {0.0f, 0.0f, 0.0f}})))
      << dependent;
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(4);
  Tensor tall = on_device::randn({300, 3}, generator, torch::kDouble);
  tall = torch::cat({tall, tall.sum(1, true)}, 1);
  const Tensor space = tall.clone();
  detail::orthonormalize_(tall);
  EXPECT_LE(
      (torch::mm(tall.t(), tall) - on_device::eye(4, torch::kDouble)).abs().max().item<double>(),
      1e-12);
  EXPECT_LE((space - torch::mm(tall, torch::mm(tall.t(), space))).abs().max().item<double>(),
            1e-12);
}

TEST(PowerSgd, RefusesOptionsOutOfRange) {
  EXPECT_THROW(PowerSgdHook({.matrix_approximation_rank = 0}), InputError);
  EXPECT_THROW(PowerSgdHook({.start_powerSGD_iter = 1}), InputError);
  EXPECT_THROW(PowerSgdHook({.min_compression_rate = 0}), InputError);
  EXPECT_NO_THROW(
      PowerSgdHook({.start_powerSGD_iter = 0, .use_error_feedback = false, .warm_start = false}));
}

// The result is the projection of the sum of (gradient + error) on a space. The next error is what
// the projection drops. The reference computes this space by a power iteration from the factor of
// the turn before, which it takes from that turn's result.
TEST(PowerSgd, IsThePowerIterationWithErrorFeedback) {
  auto hook = std::make_shared<PowerSgdHook>(PowerSgdOptions{
      .matrix_approximation_rank = 2, .start_powerSGD_iter = 2, .min_compression_rate = 1});
  HookRig rig(hook);
  if (rig.world == 1) {
    rig.reduce(0);
    EXPECT_EQ(largest(rig.net->matrix.grad() - matrix_of(0, 0)), 0);
    return;
  }
  Tensor error = on_device::zeros({12, 10}, torch::kDouble); // summed over ranks
  Tensor factor; // [10, 2]
  for (int turn = 0; turn < 6; ++turn) {
    rig.reduce(turn, 0.5);
    rig.expect_equal_on_all_ranks();
    const Tensor plain = 0.5 * rig.sum([&](int r) { return matrix_of(r, turn); });
    const Tensor mine = rig.net->matrix.grad().to(torch::kDouble);
    EXPECT_LE(
        largest(rig.net->vector.grad() - 0.5 * rig.sum([&](int r) { return vector_of(r, turn); })),
        1e-5)
        << "a vector is never compressed";
    if (turn < 2) { // warm-up
      EXPECT_LE(largest(mine - plain), 1e-5);
      continue;
    }
    const Tensor wanted = plain + error;
    if (!factor.defined()) { // the first factor is random, so the space is not known
      EXPECT_EQ(torch::linalg_matrix_rank(mine, 1e-4).item<int64_t>(), 2);
      EXPECT_GT(largest(mine - wanted), 0.1) << "rank 2 cannot hold it";
    } else {
      const Tensor q = std::get<0>(torch::linalg_qr(factor));
      const Tensor p = std::get<0>(torch::linalg_qr(torch::mm(wanted, q)));
      EXPECT_LE(largest(mine - torch::mm(p, torch::mm(p.t(), wanted))), 2e-5) << turn;
    }
    error = wanted - mine;
    // The result is P Q^T with orthonormal P: its row space is Q's.
    factor = std::get<2>(torch::linalg_svd(mine)).narrow(0, 0, 2).t();
  }
  EXPECT_GT(hook->compression_rate(), 1.2);
  EXPECT_EQ(hook->iteration(), 6);
}

// Vector and matrix are in separate buckets. Warm-up ends between two sums, not within one.
TEST(PowerSgd, CountsSumsWhateverTheBuckets) {
  auto hook = std::make_shared<PowerSgdHook>(
      PowerSgdOptions{.start_powerSGD_iter = 3, .min_compression_rate = 1});
  HookRig rig(hook, kTinyBuckets);
  EXPECT_EQ(rig.ddp.bucket_sizes().size(), 2u);
  for (int turn = 0; turn < 4; ++turn) {
    rig.reduce(turn);
    if (rig.world == 1) {
      continue;
    }
    EXPECT_EQ(hook->iteration(), turn + 1);
    const Tensor plain = rig.sum([&](int r) { return matrix_of(r, turn); });
    EXPECT_EQ(largest(rig.net->matrix.grad() - plain) < 1e-5, turn < 3) << turn;
  }
}

TEST(PowerSgd, GoesOnFromItsSavedStateBitForBit) {
  const PowerSgdOptions options{.start_powerSGD_iter = 2, .min_compression_rate = 1};
  HookRig rig(std::make_shared<PowerSgdHook>(options));
  for (int turn = 0; turn < 4; ++turn) {
    rig.reduce(turn);
  }
  NamedTensors tensors;
  nlohmann::json values;
  rig.ddp.save_state(tensors, values);
  for (auto& [name, tensor] : tensors) {
    tensor = tensor.clone();
  }
  EXPECT_EQ(tensors.count("comm_hook.error.matrix"), rig.world > 1 ? 1u : 0u);
  rig.reduce(4);
  const Tensor wanted = rig.net->matrix.grad().clone();

  Ddp again(rig.communicator, rig.net.ptr());
  EXPECT_NE(what_of([&] { again.load_state(tensors, values); }).find("powerSGD"), std::string::npos)
      << "a hook's state needs that hook";
  again.register_comm_hook(std::make_shared<PowerSgdHook>(options));
  again.load_state(tensors, values);
  rig.net->zero_grad();
  again.begin();
  again.start_backward(true);
  rig.net->loss(rig.rank, 4).backward();
  again.finish_backward();
  again.finish(1);
  EXPECT_TRUE(torch::equal(rig.net->matrix.grad(), wanted));
}

TEST(PowerSgd, AnInfiniteGradientIsSeenAndForgotten) {
  HookRig rig(std::make_shared<PowerSgdHook>(
      PowerSgdOptions{.start_powerSGD_iter = 2, .min_compression_rate = 1}));
  for (int turn = 0; turn < 5; ++turn) {
    const double factor = turn == 3 ? std::numeric_limits<double>::infinity() : 1;
    rig.reduce(turn, factor);
    EXPECT_EQ(rig.net->matrix.grad().isfinite().all().item<bool>(), turn != 3);
  }
}

} // namespace hasten::ddp_test
