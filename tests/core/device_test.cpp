#include "hasten/core/device.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>

#include "hasten/core/memory.h"

namespace hasten::detail {

at::Tensor state_of_torch() { return at::detail::getDefaultCPUGenerator().get_state(); }

// Draws an odd number of normal numbers, so that the generator keeps one for the next draw.
at::Tensor draw() { return at::randn({3}); }

TEST(GeneratorState, RestoresTheGeneratorOfTheCpuExactly) {
  torch::manual_seed(3);
  draw();
  const at::Tensor before = state_of_torch();
  const GeneratorState state;
  EXPECT_TRUE(torch::equal(state.tensor(), before));
  const at::Tensor first = draw();
  EXPECT_FALSE(torch::equal(state_of_torch(), before));
  EXPECT_FALSE(state.again().same_as(state));
  state.restore();
  EXPECT_TRUE(torch::equal(state_of_torch(), before));
  EXPECT_TRUE(state.again().same_as(state));
  EXPECT_TRUE(torch::equal(draw(), first));
}

TEST(GeneratorState, ANormalNumberThatWaitsIsAPartOfIt) {
  torch::manual_seed(3);
  at::normal(0.0, 1.0, {1});
  const GeneratorState state;
  const at::Tensor before = state_of_torch();
  const at::Tensor second = at::normal(0.0, 1.0, {1});
  EXPECT_FALSE(state.again().same_as(state)); // the engine may be the same
  state.restore();
  EXPECT_TRUE(torch::equal(state_of_torch(), before));
  EXPECT_TRUE(torch::equal(at::normal(0.0, 1.0, {1}), second));
}

TEST(GeneratorState, IsTheSameFromItsTensor) {
  torch::manual_seed(4);
  draw();
  const at::Tensor saved = GeneratorState().tensor();
  const at::Tensor first = draw();
  const at::Tensor later = state_of_torch();
  const GeneratorState loaded(at::kCPU, saved);
  EXPECT_TRUE(torch::equal(state_of_torch(), later));
  loaded.restore();
  EXPECT_TRUE(torch::equal(state_of_torch(), saved));
  EXPECT_TRUE(torch::equal(draw(), first));
  EXPECT_THROW(GeneratorState(at::kCPU, saved.slice(0, 1)), c10::Error);
}

TEST(GeneratorState, TakesNoTensorMemory) {
  install_memory_meter();
  const int64_t before = memory_stats().allocations;
  const GeneratorStates states = generator_states({at::kCPU});
  set_generator_states(states);
  EXPECT_EQ(states.size(), 1U); // the CPU's once
  EXPECT_EQ(memory_stats().allocations, before);
}

TEST(GeneratorState, IsOfAnyGenerator) {
  at::Generator own = seeded_generator(7);
  const at::Tensor torchs = state_of_torch();
  const GeneratorState state(own);
  const at::Tensor first = at::rand({2}, own);
  state.restore();
  EXPECT_TRUE(torch::equal(at::rand({2}, own), first));
  EXPECT_TRUE(torch::equal(at::rand({2}, seeded_generator(7)), first));
  EXPECT_TRUE(torch::equal(state_of_torch(), torchs));
}

TEST(GeneratorScope, RestoresAfterAnException) {
  torch::manual_seed(5);
  const GeneratorStates five = generator_states({});
  const at::Tensor expected = draw();
  torch::manual_seed(6);
  draw();
  const at::Tensor before = state_of_torch();
  try {
    const GeneratorScope scope(five);
    EXPECT_TRUE(torch::equal(draw(), expected));
    throw std::runtime_error("in the scope");
  } catch (const std::runtime_error&) {
    EXPECT_TRUE(torch::equal(state_of_torch(), before));
  }
}

TEST(GeneratorScope, WithoutStatesDoesNothing) {
  torch::manual_seed(7);
  const at::Tensor before = state_of_torch();
  {
    const GeneratorScope scope({});
    draw();
  }
  EXPECT_FALSE(torch::equal(state_of_torch(), before));
}

TEST(Device, ADeviceThatThisMachineLacksIsAnErrorAndAutoTakesTheCpu) {
  World world;
  world.local_rank = 1;
  world.local_world_size = 2;
  for (const char* name : {"auto", "cpu"}) {
    const DeviceChoice choice = choose_device(name, world, false);
    EXPECT_EQ(choice.device, at::Device(at::kCPU));
    EXPECT_EQ(choice.note, "");
  }
  for (const auto& [name, part] :
       {std::pair("cuda", "no NVIDIA driver"), std::pair("cuda:1", "no NVIDIA driver"),
        std::pair("cuda:x", "auto, cpu, cuda or cuda:N"),
        std::pair("gpu", "auto, cpu, cuda or cuda:N")}) {
    try {
      choose_device(name, world, true);
      ADD_FAILURE() << name;
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
}

} // namespace hasten::detail
