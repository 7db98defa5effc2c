// Hooks compared with the plain sum. Worlds 1 to 4. Each rank has its own gradients.
#include "hasten/parallel/comm_hook.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "parallel/ddp_rig.h"
#include "support/on_device.h"
#include "support/rounding_hook.h"

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
  const std::string what = what_of([&] {
    if (communicator->is_main()) {
      ddp.register_comm_hook(std::make_shared<Fp16CompressHook>());
    } else {
      ddp.register_comm_hook(std::make_shared<Bf16CompressHook>());
    }
  });
  EXPECT_EQ(what.empty(), communicator->world_size() == 1) << what;
}

// What a hook keeps belongs to a rank, and needs that hook.
TEST(CommHook, GoesOnFromItsSavedStateBitForBit) {
  HookRig rig(std::make_shared<testing_support::RoundingHook>());
  for (int turn = 0; turn < 4; ++turn) {
    rig.reduce(turn);
  }
  NamedTensors tensors;
  nlohmann::json values;
  rig.ddp.save_state(tensors, values);
  for (auto& [name, tensor] : tensors) {
    tensor = tensor.clone();
  }
  EXPECT_EQ(tensors.count("comm_hook.lost.matrix"), rig.world > 1 ? 1u : 0u);
  rig.reduce(4);
  const Tensor wanted = rig.net->matrix.grad().clone();

  Ddp again(rig.communicator, rig.net.ptr());
  EXPECT_NE(what_of([&] { again.load_state(tensors, values); }).find("rounding"), std::string::npos)
      << "a hook's state needs that hook";
  again.register_comm_hook(std::make_shared<testing_support::RoundingHook>());
  again.load_state(tensors, values);
  rig.net->zero_grad();
  again.begin();
  again.start_backward(true);
  rig.net->loss(rig.rank, 4).backward();
  again.finish_backward();
  again.finish(1);
  EXPECT_TRUE(torch::equal(rig.net->matrix.grad(), wanted));
}

} // namespace hasten::ddp_test
