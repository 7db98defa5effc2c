// How prepared loaders distribute ranges of batches over ranks. The value of a row is its number,
// so the gathered values show which rows the ranks got.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

#include "accelerator/accelerator_rig.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/data/loader.h"
#include "support/communicator.h"
#include "support/on_device.h"

namespace hasten::prepared_loader_test {

using at::Tensor;
using testing_support::fresh_communicator;
using Rows = std::vector<int64_t>;

Accelerator make_accelerator() {
  AcceleratorOptions options;
  options.seed.reset();
  return Accelerator(options, fresh_communicator());
}

Rows range_of(int64_t begin, int64_t end) {
  Rows rows(static_cast<size_t>(std::max<int64_t>(end - begin, 0)));
  std::iota(rows.begin(), rows.end(), begin);
  return rows;
}
Rows values(const Tensor& tensor) {
  const Tensor flat = tensor.to(at::kCPU, torch::kLong).contiguous().reshape({-1});
  return Rows(flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel());
}
Rows sorted(Rows rows) {
  std::sort(rows.begin(), rows.end());
  return rows;
}
void append(Rows& to, const Rows& rows) { to.insert(to.end(), rows.begin(), rows.end()); }

// The row numbers of any batch.
Tensor numbers(const Tensor& batch) { return batch; }
Tensor numbers(const Batch& batch) { return batch["row"]; }
Tensor numbers(const torch::data::Example<>& batch) { return batch.target; }
Tensor numbers(const std::vector<torch::data::Example<>>& batch) {
  std::vector<Tensor> rows;
  for (const auto& row : batch) {
    rows.push_back(row.target.reshape({1}));
  }
  return rows.empty() ? torch::empty({0}, torch::kLong) : torch::cat(rows);
}

struct Sample { // has only tensors, so it needs no flatten()
  Tensor x;
  Tensor row;
};
Tensor numbers(const Sample& batch) { return batch.row; }

struct Sentence { // has flatten()
  std::string source{};
  Tensor row{};
};
template <typename Visit>
void flatten(Visit& visit, Sentence& batch) {
  visit(batch.row);
}
Tensor numbers(const Sentence& batch) { return batch.row; }

// Makes batches of 3 rows, and a smaller last one, one by one. It has no size() and allows one pass
// at a time. Counts the batches.
template <typename Value>
struct Stream {
  int64_t rows = 0;
  int64_t throws_at = -1; // batch
  std::shared_ptr<std::atomic<int>> made = std::make_shared<std::atomic<int>>(0);
  std::shared_ptr<std::atomic<int>> begun = std::make_shared<std::atomic<int>>(0);

