// Collectives on values other than gradients, and functions that run on certain ranks.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/comm/few_sizes.h"
#include "hasten/metrics/auroc.h"
#include "hasten/metrics/classification.h"
#include "hasten/metrics/regression.h"
#include "support/communicator.h"
#include "support/error_of.h"
#include "support/on_device.h"

namespace hasten::collect_test {

using at::Tensor;
using testing_support::error_of;
using testing_support::fresh_communicator;

Accelerator make_accelerator(bool debug = false) {
  AcceleratorOptions options;
  options.seed.reset();
  options.debug = debug;
  return Accelerator(options, fresh_communicator());
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

struct Outputs { // a struct of tensors needs no flatten()
  Tensor logits;
  Tensor labels;
};

// The first message of each size costs the group one exchange through the store.
TEST(Collect, MessagesOfAnyLengthHaveFewSizes) {
  std::set<int64_t> sizes;
  for (int64_t count = 0; count < 100'000; ++count) {
    const int64_t size = detail::few_sizes(count);
    ASSERT_GE(size, count);
    ASSERT_LE(size, count + count / 8);
    ASSERT_EQ(detail::few_sizes(size), size) << "no copy is made twice";
    sizes.insert(size);
  }
  EXPECT_LE(sizes.size(), 130u);
  auto accelerator = make_accelerator();
  for (const size_t length : {0, 1, 17, 300}) { // the padding is removed again
    const std::string text(length, 'x');
    EXPECT_EQ(accelerator.broadcast_object(text).get<std::string>(), text);
  }
}

// One row of a wider tensor. torch calls it contiguous, because the stride of a dimension of size 1
// does not matter.
TEST(Collect, OneRowOfAWiderTensorTravels) {
  for (const bool debug : {false, true}) {
    auto accelerator = make_accelerator(debug);
    const int rank = accelerator.process_index();
    const int world = accelerator.num_processes();
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kLong}) {
      const Tensor logits = (on_device::arange(3) + 10 * rank).to(dtype).reshape({1, 3});
      const Tensor own = logits.select(1, 1); // [1], stride 3
      const Tensor wanted = (10 * on_device::arange(world) + 1).to(dtype);
      EXPECT_TRUE(torch::equal(accelerator.gather(own), wanted));
      EXPECT_TRUE(torch::equal(accelerator.gather_for_metrics(own), wanted));
      accelerator.broadcast(own, world - 1);
      EXPECT_EQ(own.item().toDouble(), 10 * (world - 1) + 1);
      EXPECT_EQ(accelerator.reduce(own).item().toDouble(), world * (10.0 * (world - 1) + 1));
    }
    accelerator.end_training();
  }
}

TEST(Collect, GatherJoinsInRankOrderWhateverHoldsTheTensors) {
  auto accelerator = make_accelerator();
  const int rank = accelerator.process_index();
  const int world = accelerator.num_processes();
  const Tensor own = on_device::full({2, 3}, rank, torch::kInt).t(); // [3, 2]
  const Tensor joined = on_device::arange(world, torch::kInt)
                            .repeat_interleave(3)
                            .unsqueeze(1)
                            .expand({3 * world, 2});
  EXPECT_TRUE(torch::equal(accelerator.gather(own), joined));
  EXPECT_EQ(accelerator.gather(on_device::tensor(rank)).size(0), world);
  const auto [logits, labels] = accelerator.gather(Outputs{own, own.eq(0)});
  EXPECT_TRUE(torch::equal(logits, joined));
  EXPECT_TRUE(torch::equal(labels, joined.eq(0)));
  const auto named =
      accelerator.gather(std::map<std::string, Tensor>{{"a", own}, {"b", own.to(torch::kHalf)}});
  EXPECT_TRUE(torch::equal(named.at("b"), joined.to(torch::kHalf)));
  const auto pair = accelerator.gather_for_metrics(
      std::make_pair(on_device::full({rank}, rank), own)); // rank 0 has none
  EXPECT_EQ(pair.first.size(0), world * (world - 1) / 2);
  EXPECT_SAYS(error_of([&] { accelerator.gather(std::vector<int>{1}); }), "no tensor");
}

