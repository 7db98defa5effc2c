// Compares a training run through the public API with the plain loop of plain_loop.h over the
// joined rows. Cases: {accumulation 1, 3, 4} x {even, ragged, one rank without rows} x {mean,
// token-weighted, masked mean with an empty rank, mean whose last batch throws}. Models: a BERT
// (dropout 0, grouped by length) and the convnet of examples/adopt/. Its BatchNorm is in evaluation
// mode, because the statistics of a batch depend on its rows. fp64: the first gradient is within
// 1e-12 of its norm, the parameters after all steps are within 1e-10.
// Also: torch's loader with a random order, channels_last, a static graph.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <stdexcept>

#include "accelerator/plain_loop.h"
#include "accelerator/plain_steps.h"
#include "adopt/disc_nets.h"
#include "hasten/data/loader.h"
#include "hasten/models/auto_model.h"
#include "hasten/text/tokenized_dataset.h"
#include "support/on_device.h"

namespace hasten::exactness_test {

enum class Rows { even, ragged, empty_rank };
const char* text_of(Rows rows) {
  return rows == Rows::even ? "even" : rows == Rows::ragged ? "ragged" : "one empty rank";
}

// masked: the loss is the mean over the batch's first row only. In some batches of the last rank it
// is the mean over no row: NaN, with weight 0. caught: the last batch of the last rank throws, and
// the loop continues after it.
enum class Kind { mean, tokens, masked, caught };
const char* text_of(Kind kind) {
  return kind == Kind::mean     ? "mean"
         : kind == Kind::tokens ? "tokens"
         : kind == Kind::masked ? "masked"
                                : "caught";
}

constexpr int64_t kBatch = 2; // rows of a full batch on a rank

// Rows of the data, for two windows of k batches. ragged: the last window is short, and its batches
// differ by rank. With an empty rank: the last rank has no batch in the last window.
int64_t row_count(Rows rows, int64_t k, int64_t world) {
  const int64_t full = kBatch * world * k;
  return rows == Rows::even     ? 2 * full
         : rows == Rows::ragged ? full + kBatch * world + (world == 1 ? 1 : world + 1)
                                : full + std::max<int64_t>(1, world - 1);
}

struct Bert {
  static constexpr const char* kName = "BERT";
  using Model = PreTrainedModel;