  static Value make(const Tensor& row) {
    if constexpr (std::is_same_v<Value, Tensor>) {
      return row;
    } else if constexpr (std::is_same_v<Value, Sentence>) {
      return {.source = "stream", .row = row};
    } else {
      return {.x = row.to(torch::kFloat).unsqueeze(1), .row = row};
    }
  }
  struct iterator {
    using value_type = Value;
    using difference_type = int64_t;
    using iterator_category = std::input_iterator_tag;
    const Stream* stream = nullptr;
    int64_t batch = 0;
    Value operator*() const {
      if (batch == stream->throws_at) {
        throw InputError("test::Stream", "bad row");
      }
      ++*stream->made;
      const int64_t end = std::min(batch * 3 + 3, stream->rows);
      return make(torch::arange(batch * 3, end));
    }
    iterator& operator++() {
      ++batch;
      return *this;
    }
    bool operator==(std::default_sentinel_t) const { return batch * 3 >= stream->rows; }
  };
  iterator begin() const {
    ++*begun;
    return {this};
  }
  std::default_sentinel_t end() const { return {}; }
};

struct NumberRows : Dataset {
  explicit NumberRows(int64_t rows) : rows(rows) {}
  int64_t rows;
  mutable std::atomic<int> collated{0};
  int64_t size() const override { return rows; }
  Batch collate(const std::vector<int64_t>& indices) const override {
    ++collated;
    return {.tensors = {{"row", torch::tensor(indices, torch::kLong)}}, .indices = indices};
  }
};

// A loader of torch::data.
struct TorchRows : torch::data::Dataset<TorchRows> {
  explicit TorchRows(size_t rows) : rows(rows) {}
  size_t rows;
  torch::data::Example<> get(size_t index) override {
    return {torch::ones({2}), torch::tensor(static_cast<int64_t>(index))};
  }
  torch::optional<size_t> size() const override { return rows; }
};

// What one pass returned on this rank, and what the loop's body gathered.
struct Pass {
  std::vector<Rows> mine{};
  std::vector<Rows> gathered{};
  Rows all() const {
    Rows rows;
    for (const Rows& turn : gathered) {
      append(rows, turn);
    }
    return rows;
  }
};
template <typename Loader>
Pass run(Accelerator& accelerator, Loader& loader) {
  Pass pass;
  for (const auto& batch : loader) {
    pass.mine.push_back(values(numbers(batch)));
    pass.gathered.push_back(values(accelerator.gather_for_metrics(numbers(batch))));
  }
  // Every rank ran equally many iterations.
  const Rows turns =
      values(accelerator.gather(torch::tensor(static_cast<int64_t>(pass.mine.size()))));
  EXPECT_EQ(std::set<int64_t>(turns.begin(), turns.end()).size(), 1u);
  return pass;
}

// All ways to distribute batches over ranks.
std::vector<DataLoaderConfiguration> configurations() {
  std::vector<DataLoaderConfiguration> all;
  for (int i = 0; i < 16; ++i) {
    all.push_back({.split_batches = (i & 1) != 0,
                   .dispatch_batches = (i & 2) != 0,
                   .even_batches = (i & 4) != 0,
                   .prefetch = (i & 8) != 0 ? 2 : 0});
  }
  return all;
}
std::string text(const DataLoaderConfiguration& c) {
  return std::string(c.split_batches ? "split " : "") + (c.dispatch_batches ? "dispatch " : "") +
         (c.even_batches ? "even " : "") + (c.prefetch > 0 ? "prefetch" : "");
}
bool fits(const DataLoaderConfiguration& c, int64_t batch, int world) {
  return !(c.split_batches && c.even_batches && batch % world != 0);
}

template <typename Range>
void expect_every_row_once(Accelerator& accelerator, Range& range, int64_t rows, int64_t batch) {
  for (const auto& config : configurations()) {
    if (!fits(config, batch, accelerator.num_processes())) {
      continue;
    }
    SCOPED_TRACE(text(config));
    auto loader = accelerator.prepare_data_loader(range, config);
    const Pass pass = run(accelerator, loader);
    EXPECT_EQ(sorted(pass.all()), range_of(0, rows));
    for (const Rows& mine : pass.mine) {
      if (config.even_batches && accelerator.num_processes() > 1) {
        EXPECT_EQ(mine.size(), pass.mine.front().size());
      }
    }
  }
}

TEST(PreparedLoader, EveryRowOnceFromAnyRangeInAnyConfiguration) {
  auto accelerator = make_accelerator();
  for (const int64_t rows : {1, 12, 13}) {
    Stream<Tensor> tensors{rows};
    expect_every_row_once(accelerator, tensors, rows, 3);
    Stream<Sample> structs{rows};
    expect_every_row_once(accelerator, structs, rows, 3);
    DataLoader own(std::make_shared<NumberRows>(rows),
                   {.batch_size = 4, .shuffle = true, .group_by_length = false});
    expect_every_row_once(accelerator, own, rows, 4);
  }
  Stream<Sentence> sentences{10};
  expect_every_row_once(accelerator, sentences, 10, 3);
  auto stacked = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
      TorchRows(10).map(torch::data::transforms::Stack<>()), 3);
  // torch's generator draws the order. Here it differs by rank.
  expect_every_row_once(accelerator,
                        *torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
                            TorchRows(10).map(torch::data::transforms::Stack<>()), 3),
                        10, 3);
  auto shuffled = accelerator.prepare_data_loader(*stacked, {.dispatch_batches = true});
  EXPECT_EQ(sorted(run(accelerator, shuffled).all()), range_of(0, 10));
  auto rows =
      torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(TorchRows(10), 3);
  expect_every_row_once(accelerator, *rows, 10, 3);
}

