// Ranges that every rank reads itself, such as torch's loaders with any sampler. Every rank gets
// the same order, and the range does not advance torch's generator for other code. If ranks read
// different batches, it is an error.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <numeric>

#include "accelerator/state_rig.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "support/communicator.h"
#include "support/run_device.h"

namespace hasten::range_order_test {

using at::Tensor;
using testing_support::fresh_communicator;
using Rows = std::vector<int64_t>;

struct Numbers : torch::data::Dataset<Numbers> {
  explicit Numbers(size_t rows) : rows(rows) {}
  size_t rows;
  torch::data::Example<> get(size_t index) override {
    return {torch::full({1}, static_cast<double>(index), torch::kDouble),
            torch::tensor(static_cast<int64_t>(index))};
  }
  torch::optional<size_t> size() const override { return rows; }
};

// Draws each row when the loop needs it, as a weighted sampler does.
struct Lazy : torch::data::samplers::Sampler<> {
  explicit Lazy(size_t rows) : rows(rows) {}
  void reset(torch::optional<size_t> = torch::nullopt) override {
    left.clear();
    done = false;
  }
  torch::optional<std::vector<size_t>> next(size_t batch) override {
    if (left.empty() && !done) {
      left.resize(rows);
      std::iota(left.begin(), left.end(), size_t{0});
    }
    std::vector<size_t> taken;
    while (taken.size() < batch && !left.empty()) {
      const auto at = torch::randint(std::ssize(left), {}).item<int64_t>();
      taken.push_back(left[static_cast<size_t>(at)]);
      left.erase(left.begin() + at);
    }
    done = done || left.empty();
    return taken.empty() ? torch::nullopt : torch::make_optional(taken);
  }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}
  size_t rows;
  std::vector<size_t> left{};
  bool done = false;
};

constexpr size_t kRows = 50;
auto numbers() { return Numbers(kRows).map(torch::data::transforms::Stack<>()); }
auto random_loader() { // RandomSampler, as by default
  return torch::data::make_data_loader(numbers(), 4);
}
auto lazy_loader() { return torch::data::make_data_loader(numbers(), Lazy(kRows), 4); }

Accelerator make_accelerator(std::optional<uint64_t> seed = 42) {
  AcceleratorOptions options;
  options.device = testing_support::run_device().str();
  options.seed = seed;
  Accelerator made(options, fresh_communicator());
  torch::manual_seed(100 + static_cast<uint64_t>(made.process_index()));
  return made;
}

Rows values(const Tensor& tensor) {
  const Tensor host = tensor.cpu();
  return Rows(host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel());
}

// Rows of all ranks, one global batch after the other.
template <typename Loader>
Rows one_pass(Accelerator& accelerator, Loader& loader) {
  Rows rows;
  for (const auto& batch : loader) {
    const Rows all = values(accelerator.gather_for_metrics(batch.target));
    rows.insert(rows.end(), all.begin(), all.end());
  }
  return rows;
}

void expect_each_once(Rows rows) {
  std::sort(rows.begin(), rows.end());
  Rows wanted(kRows);
  std::iota(wanted.begin(), wanted.end(), 0);
  EXPECT_EQ(rows, wanted);
}

TEST(RangeOrder, TorchsSamplersYieldEachRowOnceOverTheRanks) {
  for (const std::optional<uint64_t> seed :
       {std::optional<uint64_t>(42), std::optional<uint64_t>()}) {
    auto accelerator = make_accelerator(seed);
    for (const int64_t prefetch : {0, 2}) {
      auto random = random_loader();
      auto loader = accelerator.prepare_data_loader(*random, {.prefetch = prefetch});
      const Rows first = one_pass(accelerator, loader);
      const Rows second = one_pass(accelerator, loader);
      expect_each_once(first);
      expect_each_once(second);
      EXPECT_NE(first, second) << "a new order for each epoch";
    }
    auto lazy = lazy_loader();
    auto loader = accelerator.prepare(*lazy);
    expect_each_once(one_pass(accelerator, loader));
    accelerator.end_training();
  }
}

TEST(RangeOrder, SeedAndEpochDecideIt) {
  std::vector<Rows> passes;
  for (const uint64_t seed : {42, 42, 43}) {
    auto accelerator = make_accelerator(seed);
    auto random = random_loader();
    auto loader = accelerator.prepare(*random);
    torch::randn({static_cast<int64_t>(passes.size())}); // draws of other code
    one_pass(accelerator, loader);
    passes.push_back(one_pass(accelerator, loader));
    accelerator.end_training();
  }
  EXPECT_EQ(passes[0], passes[1]);
  EXPECT_NE(passes[0], passes[2]);
}