TEST(Collect, ReduceOfHalfDoesNotOverflowOnTheWay) {
  auto accelerator = make_accelerator();
  const double rank = accelerator.process_index();
  const double world = accelerator.num_processes();
  const Tensor large = on_device::full({3}, 60000, torch::kHalf);
  for (const Tensor& mean : {accelerator.reduce(large, ReduceOp::AVG),
                             accelerator.reduce(large, ReduceOp::SUM, 1 / world)}) {
    EXPECT_EQ(mean.scalar_type(), torch::kHalf);
    EXPECT_TRUE(torch::equal(mean, large)) << mean;
  }
  const Tensor own = on_device::tensor({rank, -rank});
  const auto is = [](const Tensor& value, double a, double b) {
    return value[0].item<double>() == a && value[1].item<double>() == b;
  };
  EXPECT_TRUE(is(accelerator.reduce(own, ReduceOp::MAX), world - 1, 0));
  EXPECT_TRUE(is(accelerator.reduce(own, ReduceOp::MIN), 0, 1 - world));
  const double sum = world * (world - 1) / 2;
  EXPECT_TRUE(is(accelerator.reduce(own), sum, -sum));
  EXPECT_TRUE(is(own, rank, -rank)); // a copy was reduced
}

TEST(Collect, BroadcastWritesIntoViewsToo) {
  auto accelerator = make_accelerator();
  const int last = accelerator.num_processes() - 1;
  const Tensor whole = on_device::full({4, 4}, accelerator.process_index());
  accelerator.broadcast(whole.select(1, 2), last);
  EXPECT_TRUE(torch::equal(whole.select(1, 2), on_device::full({4}, last, whole.options())));
  EXPECT_EQ(whole[0][0].item<int64_t>(), accelerator.process_index());
}

TEST(Collect, PadAcrossProcessesPadsToTheLargest) {
  auto accelerator = make_accelerator();
  const int rank = accelerator.process_index();
  const int world = accelerator.num_processes();
  const Tensor own = on_device::ones({2, rank + 1}, torch::kLong);
  const Tensor behind = accelerator.pad_across_processes(own, 1, -100);
  const Tensor before = accelerator.pad_across_processes(own, -1, -100, true);
  EXPECT_EQ(behind.sizes(), at::IntArrayRef({2, world}));
  EXPECT_EQ(behind.eq(1).sum().item<int64_t>(), 2 * (rank + 1));
  EXPECT_TRUE(torch::equal(behind.flip(1), before));
  EXPECT_EQ(behind[0][0].item<int64_t>(), 1);
  EXPECT_TRUE(behind[0][world - 1].item<int64_t>() == (rank + 1 == world ? 1 : -100));
  accelerator.gather(behind); // works: all ranks have the same shape now
  EXPECT_TRUE(torch::equal(accelerator.pad_across_processes(own, 5), own));
  if (world > 1) {
    EXPECT_SAYS(error_of([&] { accelerator.pad_across_processes(rank == 0 ? own : own[0], 0); }),
                "rank 1 has sizes [2], rank 0 has [2,1]");
  }
}

TEST(Collect, ObjectsKeepEveryBitAndAnySize) {
  auto accelerator = make_accelerator();
  const int rank = accelerator.process_index();
  const int last = accelerator.num_processes() - 1;
  const nlohmann::json object = {{"rank", rank},
                                 {"nan", std::numeric_limits<double>::quiet_NaN()},
                                 {"third", 1.0 / 3},
                                 {"text", std::string(static_cast<size_t>(1 << 20) + rank, 'x')}};
  const auto sent =
      accelerator.broadcast_object(rank == last ? object : nlohmann::json("mine"), last);
  EXPECT_EQ(sent["rank"], last);
  EXPECT_TRUE(std::isnan(sent["nan"].get<double>()));
  EXPECT_EQ(sent["third"].get<double>(), 1.0 / 3);
  const auto all = accelerator.gather_object(
      {{"rank", rank}, {"text", std::string(static_cast<size_t>(rank), 'y')}});
  ASSERT_EQ(all.size(), static_cast<size_t>(last) + 1);
  for (int r = 0; r <= last; ++r) {
    EXPECT_EQ(all[static_cast<size_t>(r)]["rank"], r);
    EXPECT_EQ(all[static_cast<size_t>(r)]["text"].get<std::string>().size(),
              static_cast<size_t>(r));
  }
}

