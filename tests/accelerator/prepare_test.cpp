// What prepare() accepts, rejects and returns. Also: gathering.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>
#include <sstream>

#include "accelerator/accelerator_rig.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/data/loader.h"
#include "support/communicator.h"
#include "support/on_device.h"
#include "support/world.h"

namespace hasten::prepare_test {

using accelerator_test::Decay;
using accelerator_test::largest_difference;
using accelerator_test::make_batches;
using accelerator_test::mean_loss;
using accelerator_test::Net;
using accelerator_test::net_of_seed;
using accelerator_test::Pair;
using at::Tensor;
using testing_support::fresh_communicator;

Accelerator make_accelerator() {
  AcceleratorOptions options;
  options.seed.reset();
  return Accelerator(options, fresh_communicator());
}

template <typename Function>
std::string input_error(Function function) {
  try {
    function();
  } catch (const InputError& error) {
    return error.what();
  }
  return "nothing was thrown";
}
#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

// tests/checks/refused_arguments_test.py has the arguments that do not compile.
template <typename T>
concept Prepares = requires(Accelerator a, T object) { a.prepare(std::forward<T>(object)); };
static_assert(Prepares<torch::optim::SGD&>);
static_assert(Prepares<std::shared_ptr<torch::optim::SGD>>);
static_assert(Prepares<std::vector<Pair>&>);
static_assert(Prepares<Net>, "a holder shares its module");
static_assert(Prepares<Decay&>);

TEST(Prepare, RefusesAnOptimizerOfAnotherModel) {
  auto accelerator = make_accelerator();
  Net net = net_of_seed(1), other = net_of_seed(2);
  torch::optim::SGD sgd(other->parameters(), 0.1);
  const auto text = input_error([&] { auto handles = accelerator.prepare(net, sgd); });
  EXPECT_SAYS(text, "parameter 0 [8, 5] belongs to no prepared model");
  EXPECT_SAYS(input_error([&] { auto window = accelerator.accumulate(other); }), "not prepared");
}

TEST(Prepare, NamesTheFirstParameterThatDiffersOnEveryRank) {
  auto accelerator = make_accelerator();
  const int last = accelerator.num_processes() - 1;
  if (last == 0) {
    return; // there is no other rank
  }
  auto model = std::make_shared<torch::nn::Module>();
  model->register_parameter("same", on_device::zeros({2}));
  model->register_parameter("weight",
                            on_device::zeros({accelerator.process_index() == last ? 64 : 32, 10}));
  const auto text = input_error([&] { accelerator.prepare(model); });
  EXPECT_SAYS(text,
              "rank " + std::to_string(last) + "'s model has parameter \"weight\" as [64, 10]");
  EXPECT_SAYS(text, "rank 0 as [32, 10]");
  // All ranks reject it, so the group stays usable.
  Net net = net_of_seed(static_cast<uint64_t>(accelerator.process_index()));
  accelerator.prepare(net);
  const Tensor own = net->first->weight.detach().reshape({1, -1});
  EXPECT_TRUE(torch::equal(accelerator.gather(own), own.expand({last + 1, -1}).contiguous()));
}

TEST(Prepare, GivesEveryRankTheBuffersOfRankZero) {
  auto accelerator = make_accelerator();
  torch::nn::BatchNorm1d norm(3);
  const int rank = accelerator.process_index();
  norm->running_mean.fill_(rank + 1);
  torch::nn::Linear linear(3, 1);
  torch::nn::Sequential net(norm, linear);
  std::vector<Tensor> batches;
  for (int i = 0; i < 2 * accelerator.num_processes(); ++i) {
    batches.push_back(on_device::arange(12.0).reshape({4, 3}).sin() + i);
  }
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  EXPECT_EQ(norm->running_mean[0].item<double>(), 1);
  for (const auto& batch : loader) {
    auto window = accelerator.accumulate(model);
    accelerator.backward(model->forward(batch).square().mean());
    const Tensor mean = norm->running_mean.reshape({1, 3});
    EXPECT_EQ((accelerator.gather(mean) - mean).abs().max().item<double>(), 0);
  }
}

TEST(Prepare, RefusesWhatCannotWork) {
  EXPECT_SAYS(input_error([] { Accelerator({.gradient_accumulation_steps = 0}, nullptr); }),
              "gradient_accumulation_steps=0");
  auto accelerator = make_accelerator();
  Net net = net_of_seed(1);
  net->second->bias.set_requires_grad(false);
  accelerator.prepare(net);
  auto shares = std::make_shared<torch::nn::Module>();
  shares->register_parameter("alias", net->first->weight);
  EXPECT_SAYS(input_error([&] { accelerator.prepare(shares); }),
              "\"alias\" is also \"first.weight\"");
  net->second->bias.set_requires_grad(true);
  EXPECT_SAYS(input_error([&] { auto window = accelerator.accumulate(net); }),
              "\"second.bias\" was unfrozen");
  net->second->bias.set_requires_grad(false);
  {
    auto window = accelerator.accumulate(net);
    const Pair batch = make_batches(1)[0];
    EXPECT_SAYS(input_error([&] { accelerator.backward(mean_loss(net, batch)); }),
                "has no number of samples");
    EXPECT_SAYS(input_error([&] { accelerator.backward(net->forward(batch.first), 1); }),
                "loss has shape");
  }
  EXPECT_THROW(accelerator.clip_grad_norm_(net, 0), InputError);
  EXPECT_THROW(accelerator.clip_grad_norm_({on_device::zeros({1})}, 1.0), InputError);
}

// The value of a row is its number. The gathered rows must have each number exactly once.
TEST(Prepare, EvaluationCountsEveryRowOnce) {
  auto accelerator = make_accelerator();
  for (const int64_t count : {1, 5, 8}) {
    std::vector<Pair> batches;
    int64_t next = 0;
    for (int64_t b = 0; b < count; ++b) {
      const int64_t n = b + 1 == count ? 1 : 3;
      batches.emplace_back(on_device::ones({n, 5}), on_device::arange(next, next + n));
      next += n;
    }
    auto loader = accelerator.prepare(batches);
    std::multiset<int64_t> seen;
    for (const auto& [x, number] : loader) {
      EXPECT_EQ(x.size(0), number.size(0));
      const Tensor all = accelerator.gather_for_metrics(number);
      for (int64_t i = 0; i < all.numel(); ++i) {
        seen.insert(all[i].item<int64_t>());
      }
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()), next);
    EXPECT_EQ(static_cast<int64_t>(std::set<int64_t>(seen.begin(), seen.end()).size()), next);
  }
  const Tensor rank = on_device::tensor(1.0 + accelerator.process_index());
  const double sum = accelerator.reduce(rank).item<double>();
  const int world = accelerator.num_processes();
  EXPECT_EQ(sum, world * (world + 1) / 2.0);
  EXPECT_EQ(rank.item<double>(), 1.0 + accelerator.process_index());
  EXPECT_EQ(accelerator.gather(rank).size(0), world);
}