TEST(PreparedLoader, DispatchTouchesTheRangeOfRankZeroAlone) {
  auto accelerator = make_accelerator();
  const bool main = accelerator.is_main_process();
  Stream<Sample> range{main ? 10 : 0, -1};
  auto loader = accelerator.prepare_data_loader(range, {.dispatch_batches = true, .prefetch = 1});
  EXPECT_EQ(run(accelerator, loader).all(), range_of(0, 10));
  EXPECT_EQ(*range.made, main ? 4 : 0);
  EXPECT_EQ(*range.begun, main ? 1 : 0);
  // The same batches as with round-robin.
  Stream<Sample> same{10};
  auto distributed = accelerator.prepare_data_loader(same, {});
  EXPECT_EQ(run(accelerator, loader).mine, run(accelerator, distributed).mine);
  // A batch of named tensors keeps its names and its row numbers.
  DataLoader named(std::make_shared<NumberRows>(main ? 7 : 0),
                   {.batch_size = 2, .shuffle = false, .group_by_length = false});
  auto sent = accelerator.prepare_data_loader(named, {.dispatch_batches = true});
  for (const Batch& batch : sent) {
    EXPECT_EQ(batch.indices, values(batch["row"]));
  }
}

TEST(PreparedLoader, WhatRankZeroCannotReadIsThrownOnEveryRank) {
  auto accelerator = make_accelerator();
  for (const int64_t prefetch : {0, 2}) {
    Stream<Tensor> range{30, 5};
    auto loader =
        accelerator.prepare_data_loader(range, {.dispatch_batches = true, .prefetch = prefetch});
    try {
      for (const auto& batch : loader) {
        (void)batch;
      }
      ADD_FAILURE() << "nothing was thrown";
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find("bad row"), std::string::npos);
    }
    accelerator.wait_for_everyone(); // the group stays usable
  }
}

TEST(PreparedLoader, EvenBatchesWrapRoundToTheFirstRows) {
  auto accelerator = make_accelerator();
  const int rank = accelerator.process_index();
  const int world = accelerator.num_processes();
  if (world == 1) {
    return;
  }
  const int64_t last = 3 * world + 1; // one row more than a full global batch
  Rows tail{last - 1};
  append(tail, range_of(0, 3 * world - 1));
  const auto expect_tail = [&](auto& range, int64_t stride) {
    auto loader = accelerator.prepare_data_loader(range, {.even_batches = true});
    const Pass pass = run(accelerator, loader);
    ASSERT_EQ(pass.mine.size(), 2u);
    Rows expected;
    for (int64_t i = 0; i < 3; ++i) {
      expected.push_back(tail[static_cast<size_t>(stride == 1 ? rank * 3 + i : rank + i * world)]);
    }
    EXPECT_EQ(pass.mine[1], expected);
    EXPECT_EQ(pass.gathered[1], Rows{last - 1});
  };
  Stream<Tensor> stream{last};
  expect_tail(stream, 1); // blocks
  DataLoader own(std::make_shared<NumberRows>(last),
                 {.batch_size = 3, .shuffle = false, .group_by_length = false});
  expect_tail(own, world); // in turns
  // Values that are not one per sample cannot be distinguished from the repeated ones.
  auto loader = accelerator.prepare_data_loader(stream, {.even_batches = true});
  int turns = 0;
  for (const auto& batch : loader) {
    const auto mean = batch.to(torch::kDouble).mean();
    if (++turns == 2) {
      EXPECT_THROW(accelerator.gather_for_metrics(mean), InputError);
    }
  }
}

