#include "hasten/comm/backend.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "hasten/base/error.h"
#include "support/communicator.h"
#include "support/on_device.h"
#include "support/watched_communicator.h"
#include "support/world.h"

namespace hasten {

using testing_support::WatchedCommunicator;

// Registers "watched": Gloo, with a list of the operations that went through the back end.
static std::shared_ptr<std::vector<std::string>> register_watched_backend() {
  auto names = std::make_shared<std::vector<std::string>>();
  register_backend("watched", [names](const BackendContext& context) {
    EXPECT_EQ(context.options.backend, "watched");
    EXPECT_EQ(context.world.world_size, testing_support::test_world().world_size);
    auto group = std::make_shared<WatchedCommunicator>(backend_factory("gloo")(context));
    group->before = [names](std::string_view name) { names->emplace_back(name); };
    return group;
  });
  return names;
}

TEST(Backend, ARegisteredOneIsUsedByNameForEveryOperation) {
  const auto names = register_watched_backend();
  const std::vector<std::string> known = backend_names();
  for (const char* name : {"gloo", "nccl", "shm", "watched"}) {
    EXPECT_EQ(std::ranges::count(known, name), 1) << name;
  }
  const auto comm = testing_support::fresh_communicator(
      {.name = testing_support::case_name(), .backend = "watched"});
  EXPECT_EQ(comm->options().backend, "watched");
  const int world = comm->world_size();
  const int rank = comm->rank();
  const torch::Tensor ranks = on_device::arange(world, torch::kFloat);

  torch::Tensor sum = on_device::full({3}, rank + 1.0);
  comm->all_reduce(sum, ReduceOp::SUM, "all_reduce");
  EXPECT_EQ(sum[2].item<int>(), world * (world + 1) / 2);
  torch::Tensor most = on_device::full({3}, double(rank));
  comm->reduce_async(most, 0, ReduceOp::MAX, "reduce").wait();
  EXPECT_EQ(most[0].item<int>(), rank == 0 ? world - 1 : rank);
  torch::Tensor sent = on_device::full({3}, double(rank));
  comm->broadcast(sent, world - 1, "broadcast");
  EXPECT_EQ(sent[1].item<int>(), world - 1);

  torch::Tensor own = ranks[rank].clone();
  torch::Tensor gathered = on_device::zeros({world});
  comm->all_gather_async(gathered, own, "all_gather").wait();
  EXPECT_TRUE(gathered.equal(ranks));
  gathered.zero_();
  comm->gather_async(gathered, own, 0, "gather").wait();
  EXPECT_EQ(gathered.equal(ranks), rank == 0 || world == 1);
  torch::Tensor scattered = on_device::full({}, -1.0);
  comm->scatter_async(scattered, 2 * ranks, 0, "scatter").wait();
  EXPECT_EQ(scattered.item<int>(), 2 * rank);
  torch::Tensor exchanged = on_device::zeros({world});
  comm->all_to_all_async(exchanged, 10 * rank + ranks, "all_to_all").wait();
  EXPECT_TRUE(exchanged.equal(10 * ranks + rank));
  torch::Tensor share = on_device::zeros({1});
  comm->reduce_scatter_async(share, on_device::ones({world, 1}), "reduce_scatter").wait();
  EXPECT_EQ(share.item<int>(), world);
  EXPECT_EQ(comm->all_gather_rows(on_device::ones({rank, 2}), "rows").size(0),
            world * (world - 1) / 2);

  EXPECT_EQ(std::ssize(comm->all_gather_object(rank, "all_gather_object")), world);
  EXPECT_EQ(comm->broadcast_object(rank, "broadcast_object"), 0);
  comm->barrier("barrier");
  const std::vector<std::string> all{"all_reduce",        "reduce",           "broadcast",
                                     "all_gather",        "gather",           "scatter",
                                     "all_to_all",        "reduce_scatter",   "rows",
                                     "all_gather_object", "broadcast_object", "barrier"};
  // One rank has the local group, which moves nothing.
  EXPECT_EQ(*names, world > 1 ? all : std::vector<std::string>());

  const auto other = comm->duplicate({.name = "other"});
  other->all_reduce(sum, ReduceOp::SUM, "in another group");
  EXPECT_EQ(sum[0].item<int>(), world * world * (world + 1) / 2);
  other->close();
}

TEST(Backend, AnUnknownNameIsRefusedWithTheKnownOnes) {
  register_watched_backend();
  for (const int world_size : {1, 2}) {
    World world;
    world.world_size = world_size;
    world.master_port = 1;
    try {
      Communicator::create(world, {.backend = "glo"});
      ADD_FAILURE() << "no error";
    } catch (const InputError& error) {
      const std::string text = error.what();
      for (const char* part :
           {"backend=glo.", "Expected one of auto, gloo, nccl, ", "write gloo"}) {
        EXPECT_NE(text.find(part), std::string::npos) << text;
      }
    }
  }
  EXPECT_THROW(register_backend("", backend_factory("gloo")), InputError);
  EXPECT_THROW(register_backend("none", nullptr), InputError);
  EXPECT_THROW(register_device_backend("none", at::kCUDA, nullptr), InputError);
  EXPECT_THROW(
      register_device_backend("none", at::kCPU,
                              [](const auto&) { return c10::intrusive_ptr<c10d::Backend>(); }),
      InputError);
}

TEST(Backend, AutoIsThatOfTheDeviceAndAnotherTypesIsRefused) {
  EXPECT_EQ(resolved_backend("auto", at::kCPU), "auto"); // the ranks have not met
  EXPECT_EQ(resolved_backend("auto", at::kCUDA), "nccl");
  EXPECT_EQ(resolved_backend("auto", at::kXPU), "auto");
  EXPECT_EQ(resolved_backend("gloo", at::kCUDA), "gloo");
  try {
    Communicator::create(World{}, {.backend = "nccl"});
    ADD_FAILURE() << "no error";
  } catch (const InputError& error) {
    const std::string text = error.what();
    for (const char* part : {"backend=nccl with device=cpu", "set backend=auto, or device=cuda"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
}

} // namespace hasten