// Dropout continues as if the loader had drawn nothing.
TEST(RangeOrder, WhatARangeDrawsNobodyElseMisses) {
  const auto draws_beside = [](auto range) {
    auto accelerator = make_accelerator();
    auto loader = accelerator.prepare(*range);
    std::vector<double> drawn;
    for (const auto& batch : loader) {
      EXPECT_GT(batch.target.numel() + 1, 0);
      drawn.push_back(torch::rand({}, torch::kDouble).item<double>());
    }
    accelerator.end_training();
    return drawn;
  };
  const auto plain = draws_beside(
      torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(numbers(), 4));
  EXPECT_EQ(draws_beside(random_loader()), plain);
  EXPECT_EQ(draws_beside(lazy_loader()), plain);
}

struct TrainingRun {
  explicit TrainingRun(DataLoaderConfiguration config = {})
      : accelerator(
            [&] {
              AcceleratorOptions options;
              options.device = testing_support::run_device().str();
              options.dataloader_config = config;
              return options;
            }(),
            fresh_communicator()) {
    net->to(testing_support::run_device(), torch::kDouble);
  }
  template <typename Range>
  void run(
      Range& range, const std::function<bool(int64_t turn)>& after = [](int64_t) { return true; },
      const std::filesystem::path& state = {}) {
    auto [model, optimizer, loader] = accelerator.prepare(net, sgd, range);
    if (!state.empty()) {
      accelerator.load_state(state);
    }
    int64_t turn = 0;
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(net->forward(batch.data).mean());
      optimizer.step();
      optimizer.zero_grad();
      const Rows mine = values(accelerator.gather_for_metrics(batch.target));
      rows.insert(rows.end(), mine.begin(), mine.end());
      if (!after(turn++)) {
        break;
      }
    }
  }
  Accelerator accelerator;
  torch::nn::Linear net{1, 1};
  torch::optim::SGD sgd{net->parameters(), 0.0};
  Rows rows{};
};

TEST(RangeOrder, APassGoesOnWithTheSameRowsAfterAResume) {
  const auto folder = state_test::common_folder() / "state";
  for (const bool lazy : {false, true}) {
    TrainingRun whole, stopped, resumed;
    const auto train = [lazy](TrainingRun& run, auto... more) {
      auto drawn_lazily = lazy_loader();
      auto drawn_at_once = random_loader();
      lazy ? run.run(*drawn_lazily, more...) : run.run(*drawn_at_once, more...);
      run.accelerator.end_training();
    };
    const std::function<bool(int64_t)> go_on = [](int64_t) { return true; };
    train(whole, go_on);
    expect_each_once(whole.rows);
    const std::function<bool(int64_t)> save = [&](int64_t turn) {
      if (turn == 1) {
        stopped.accelerator.save_state(folder);
      }
      return turn < 1;
    };
    train(stopped, save);
    train(resumed, go_on, folder);
    Rows joined = stopped.rows;
    joined.insert(joined.end(), resumed.rows.begin(), resumed.rows.end());
    EXPECT_EQ(joined, whole.rows) << (lazy ? "lazy" : "at once");
  }
}

// On the last rank batch `odd` has other values.
std::vector<torch::data::Example<>> batches_of(int rank, int world, size_t odd) {
  std::vector<torch::data::Example<>> batches;
  for (size_t b = 0; b < 4 * static_cast<size_t>(world); ++b) {
    const bool other = b == odd && rank == world - 1;
    batches.emplace_back(torch::full({2, 1}, static_cast<double>(b), torch::kDouble),
                         torch::arange(2) + (other ? 100 : static_cast<int64_t>(b)));
  }
  return batches;
}

TEST(RangeOrder, AnotherBatchOnOneRankIsAnErrorThatNamesTheRange) {
  const int world = testing_support::test_world().world_size;
  const int rank = testing_support::test_world().rank;
  if (world == 1) {
    return;
  }
  const size_t last = 4 * static_cast<size_t>(world) - 1;
  for (const size_t odd : {size_t{0}, last}) {
    for (const bool trains : {false, true}) {
      for (const bool compare : {true, false}) {
        SCOPED_TRACE(testing::Message() << "batch " << odd << (trains ? ", trains" : "")
                                        << (compare ? ", compared" : ""));
        auto batches = batches_of(rank, world, odd);
        int64_t turns = 0;
        std::string text;
        try {
          TrainingRun run({.compare_batches = compare});
          if (trains) {
            run.run(batches, [&](int64_t turn) { return turns = turn + 1, true; });
          } else {
            auto loader = run.accelerator.prepare(batches);
            for (const auto& batch : loader) {
              run.accelerator.gather_for_metrics(batch.target);
              ++turns;
            }
          }
          run.accelerator.end_training();
        } catch (const CommunicationError& error) {
          text = error.what();
        }
        EXPECT_EQ(text.empty(), !compare) << text;
        EXPECT_EQ(turns, compare && odd == 0 ? 0 : compare && !trains ? 3 : 4);
        if (compare) {
          EXPECT_NE(text.find("loader 1 (std::vector)"), std::string::npos) << text;
          EXPECT_NE(text.find("compare_batches"), std::string::npos) << text;
        }
      }
    }
  }
}

} // namespace hasten::range_order_test