TEST(PreparedLoader, SplitBatchesHoldTheSameRowsOnAnyNumberOfRanks) {
  auto accelerator = make_accelerator();
  Stream<Tensor> stream{10};
  DataLoader own(std::make_shared<NumberRows>(10),
                 {.batch_size = 3, .shuffle = false, .group_by_length = false});
  const auto expect = [&](auto& range) {
    for (const bool dispatch : {false, true}) {
      auto loader = accelerator.prepare_data_loader(
          range, {.split_batches = true, .dispatch_batches = dispatch});
      const Pass pass = run(accelerator, loader);
      ASSERT_EQ(pass.gathered.size(), 4u);
      for (int64_t turn = 0; turn < 4; ++turn) {
        EXPECT_EQ(sorted(pass.gathered[static_cast<size_t>(turn)]),
                  range_of(3 * turn, std::min<int64_t>(3 * turn + 3, 10)));
      }
    }
  };
  expect(stream);
  expect(own);
}

TEST(PreparedLoader, GatherForMetricsAfterSkippingGivesTheRowsThatAreLeft) {
  auto accelerator = make_accelerator();
  const int world = accelerator.num_processes();
  const auto expect = [&](auto& range, int64_t batch, int64_t rows) {
    for (const auto& config : configurations()) {
      if (!fits(config, batch, world)) {
        continue;
      }
      SCOPED_TRACE(text(config));
      auto loader = accelerator.prepare_data_loader(range, config);
      loader.set_epoch(0);
      const Pass whole = run(accelerator, loader);
      for (const int64_t skip : {2, 100}) {
        loader.set_epoch(0);
        Pass rest;
        rest = run(accelerator, accelerator.skip_first_batches(loader, skip));
        const int64_t done = skip * batch * (config.split_batches ? 1 : world);
        EXPECT_EQ(static_cast<int64_t>(rest.all().size()), std::max<int64_t>(rows - done, 0));
        Rows expected;
        for (size_t i = static_cast<size_t>(skip); i < whole.gathered.size(); ++i) {
          append(expected, whole.gathered[i]);
        }
        EXPECT_EQ(sorted(rest.all()), sorted(expected));
      }
      loader.set_epoch(0);
      EXPECT_EQ(run(accelerator, loader).all(), whole.all()); // only one pass skips
    }
  };
  Stream<Sample> stream{29};
  expect(stream, 3, 29);
  DataLoader own(std::make_shared<NumberRows>(29),
                 {.batch_size = 2, .shuffle = true, .group_by_length = false});
  expect(own, 2, 29);
}

TEST(PreparedLoader, SkippingInADataLoaderMakesNoBatch) {
  auto accelerator = make_accelerator();
  const int world = accelerator.num_processes();
  const auto dataset = std::make_shared<NumberRows>(1000 * world);
  DataLoader batches(dataset, {.batch_size = 1, .group_by_length = false});
  auto loader = accelerator.prepare(batches);
  int turns = 0;
  for (const auto& batch : accelerator.skip_first_batches(loader, 990)) {
    turns += static_cast<int>(batch.rows());
  }
  EXPECT_EQ(turns, 10);
  EXPECT_EQ(dataset->collated, 10);
  EXPECT_THROW(loader.skip_first_batches(-1), InputError);
}