TEST(Collect, SplitGivesBlocksInRankOrderAndPadsWithTheLast) {
  auto accelerator = make_accelerator();
  const int world = accelerator.num_processes();
  for (const int64_t count : {0, 1, 5, 8}) {
    std::vector<int64_t> values(static_cast<size_t>(count));
    std::iota(values.begin(), values.end(), 0);
    const auto part = accelerator.split_between_processes(values);
    const Tensor rows = on_device::arange(count);
    EXPECT_TRUE(torch::equal(accelerator.split_between_processes(rows),
                             on_device::tensor(part, torch::kLong)));
    EXPECT_TRUE(
        torch::equal(accelerator.gather_for_metrics(on_device::tensor(part, torch::kLong)), rows));
    const auto sizes = accelerator.gather_object(part.size());
    EXPECT_LE(sizes.front().get<int>() - sizes.back().get<int>(), 1);
    const auto padded = accelerator.split_between_processes(values, true);
    const auto even = static_cast<size_t>((count + world - 1) / world);
    EXPECT_EQ(padded.size(), even);
    EXPECT_TRUE(torch::equal(accelerator.split_between_processes(rows, true),
                             on_device::tensor(padded, torch::kLong)));
    if (padded.size() > part.size()) {
      EXPECT_EQ(padded.back(), part.empty() ? count - 1 : part.back());
    }
  }
}

TEST(Collect, TheMainProcessIsThroughBeforeTheOthersStart) {
  auto accelerator = make_accelerator();
  const int rank = accelerator.process_index();
  const auto clock = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
  const auto span = accelerator.main_process_first([&] {
    const auto begin = clock();
    std::this_thread::sleep_for(std::chrono::milliseconds(rank == 0 ? 60 : 1));
    return std::make_pair(begin, clock());
  });
  const auto spans = accelerator.gather_object({span.first, span.second});
  for (size_t r = 1; r < spans.size(); ++r) {
    EXPECT_GE(spans[r][0].get<int64_t>(), spans[0][1].get<int64_t>());
  }
  int calls = 0;
  accelerator.local_main_process_first([&] { ++calls; });
  EXPECT_EQ(calls, 1);
}

TEST(Collect, AnExceptionOfOneTurnReachesAllAndHangsNobody) {
  auto accelerator = make_accelerator();
  const int rank = accelerator.process_index();
  const int world = accelerator.num_processes();
  int ran = 0;
  const auto first = error_of([&] {
    accelerator.main_process_first([&] {
      ++ran;
      if (rank == 0) {
        throw InputError("test", "no such cache");
      }
    });
  });
  EXPECT_SAYS(first, "no such cache");
  EXPECT_EQ(ran, rank == 0 ? 1 : 0);
  if (world > 1) {
    if (rank != 0) {
      EXPECT_SAYS(first, "rank 0 failed");
    }
    const auto second = error_of([&] {
      accelerator.main_process_first([&]() -> int {
        if (rank == world - 1) {
          throw Error("test", "disk full");
        }
        return 1;
      });
    });
    EXPECT_SAYS(second, "disk full");
  }
  accelerator.wait_for_everyone(); // the group stays usable
}

