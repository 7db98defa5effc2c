// Gloo moves host memory. It stages the tensors of other devices: the same bits, and no copy that
// the operation does not need.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>

#include "hasten/comm/communicator.h"
#include "support/spawn.h"
#include "support/test_device.h"

namespace hasten {

using testing_support::device_counters;
using testing_support::DeviceCounters;
using testing_support::test_device;

// What a rank does with a tensor of 8 values of its own, and the values that it gets.
using Operation = std::function<at::Tensor(Communicator&, at::Tensor own)>;

struct StagedOperation {
  const char* name;
  Operation run;
  // Copies of a rank, by whether it is rank 0.
  int64_t to_host[2];
  int64_t to_device[2];
};

static std::vector<StagedOperation> staged_operations() {
  const auto rows = [](const at::Tensor& own) { return at::zeros({2, 8}, own.options()); };
  const auto reduce = [](ReduceOp op) {
    return [op](Communicator& c, at::Tensor own) {
      c.all_reduce(own, op, "all_reduce");
      return own;
    };
  };
  return {
      {"sum", reduce(ReduceOp::SUM), {1, 1}, {1, 1}},
      {"mean", reduce(ReduceOp::AVG), {1, 1}, {1, 1}},
      {"maximum", reduce(ReduceOp::MAX), {1, 1}, {1, 1}},
      {"reduce",
       [](Communicator& c, at::Tensor own) {
         Work work = c.reduce_async(own, 0, ReduceOp::SUM, "reduce");
         if (!c.is_main()) {
           own.fill_(9); // allowed as soon as the call has returned
         }
         work.wait();
         return own;
       },
       {1, 1},
       {0, 1}},
      {"broadcast",
       [](Communicator& c, at::Tensor own) {
         c.broadcast(own, 1, "broadcast");
         return own;
       },
       {1, 0},
       {0, 1}},
      {"all_gather",
       [=](Communicator& c, at::Tensor own) {
         const at::Tensor all = rows(own);
         c.all_gather_async(all, own, "all_gather").wait();
         return all;
       },
       {1, 1},
       {1, 1}},
      {"gather",
       [=](Communicator& c, at::Tensor own) {
         const at::Tensor all = rows(own);
         c.gather_async(all, own, 0, "gather").wait();
         return all;
       },
       {1, 1},
       {0, 1}},
      {"scatter",
       [](Communicator& c, at::Tensor own) {
         const at::Tensor piece = at::zeros({4}, own.options());
         c.scatter_async(piece, own.view({2, 4}), 0, "scatter").wait();
         return piece;
       },
       {0, 1},
       {1, 1}},
      {"all_to_all",
       [](Communicator& c, at::Tensor own) {
         const at::Tensor pieces = at::zeros({2, 4}, own.options());
         c.all_to_all_async(pieces, own.view({2, 4}), "all_to_all").wait();
         return pieces;
       },
       {1, 1},
       {1, 1}},
      {"reduce_scatter",
       [](Communicator& c, at::Tensor own) {
         const at::Tensor piece = at::zeros({4}, own.options());
         c.reduce_scatter_async(piece, own.view({2, 4}), "reduce_scatter").wait();
         return piece;
       },
       {1, 1},
       {1, 1}},
  };
}

HASTEN_RANK_FUNCTION(StageEachOperation) {
  const auto communicator = Communicator::create(rank.world(), {});
  const int main = communicator->is_main() ? 1 : 0;
  at::manual_seed(static_cast<uint64_t>(7 + main));
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const StagedOperation& operation : staged_operations()) {
      const at::Tensor own = at::randn({8}).to(type);
      const at::Tensor wanted = operation.run(*communicator, own.clone());
      const at::Tensor there = own.to(test_device());
      const DeviceCounters before = device_counters();
      const at::Tensor found = operation.run(*communicator, there);
      const DeviceCounters used = device_counters() - before;
      EXPECT_TRUE(wanted.equal(found.cpu())) << operation.name << " " << type;
      EXPECT_EQ(used.copies_to_host, operation.to_host[main]) << operation.name << " " << type;
      EXPECT_EQ(used.copies_to_device, operation.to_device[main]) << operation.name << " " << type;
    }
  }
  communicator->close();
}

TEST(GlooStaging, EachOperationHasTheBitsOfTheCpuAndCopiesWhatItNeeds) {
  const auto ranks =
      testing_support::spawn(2, "StageEachOperation", {}, {.deadline = std::chrono::seconds(200)});
  for (const auto& rank : ranks) {
    EXPECT_EQ(rank.error, "");
    EXPECT_EQ(rank.end.code, 0);
  }
}

} // namespace hasten
