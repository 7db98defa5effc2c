// The table: {accumulation 1, 3, 4} x {even, ragged, one rank without rows} x
// {mean, token-weighted} on this world, for a BERT (dropout 0, grouped by length)
// and a convnet with BatchNorm in evaluation mode: the training run through the
// public API against a plain torch loop over the joined rows. fp64: first gradient
// within 1e-12 of its norm, parameters after all steps within 1e-10.
// Each world prints its columns; HASTEN_EXACTNESS_TABLE=FILE appends them there.
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <sstream>

#include "accelerator/plain_steps.h"
#include "hasten/data/loader.h"
#include "hasten/data/tokenized_dataset.h"
#include "hasten/models/bert.h"

namespace hasten::exactness_test {

using at::Tensor;
using Windows = std::vector<std::vector<int64_t>>; // [step][row of the data]

enum class Rows { even, ragged, empty_rank };
const char* text_of(Rows rows) {
  return rows == Rows::even     ? "even"
         : rows == Rows::ragged ? "ragged"
                                : "one empty rank";
}

constexpr int64_t kBatch = 2; // rows of a full batch on a rank

// Rows of the data: two windows of k batches; ragged leaves a short last window
// whose batches differ by rank; with an empty rank the last one has none in it.
int64_t row_count(Rows rows, int64_t k, int64_t world) {
  const int64_t full = kBatch * world * k;
  return rows == Rows::even ? 2 * full
         : rows == Rows::ragged
             ? full + kBatch * world + (world == 1 ? 1 : world + 1)
             : full + std::max<int64_t>(1, world - 1);
}

struct Bert {
  static constexpr const char* kName = "BERT";
  using Model = BertForSequenceClassification;

  explicit Bert(int64_t rows) {
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(11);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t length = 3 + row * 7 % 8;
      const Tensor ids =
          torch::randint(5, 60, {length}, generator, torch::kLong);
      texts.emplace_back(
          ids.const_data_ptr<int64_t>(),
          ids.const_data_ptr<int64_t>() + length);
      labels.push_back(row % 3);
    }
    dataset = std::make_shared<TokenizedDataset>(texts, labels);
  }
  static Model make(uint64_t seed) {
    BertConfig config = BertConfig::from_shape("bert-tiny", 64);
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0;
    config.max_position_embeddings = 16;
    config.id2label = {"a", "b", "c"};
    torch::manual_seed(seed);
    Model model(config);
    model->to(torch::kDouble);
    return model;
  }
  Tensor losses(Model& model, const Batch& batch) const { // [B]
    return torch::nn::functional::cross_entropy(
        model->forward(batch["input_ids"], batch["attention_mask"]),
        batch["labels"],
        torch::nn::functional::CrossEntropyFuncOptions().reduction(
            torch::kNone));
  }
  Tensor tokens(const Batch& batch) const {
    return batch["attention_mask"].sum(1).to(torch::kDouble);
  }

  std::vector<std::vector<int64_t>> texts{};
  std::vector<int64_t> labels{};
  std::shared_ptr<Dataset> dataset{};
};

struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() {
    conv = register_module("conv", torch::nn::Conv2d(1, 4, 3));
    norm = register_module("norm", torch::nn::BatchNorm2d(4));
    out = register_module("out", torch::nn::Linear(64, 1));
    torch::nn::init::normal_(norm->weight, 1.0, 0.2);
    norm->running_mean.uniform_(-0.5, 0.5);
    norm->running_var.uniform_(0.5, 2.0);
    to(torch::kDouble);
    eval(); // statistics of a batch depend on who is in it
  }
  Tensor forward(const Tensor& x) {
    return out->forward(torch::relu(norm->forward(conv->forward(x))).flatten(1))
        .squeeze(1);
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear out{nullptr};
};
TORCH_MODULE(ConvNet);