  explicit Bert(int64_t rows) {
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(11);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t length = 3 + row * 7 % 8;
      const Tensor ids = torch::randint(5, 60, {length}, generator, torch::kLong);
      texts.emplace_back(ids.const_data_ptr<int64_t>(), ids.const_data_ptr<int64_t>() + length);
      labels.push_back(row % 3);
    }
    dataset = std::make_shared<TokenizedDataset>(texts, labels);
  }
  static Model make(uint64_t seed) {
    PreTrainedConfig config = AutoConfig::from_shape("bert-tiny", 64);
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0;
    config.max_position_embeddings = 16;
    config.id2label = {"a", "b", "c"};
    torch::manual_seed(seed);
    Model model = AutoModelForSequenceClassification::from_config(config);
    model->to(testing_support::run_device(), torch::kDouble);
    return model;
  }
  static Tensor losses(Model& model, const Tensor& ids, const Tensor& mask,
                       const Tensor& labels) { // [B]
    return torch::nn::functional::cross_entropy(
        model->forward({ids, mask}).logits, labels,
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
  }
  static Tensor losses(Model& model, const Batch& batch) {
    return losses(model, batch["input_ids"], batch["attention_mask"], batch["labels"]);
  }
  static Tensor tokens(const Batch& batch) {
    return batch["attention_mask"].sum(1).to(torch::kDouble);
  }
  // Losses and tokens of the rows. The test pads them to the longest row.
  std::pair<Tensor, Tensor> terms(Model& model, const std::vector<int64_t>& rows) const {
    const auto count = static_cast<int64_t>(rows.size());
    const Tensor ids = on_device::zeros({count, 12}, torch::kLong);
    const Tensor of_rows = on_device::zeros({count}, torch::kLong);
    for (int64_t i = 0; i < count; ++i) {
      const auto row = static_cast<size_t>(rows[static_cast<size_t>(i)]);
      const auto length = static_cast<int64_t>(texts[row].size());
      ids[i].narrow(0, 0, length).copy_(torch::tensor(texts[row]));
      of_rows[i] = labels[row];
    }
    const Tensor mask = (ids > 0).to(torch::kLong);
    return {losses(model, ids, mask, of_rows), mask.sum(1).to(torch::kDouble)};
  }

  std::vector<std::vector<int64_t>> texts{};
  std::vector<int64_t> labels{};
  std::shared_ptr<Dataset> dataset{};
};

struct Images : Dataset {
  explicit Images(int64_t rows) {
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(12);
    x = torch::randn({rows, 1, kSide, kSide}, generator, torch::kDouble);
    y = torch::stack({x.mean({1, 2, 3}), x.std({1, 2, 3}), x.amax({1, 2, 3})}, 1).sin();
  }
  int64_t size() const override { return y.size(0); }
  Batch collate(const std::vector<int64_t>& indices) const override {
    const Tensor rows = torch::tensor(indices, torch::kLong);
    Batch batch;
    batch.indices = indices;
    batch.tensors["x"] = x.index_select(0, rows);
    batch.tensors["y"] = y.index_select(0, rows);
    return batch;
  }
  Tensor x, y; // [rows, 1, kSide, kSide], [rows, kTargets]
};

struct Conv {
  static constexpr const char* kName = "convnet of examples/adopt";
  using Model = DiscNet;
  explicit Conv(int64_t rows) : images(std::make_shared<Images>(rows)), dataset(images) {}
  static Model make(uint64_t seed) {
    torch::manual_seed(seed);
    Model model;
    for (const auto& block : {model->block1, model->block2, model->block3}) {
      torch::nn::init::normal_(block->norm->weight, 1.0, 0.2);
      block->norm->running_mean.uniform_(-0.2, 0.2);
      block->norm->running_var.uniform_(0.5, 2.0);
    }
    model->to(testing_support::run_device(), torch::kDouble);
    model->eval();
    return model;
  }
  static Tensor losses(Model& model, const Tensor& x, const Tensor& y) {
    return (model->forward(x) - y).square().mean(1);
  }
  static Tensor losses(Model& model, const Batch& batch) {
    return losses(model, batch["x"], batch["y"]);
  }
  // The weight may be any function of the row: here the number of pixels above 0.
  static Tensor bright(const Tensor& x) { return 1 + (x > 0).flatten(1).sum(1).to(torch::kDouble); }
  static Tensor tokens(const Batch& batch) { return bright(batch["x"]); }
  std::pair<Tensor, Tensor> terms(Model& model, const std::vector<int64_t>& rows) const {
    const Tensor index = torch::tensor(rows, torch::kLong);
    const Tensor x = on_device::moved(images->x.index_select(0, index));
    const Tensor y = on_device::moved(images->y.index_select(0, index));
    return {losses(model, x, y), bright(x)};
  }
  std::shared_ptr<Images> images{};
  std::shared_ptr<Dataset> dataset{};
};

struct Outcome : Trained {
  Windows windows{}; // of all ranks
};

template <typename Case, typename Range>
Outcome with_accelerator(const Case& data, Range& batches, const AcceleratorOptions& options,
                         Kind kind, bool channels_last = false) {
  const int64_t k = options.gradient_accumulation_steps;
  auto accelerator = accelerator_test::accelerator_of(options);
  const int world = accelerator.num_processes();
  const bool last = accelerator.process_index() + 1 == world;
  auto net = Case::make(static_cast<uint64_t>(accelerator.process_index()) + 1);
  for (Tensor& p : net->parameters()) {
    if (channels_last && p.dim() == 4) {
      p.set_data(p.detach().contiguous(at::MemoryFormat::ChannelsLast));
    }
  }
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  Outcome outcome;
  int64_t turn = 0;
  for (const Batch& batch : loader) {
    std::vector<int64_t> rows = batch.indices; // rows that count in the loss
    if (kind == Kind::masked) {
      // The window has other batches that are not empty.
      const bool empty = last && turn % k == (world == 1 ? 1 : 0);
      rows.resize(std::min<size_t>(rows.size(), empty ? 0 : 1));
    }
    if constexpr (requires { loader.size(); }) {
      if (kind == Kind::caught && last && turn + 1 == loader.size()) {
        rows.clear();
      }
    }
    const auto counted = static_cast<int64_t>(rows.size());
    auto window = kind == Kind::masked
                      ? accelerator.accumulate(loader, static_cast<double>(counted), model)
                      : accelerator.accumulate(model);
    const Tensor losses = data.losses(model, batch);
    const Tensor tokens = data.tokens(batch);
    try {
      if (kind == Kind::caught && rows.size() < batch.indices.size()) {
        throw std::runtime_error("a bad batch");
      }
      if (kind == Kind::tokens) {
        accelerator.backward((losses * tokens).sum(), tokens.sum().template item<double>());
      } else {
        accelerator.backward(losses.narrow(0, 0, std::min(counted, losses.size(0))).mean());
      }
    } catch (const std::runtime_error&) {
    }
    outcome.windows.resize(static_cast<size_t>(turn++ / k) + 1);
    auto& of_window = outcome.windows.back();
    of_window.insert(of_window.end(), rows.begin(), rows.end());
    optimizer.step();
    if (accelerator.sync_gradients() && !outcome.first_gradient.defined()) {
      outcome.first_gradient = flat_gradient(*net);
    }
    optimizer.zero_grad();
  }
  // All ranks' rows by step: [n, 2] of (step, row).
  std::vector<int64_t> pairs;
  for (size_t w = 0; w < outcome.windows.size(); ++w) {
    for (const int64_t row : outcome.windows[w]) {
      pairs.insert(pairs.end(), {static_cast<int64_t>(w), row});
    }
  }
  const Tensor all =
      accelerator.gather_for_metrics(torch::tensor(pairs, torch::kLong).reshape({-1, 2}));
  outcome.windows.clear();
  for (int64_t i = 0; i < all.size(0); ++i) {
    const auto step = static_cast<size_t>(all[i][0].item<int64_t>());
    outcome.windows.resize(std::max(outcome.windows.size(), step + 1));
    outcome.windows[step].push_back(all[i][1].item<int64_t>());
  }
  for (const Tensor& p : net->parameters()) {
    outcome.parameters.push_back(p.detach());
  }
  accelerator.end_training();
  return outcome;
}

template <typename Case>
Trained with_torch(const Case& data, const Windows& windows, Kind kind) {
  return train_plainly(
      Case::make(1), windows, [&](typename Case::Model& net, const std::vector<int64_t>& rows) {
        auto [losses, tokens] = data.terms(net, rows);
        return std::pair(losses, kind == Kind::tokens ? tokens : torch::ones_like(losses));
      });
}

void publish(const std::string& table) {
  std::cout << table << std::flush;
  const char* file = std::getenv("HASTEN_EXACTNESS_TABLE");
  if (file != nullptr && *file != 0) {
    std::ofstream(file, std::ios::app) << table;
  }
}

template <typename Case>
void check_table() {
  const int world = testing_support::test_world().world_size;
  std::ostringstream table;
  table << Case::kName << ", " << world << " ranks\n"
        << "k  rows            loss    steps  gradient  parameters\n";
  for (const int64_t k : {1, 3, 4}) {
    for (const Rows rows : {Rows::even, Rows::ragged, Rows::empty_rank}) {
      const int64_t count = row_count(rows, k, world);
      const Case data(count);
      for (const Kind kind : {Kind::mean, Kind::tokens, Kind::masked, Kind::caught}) {
        SCOPED_TRACE(testing::Message()
                     << "accumulation " << k << ", " << text_of(rows) << ", " << text_of(kind));
        DataLoader batches(data.dataset, {.batch_size = kBatch, .group_by_length = true});
        const Outcome ours =
            with_accelerator(data, batches, {.gradient_accumulation_steps = k}, kind);
        const Trained plain = with_torch(data, ours.windows, kind);
        size_t seen = 0;
        for (const auto& window : ours.windows) {
          seen += window.size();
        }
        if (kind == Kind::mean || kind == Kind::tokens) {
          EXPECT_EQ(static_cast<int64_t>(seen), count);
          ASSERT_EQ(ours.windows.size(), rows == Rows::ragged && k == 1 ? 3u : 2u);
        }
        const double gradient =
            ((ours.first_gradient - plain.first_gradient).norm() / plain.first_gradient.norm())
                .template item<double>();
        double parameters = 0;
        for (size_t p = 0; p < plain.parameters.size(); ++p) {
          parameters = std::max(
              parameters,
              (ours.parameters[p] - plain.parameters[p]).abs().max().template item<double>());
        }
        EXPECT_LE(gradient, 1e-12);
        EXPECT_LE(parameters, 1e-10);
        table << k << "  " << std::left << std::setw(14) << text_of(rows) << "  " << std::setw(6)
              << text_of(kind) << "  " << std::setw(5) << ours.windows.size() << "  "
              << std::scientific << std::setprecision(1) << gradient << "   " << parameters << '\n';
      }
    }
  }
  if (testing_support::test_world().rank == 0) {
    publish(table.str());
  }
}

TEST(Exactness, EverySplitOfBertIsTheJoinedBatch) { check_table<Bert>(); }
TEST(Exactness, EverySplitOfTheConvnetIsTheJoinedBatch) { check_table<Conv>(); }

struct ByTorch : torch::data::datasets::BatchDataset<ByTorch, Batch> {
  explicit ByTorch(std::shared_ptr<Dataset> of) : rows(std::move(of)) {}
  Batch get_batch(at::ArrayRef<size_t> indices) override {
    return rows->collate({indices.begin(), indices.end()});
  }
  torch::optional<size_t> size() const override { return static_cast<size_t>(rows->size()); }
  std::shared_ptr<Dataset> rows;
};

// Torch's loader with its RandomSampler, weights by channels, a static graph.
TEST(Exactness, TorchsLoaderMemoryFormatsAndStaticGraphsAreTheJoinedBatch) {
  const int world = testing_support::test_world().world_size;
  for (const Kind kind : {Kind::mean, Kind::tokens}) {
    const Conv data(row_count(Rows::ragged, 3, world));
    auto batches = torch::data::make_data_loader(ByTorch(data.dataset), kBatch);
    const Outcome ours = with_accelerator(
        data, *batches, {.gradient_accumulation_steps = 3, .static_graph = true}, kind, true);
    const Trained plain = with_torch(data, ours.windows, kind);
    std::vector<int64_t> seen;
    for (const auto& window : ours.windows) {
      seen.insert(seen.end(), window.begin(), window.end());
    }
    EXPECT_FALSE(std::is_sorted(seen.begin(), seen.end())) << "a random order";
    std::sort(seen.begin(), seen.end());
    for (size_t row = 0; row < seen.size(); ++row) {
      EXPECT_EQ(seen[row], static_cast<int64_t>(row));
    }
    EXPECT_EQ(std::ssize(seen), data.dataset->size());
    EXPECT_LE(((ours.first_gradient - plain.first_gradient).norm() / plain.first_gradient.norm())
                  .item<double>(),
              1e-12);
    for (size_t p = 0; p < plain.parameters.size(); ++p) {
      EXPECT_LE((ours.parameters[p] - plain.parameters[p]).abs().max().item<double>(), 1e-10);
    }
  }
}

} // namespace hasten::exactness_test