TEST(Collect, OneProcessRunsWhatIsItsOwn) {
  auto accelerator = make_accelerator();
  const int rank = accelerator.process_index();
  const int world = accelerator.num_processes();
  const auto runs = [&](const std::optional<int>& value) {
    return accelerator.gather_object(value.value_or(-1));
  };
  const auto mine = [&] { return rank; };
  int sum = 0;
  for (const auto& value : runs(accelerator.on_process(world - 1, mine))) {
    sum += value.get<int>();
  }
  EXPECT_EQ(sum, world - 1 - (world - 1)); // all but the last have -1
  EXPECT_EQ(accelerator.on_last_process(mine).has_value(), rank == world - 1);
  EXPECT_EQ(accelerator.on_main_process(mine).has_value(), rank == 0);
  bool ran = false;
  accelerator.on_local_main_process([&] { ran = true; });
  EXPECT_EQ(ran, accelerator.is_local_main_process());
}

TEST(Collect, ATriggerOfAnyRankIsSeenByAllOnce) {
  auto accelerator = make_accelerator();
  EXPECT_FALSE(accelerator.check_trigger());
  if (accelerator.is_last_process()) {
    accelerator.set_trigger();
  }
  EXPECT_TRUE(accelerator.check_trigger());
  EXPECT_FALSE(accelerator.check_trigger());
}

TEST(Collect, InDebugModeRanksThatDifferGetAnErrorInsteadOfHanging) {
  auto accelerator = make_accelerator(true);
  const int rank = accelerator.process_index();
  if (accelerator.num_processes() == 1) {
    return;
  }
  const Tensor own = on_device::zeros({2, rank == 1 ? 3 : 4});
  const std::string named = "rank 1 has Float [2, 3], rank 0 has Float [2, 4]";
  EXPECT_SAYS(error_of([&] { accelerator.gather(own); }), named);
  EXPECT_SAYS(error_of([&] { accelerator.reduce(own); }), named);
  EXPECT_SAYS(error_of([&] { accelerator.broadcast(own); }), "rank 1 has Float [2, 3]");
  EXPECT_SAYS(error_of([&] { accelerator.reduce(ClassificationMetrics(rank + 2)); }),
              "rank 1 has Long [3, 3], rank 0 has Long [2, 2]");
  EXPECT_EQ(accelerator.gather(on_device::ones({1})).size(0),
            accelerator.num_processes()); // the group stays usable
}

TEST(Collect, ReducedMetricsAreThoseOfAllRows) {
  auto accelerator = make_accelerator();
  const int rank = accelerator.process_index();
  const int world = accelerator.num_processes();
  torch::manual_seed(3);
  const Tensor targets = on_device::randn({101}, torch::kDouble);
  const Tensor predictions = targets + on_device::randn({101}, torch::kDouble);
  const Tensor labels = targets.gt(0).to(torch::kLong);
  // With several ranks, rank 0 has no samples.
  const int64_t parts = std::max(world - 1, 1);
  const Tensor mine = on_device::arange(101).remainder(parts).eq(world == 1 ? 0 : rank - 1);
  const auto check = [&](const auto& empty, const Tensor& second) {
    auto whole = empty, part = empty;
    whole.update(predictions, second);
    part.update(predictions.masked_select(mine), second.masked_select(mine));
    const auto own = part.state().clone();
    for (int twice = 0; twice < 2; ++twice) {
      const auto joined = accelerator.reduce(part);
      EXPECT_NEAR(joined.compute(), whole.compute(), 1e-13);
      const auto all = accelerator.gather_object(joined.compute());
      EXPECT_EQ(all.front(), all.back()); // to the last bit
    }
    EXPECT_TRUE(torch::equal(part.state(), own)); // unchanged
  };
  check(MeanSquaredError(), targets);
  check(R2Score(), targets);
  check(PearsonCorrCoef(), targets);
  check(SpearmanCorrCoef(256), targets);
  check(Auroc({.from_logits = true}), labels);
  ClassificationMetrics counts(2);
  counts.update(labels.masked_select(mine), labels.masked_select(mine));
  EXPECT_EQ(accelerator.reduce(counts).rows(), 101);
}

} // namespace hasten::collect_test