TEST(PreparedLoader, LoopsInsideLoopsAndBreakKeepMetricsApart) {
  auto accelerator = make_accelerator();
  const int world = accelerator.num_processes();
  Stream<Tensor> stream{3 * world + 1};
  auto outer = accelerator.prepare_data_loader(stream, {.even_batches = true});
  auto inner = accelerator.prepare_data_loader(stream, {});
  Rows seen;
  for (const auto& batch : outer) {
    EXPECT_EQ(run(accelerator, inner).all(), range_of(0, 3 * world + 1));
    for (const auto& other : inner) {
      (void)other;
      break;
    }
    append(seen, values(accelerator.gather_for_metrics(batch)));
  }
  EXPECT_EQ(sorted(seen), range_of(0, 3 * world + 1));
  int turns = 0;
  for (const auto& batch : outer) {
    (void)batch;
    if (++turns == 2) {
      break; // in the iteration that has repeated rows
    }
  }
  EXPECT_EQ(accelerator.gather_for_metrics(torch::ones({3})).size(0), 3 * world);
}

TEST(PreparedLoader, BreakStopsThePrefetchAndTheNextLoopStartsAfresh) {
  auto accelerator = make_accelerator();
  Stream<Tensor> stream{90};
  auto loader = accelerator.prepare_data_loader(stream, {.prefetch = 4});
  for (const auto& batch : loader) {
    EXPECT_EQ(batch.size(0), 3);
    break;
  }
  EXPECT_EQ(run(accelerator, loader).all(), range_of(0, 90));
  EXPECT_THROW(accelerator.prepare_data_loader(stream, {.prefetch = -1}), InputError);
}

// As with torch's loaders, whose begin() refuses a second iterator.
struct RangeOfOneIterator {
  struct iterator {
    std::shared_ptr<char> alive{};
    int left = 0;
    Tensor operator*() const { return on_device::ones({3}); }
    iterator& operator++() {
      --left;
      return *this;
    }
    bool operator!=(const iterator& other) const { return left != other.left; }
  };
  iterator begin() {
    EXPECT_EQ(alive.use_count(), 1);
    return {alive, 12}; // divides by 1, 2, 3 and 4 ranks
  }
  static iterator end() { return {}; }
  std::shared_ptr<char> alive = std::make_shared<char>();
};

TEST(PreparedLoader, ARangeHasOneIteratorAtATime) {
  auto accelerator = make_accelerator();
  RangeOfOneIterator range;
  auto loader = accelerator.prepare(range);
  for (const bool breaks : {true, false, true}) {
    for (const auto& batch : loader) {
      EXPECT_EQ(batch.numel(), 3);
      if (breaks) {
        break;
      }
    }
  }
}

// Samples with weights. The result equals that of one process with all samples.
TEST(PreparedLoader, TrainingIsThatOfOneProcessInEveryConfiguration) {
  using accelerator_test::Net;
  using accelerator_test::net_of_seed;
  auto accelerator = make_accelerator();
  const int world = accelerator.num_processes();
  const Tensor x =
      on_device::randn({24, 5}, torch::make_generator<at::CPUGeneratorImpl>(4), torch::kDouble);
  const auto loss_of = [&](Net& net, const Tensor& rows) {
    return net->forward(x.index_select(0, rows)).square().sum(1).mean();
  };
  for (const auto& config : configurations()) {
    if (config.even_batches) {
      continue; // counts rows twice
    }
    SCOPED_TRACE(text(config));
    Net net = net_of_seed(1), plain = net_of_seed(1);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    torch::optim::SGD plain_sgd(plain->parameters(), 0.1);
    Stream<Tensor> stream{22};
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    auto loader = accelerator.prepare_data_loader(stream, config);
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (const auto& rows : loader) {
        auto window = accelerator.accumulate(loader, model);
        accelerator.backward(loss_of(model, rows));
        optimizer.step();
        optimizer.zero_grad();
      }
      const int64_t step = 3 * (config.split_batches ? 1 : world);
      for (int64_t begin = 0; begin < 22; begin += step) {
        plain_sgd.zero_grad();
        loss_of(plain, on_device::arange(begin, std::min<int64_t>(begin + step, 22))).backward();
        plain_sgd.step();
      }
    }
    EXPECT_LT(accelerator_test::largest_difference(*net, *plain), 1e-12);
  }
}

} // namespace hasten::prepared_loader_test