struct Numbers : Dataset {
  int64_t size() const override { return 11; }
  Batch collate(const std::vector<int64_t>& indices) const override {
    const auto n = static_cast<int64_t>(indices.size());
    Batch batch;
    batch.indices = indices;
    batch.tensors["x"] = on_device::tensor(indices, torch::kDouble).reshape({n, 1}).expand({n, 5});
    batch.tensors["y"] = on_device::tensor(indices, torch::kLong).remainder(3);
    return batch;
  }
};

TEST(Prepare, ADataLoaderDistributesItsBatchesItselfAndEveryEpochHasItsOrder) {
  auto accelerator = make_accelerator();
  DataLoader batches(std::make_shared<Numbers>(),
                     {.batch_size = 2, .shuffle = true, .group_by_length = false});
  Net net = net_of_seed(1);
  torch::optim::SGD sgd(net->parameters(), 0.01);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  std::vector<std::vector<int64_t>> orders;
  for (int epoch = 0; epoch < 2; ++epoch) {
    orders.emplace_back();
    double weight = 0;
    for (const Batch& batch : loader) { // without rows: a stand-in
      EXPECT_GT(batch["x"].size(0), 0);
      auto window = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, {batch["x"], batch["y"]}));
      optimizer.step();
      optimizer.zero_grad();
      weight += accelerator.last_window().weight;
      orders.back().insert(orders.back().end(), batch.indices.begin(), batch.indices.end());
    }
    const Tensor all = accelerator.gather_for_metrics(on_device::tensor(orders.back()));
    EXPECT_EQ(all.numel(), 11);
    EXPECT_EQ(std::get<0>(at::_unique(all)).numel(), 11);
    EXPECT_LE(weight, 11);
  }
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_EQ(batches.epoch(), 1u);
}

TEST(Prepare, PrintsFromTheMainProcessOnly) {
  auto accelerator = make_accelerator();
  std::ostringstream out;
  accelerator.print(out, "hello");
  EXPECT_EQ(out.str(), accelerator.is_main_process() ? "hello\n" : "");
  accelerator.wait_for_everyone();
  EXPECT_EQ(accelerator.device(), testing_support::run_device());
}

} // namespace hasten::prepare_test
