// Gradients of an embedding with sparse=true stay sparse and are those of the joined batch.
#include "accelerator/plain_steps.h"
#include "hasten/optim/adamw.h"

namespace hasten::sparse_gradient_test {

using accelerator_test::accelerator_of;
using accelerator_test::expect_says;
using accelerator_test::message_of;
using at::Tensor;

struct WordsImpl : torch::nn::Module {
  explicit WordsImpl(bool sparse, bool tied = false) : tied(tied) {
    words = register_module(
        "words", torch::nn::Embedding(torch::nn::EmbeddingOptions(50, 4).sparse(sparse)));
    head = register_module("head", torch::nn::Linear(4, 50));
    to(at::kDouble);
  }
  Tensor forward(const Tensor& ids) {
    const Tensor x = words->forward(ids).mean(1);
    return tied ? at::linear(x, words->weight, head->bias) + 0 * head->weight.sum()
                : head->forward(x);
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::Linear head{nullptr};
  bool tied;
};
TORCH_MODULE(Words);

struct Rows {
  Tensor ids, labels;
};

/// Different words for each rank and turn, of which few are repeated; the last rank has no second batch.
Rows rows_of(int rank, int turn) {
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(30 + rank + 10 * turn);
  return {at::randint(0, 50, {1 + rank, 3}, generator, at::kLong),
          at::randint(0, 50, {1 + rank}, generator, at::kLong)};
}

Tensor sum_loss(Words& model, const Rows& rows) {
  return at::cross_entropy_loss(model->forward(rows.ids), rows.labels, {}, at::Reduction::Sum);
}

Words words_of(uint64_t seed, bool sparse, bool tied = false) {
  torch::manual_seed(seed);
  return Words(sparse, tied);
}

template <typename Optimizer, typename Options>
void expect_as_plain(const Options& options, bool tied) {
  constexpr int kWindows = 3;
  auto accelerator = accelerator_of({.gradient_accumulation_steps = 2});
  const int world = accelerator.num_processes(), own = accelerator.process_index();
  Words plain = words_of(1, false, tied);
  Optimizer of_plain(plain->parameters(), options);
  Words model = words_of(1 + static_cast<uint64_t>(own), true, tied);
  Optimizer of_model(model->parameters(), options);
  auto [prepared, optimizer] = accelerator.prepare(model, of_model);
  for (int window = 0; window < kWindows; ++window) {
    Tensor sum = at::zeros({}, at::kDouble);
    std::vector<Tensor> ids;
    double rows = 0;
    for (int rank = 0; rank < world; ++rank) {
      for (int turn = 2 * window; turn < 2 * window + 2; ++turn) {
        const Rows batch = rows_of(rank, turn);
        sum = sum + sum_loss(plain, batch);
        rows += static_cast<double>(batch.labels.numel());
        ids.push_back(batch.ids.flatten());
      }
    }
    of_plain.zero_grad();
    (sum / rows).backward();
    for (int turn = 2 * window; turn < 2 * window + 2; ++turn) {
      const Rows batch = rows_of(own, turn);
      auto guard = accelerator.accumulate(prepared);
      accelerator.backward(sum_loss(model, batch), static_cast<double>(batch.labels.numel()));
      if (turn % 2 == 1) {
        const Tensor gradient = model->words->weight.grad();
        EXPECT_EQ(gradient.is_sparse(), !tied);
        const Tensor wanted = plain->words->weight.grad();
        EXPECT_LE((gradient.to_dense() - wanted).abs().max().item<double>(), 1e-12);
        if (!tied) {
          EXPECT_EQ(gradient._nnz(), std::get<0>(at::_unique(at::cat(ids))).numel());
        }
        const double norm = accelerator.clip_grad_norm_(prepared, 0.05);
        EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.05), 1e-12);
        EXPECT_EQ(model->words->weight.grad().is_sparse(), !tied);
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    of_plain.step();
    EXPECT_LE(accelerator_test::largest_difference(*model, *plain), 1e-12);
  }
}

TEST(SparseGradients, StaySparseAndAreThoseOfTheJoinedBatch) {
  expect_as_plain<torch::optim::SGD>(torch::optim::SGDOptions(0.5), false);
  expect_as_plain<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1), false);
}

TEST(SparseGradients, OfATiedWeightAreDenseAndRight) {
  expect_as_plain<torch::optim::SGD>(torch::optim::SGDOptions(0.5), true);
}

TEST(SparseGradients, OfEarlierBackwardsAreAdded) {
  auto accelerator = accelerator_of();
  Words model = words_of(1, true);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  auto [prepared, optimizer] = accelerator.prepare(model, sgd);
  const Rows batch = rows_of(0, 0); // the same on every rank
  const auto backward = [&, &prepared = prepared] {
    auto window = accelerator.accumulate(prepared);
    accelerator.backward(sum_loss(model, batch), 1);
  };
  backward();
  const Tensor once = model->words->weight.grad().to_dense();
  backward(); // without zero_grad(), as torch adds
  EXPECT_LE((model->words->weight.grad().to_dense() - 2 * once).abs().max().item<double>(), 1e-12);
}

TEST(SparseGradients, WhatNeedsDenseOnesSaysSoByName) {
  const Rows batch = rows_of(0, 0);
  if (testing_support::test_world().world_size > 1) {
    auto accelerator = accelerator_of({.strategy = Strategy::fsdp});
    Words model = words_of(1, true);
    torch::optim::SGD sgd(model->parameters(), 0.1);
    auto [prepared, optimizer] = accelerator.prepare(model, sgd);
    auto window = accelerator.accumulate(prepared);
    expect_says(message_of<Error>([&] { accelerator.backward(sum_loss(model, batch), 1); }),
                "the gradient of parameter \"words.weight\" is sparse");
  }
  auto accelerator = accelerator_of();
  Words model = words_of(1, true);
  AdamW adamw(model->parameters());
  auto [prepared, optimizer] = accelerator.prepare(model, adamw);
  auto window = accelerator.accumulate(prepared);
  accelerator.backward(sum_loss(model, batch), 1);
  expect_says(message_of([&, &optimizer = optimizer] { optimizer.step(); }),
              "a gradient is sparse: shape=[50, 4]");
}

} // namespace hasten::sparse_gradient_test