struct Images : Dataset {
  explicit Images(int64_t rows) {
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(12);
    x = torch::randn({rows, 1, 6, 6}, generator, torch::kDouble);
    y = x.flatten(1).sum(1).sin();
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
  Tensor x, y;
};

struct Conv {
  static constexpr const char* kName = "convnet";
  using Model = ConvNet;
  explicit Conv(int64_t rows) : dataset(std::make_shared<Images>(rows)) {}
  static Model make(uint64_t seed) {
    torch::manual_seed(seed);
    return Model();
  }
  Tensor losses(Model& model, const Batch& batch) const {
    return (model->forward(batch["x"]) - batch["y"]).square();
  }
  Tensor tokens(
      const Batch& batch) const { // any weight will do: pixels above 0
    return 1 + (batch["x"] > 0).flatten(1).sum(1).to(torch::kDouble);
  }
  std::shared_ptr<Dataset> dataset{};
};

// The joined batch's mean loss.
template <typename Case, typename Model>
std::pair<Tensor, double> loss_of(
    const Case& data, Model& model, const Batch& batch, bool by_tokens) {
  const Tensor losses = data.losses(model, batch);
  if (!by_tokens) {
    return {losses.mean(), static_cast<double>(batch.rows())};
  }
  const Tensor tokens = data.tokens(batch);
  return {(losses * tokens).sum(), tokens.sum().template item<double>()};
}

Tensor flat_gradient(const torch::nn::Module& module) {
  std::vector<Tensor> parts;
  for (const Tensor& p : module.parameters()) {
    parts.push_back(
        p.grad().defined() ? p.grad().flatten()
                           : torch::zeros_like(p).flatten());
  }
  return torch::cat(parts).clone();
}

struct Outcome {
  Tensor first_gradient{};
  std::vector<Tensor> parameters{};
  Windows windows{}; // of this rank
};

template <typename Case>
Outcome with_accelerator(const Case& data, int64_t k, bool by_tokens) {
  auto accelerator =
      accelerator_test::accelerator_of({.gradient_accumulation_steps = k});
  auto net = Case::make(static_cast<uint64_t>(accelerator.process_index()) + 1);
  DataLoader batches(
      data.dataset, {.batch_size = kBatch, .group_by_length = true});
  torch::optim::SGD sgd(
      net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  Outcome outcome;
  int64_t turn = 0;
  for (const Batch& batch : loader) {
    auto window = accelerator.accumulate(model);
    const auto [loss, weight] = loss_of(data, model, batch, by_tokens);
    if (by_tokens) {
      accelerator.backward(loss, weight);
    } else {
      accelerator.backward(loss);
    }
    outcome.windows.resize(static_cast<size_t>(turn++ / k) + 1);
    auto& rows = outcome.windows.back();
    rows.insert(rows.end(), batch.indices.begin(), batch.indices.end());
    if (accelerator.sync_gradients() && !outcome.first_gradient.defined()) {
      outcome.first_gradient = flat_gradient(*net);
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  // All ranks' rows by step: [n, 2] of (step, row).
  std::vector<int64_t> pairs;
  for (size_t w = 0; w < outcome.windows.size(); ++w) {
    for (const int64_t row : outcome.windows[w]) {
      pairs.insert(pairs.end(), {static_cast<int64_t>(w), row});
    }
  }
  const Tensor all = accelerator.gather_for_metrics(
      torch::tensor(pairs, torch::kLong).reshape({-1, 2}));
  outcome.windows.clear();
  for (int64_t i = 0; i < all.size(0); ++i) {
    const auto step = static_cast<size_t>(all[i][0].item<int64_t>());
    outcome.windows.resize(std::max(outcome.windows.size(), step + 1));
    outcome.windows[step].push_back(all[i][1].item<int64_t>());
  }
  for (const Tensor& p : net->parameters()) {
    outcome.parameters.push_back(p.detach());
  }
  accelerator.finish();
  return outcome;
}

template <typename Case>
Outcome with_torch(const Case& data, const Windows& windows, bool by_tokens) {
  auto net = Case::make(1);
  torch::optim::SGD sgd(
      net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  Outcome outcome;
  for (const auto& rows : windows) {
    sgd.zero_grad();
    const Batch batch = data.dataset->collate(rows);
    const auto [loss, weight] = loss_of(data, net, batch, by_tokens);
    (by_tokens ? loss / weight : loss).backward();
    if (!outcome.first_gradient.defined()) {
      outcome.first_gradient = flat_gradient(*net);
    }
    sgd.step();
  }
  for (const Tensor& p : net->parameters()) {
    outcome.parameters.push_back(p.detach());
  }
  return outcome;
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
      for (const bool by_tokens : {false, true}) {
        SCOPED_TRACE(
            testing::Message() << "accumulation " << k << ", " << text_of(rows)
                               << (by_tokens ? ", tokens" : ", mean"));
        const Outcome ours = with_accelerator(data, k, by_tokens);
        const Outcome plain = with_torch(data, ours.windows, by_tokens);
        size_t seen = 0;
        for (const auto& window : ours.windows) {
          seen += window.size();
        }
        EXPECT_EQ(static_cast<int64_t>(seen), count);
        ASSERT_EQ(
            ours.windows.size(), rows == Rows::ragged && k == 1 ? 3u : 2u);
        const double gradient =
            ((ours.first_gradient - plain.first_gradient).norm() /
             plain.first_gradient.norm())
                .template item<double>();
        double parameters = 0;
        for (size_t p = 0; p < plain.parameters.size(); ++p) {
          parameters = std::max(
              parameters,
              (ours.parameters[p] - plain.parameters[p])
                  .abs()
                  .max()
                  .template item<double>());
        }
        EXPECT_LE(gradient, 1e-12);
        EXPECT_LE(parameters, 1e-10);
        table << k << "  " << std::left << std::setw(14) << text_of(rows)
              << "  " << std::setw(6) << (by_tokens ? "tokens" : "mean") << "  "
              << std::setw(5) << ours.windows.size() << "  " << std::scientific
              << std::setprecision(1) << gradient << "   " << parameters
              << '\n';
      }
    }
  }
  if (testing_support::test_world().rank == 0) {
    publish(table.str());
  }
}

TEST(Exactness, EverySplitOfBertIsTheJoinedBatch) { check_table<Bert>(); }
TEST(Exactness, EverySplitOfTheConvnetIsTheJoinedBatch) { check_table<Conv>(); }

} // namespace hasten::exactness_test
