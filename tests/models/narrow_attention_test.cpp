// Attention and dropout in bf16 compared with fp32 on the rounded elements.
#include "attention.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <set>
#include <sstream>

#include "core/dropout.h"
#include "hasten/core/autocast.h"
#include "hasten/core/op_scope.h"
#include "hasten/models/auto_model.h"

namespace hasten {

using at::Tensor;

struct AttentionCase {
  int64_t rows, queries, tokens, heads, width;
};

static Tensor narrow(const Tensor& x) { return x.to(at::kBFloat16); }

static Tensor reference_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                  const Tensor& mask, int64_t heads) {
  const auto split = [&](const Tensor& x) {
    return x.view({x.size(0), x.size(1), heads, x.size(2) / heads}).transpose(1, 2);
  };
  auto scores =
      split(q).matmul(split(k).transpose(2, 3)) / std::sqrt(static_cast<double>(q.size(2) / heads));
  if (mask.defined()) {
    scores = scores + mask;
  }
  return torch::softmax(scores, -1).matmul(split(v)).transpose(1, 2).reshape(q.sizes());
}

static double relative(const Tensor& a, const Tensor& b) {
  return ((a.to(at::kDouble) - b.to(at::kDouble)).norm() / b.to(at::kDouble).norm()).item<double>();
}

TEST(NarrowAttention, IsThatOfTheRoundedNumbers) {
  torch::manual_seed(2);
  for (const AttentionCase& c : {AttentionCase{2, 5, 5, 2, 8}, AttentionCase{3, 1, 37, 4, 16},
                                 AttentionCase{2, 64, 64, 3, 32}}) {
    // Masks of a text's tokens, of each query, and of both.
    for (const char* masked : {"no", "texts", "queries", "both"}) {
      SCOPED_TRACE(masked);
      std::vector<Tensor> own, wide;
      for (const int64_t length : {c.queries, c.tokens, c.tokens}) {
        own.push_back(narrow(torch::randn({c.rows, length, c.heads * c.width})).requires_grad_());
        wide.push_back(own.back().detach().to(at::kDouble).requires_grad_());
      }
      Tensor mask;
      if (masked != std::string("no")) {
        mask = torch::zeros({masked == std::string("queries") ? 1 : c.rows, 1,
                             masked == std::string("texts") ? 1 : c.queries, c.tokens});
        const Tensor ignored = torch::rand_like(mask) < 0.4;
        ignored.select(3, 0).fill_(false);
        mask.masked_fill_(ignored, std::numeric_limits<float>::lowest());
      }
      const Tensor mine = detail::self_attention(own[0], own[1], own[2], mask, c.heads, 0);
      const Tensor theirs = reference_attention(wide[0], wide[1], wide[2], mask, c.heads);
      ASSERT_EQ(mine.scalar_type(), at::kBFloat16);
      EXPECT_LT(relative(mine, theirs), 0x1p-7);
      const Tensor gradient = narrow(torch::randn(mine.sizes()));
      mine.backward(gradient);
      theirs.backward(gradient.to(at::kDouble));
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_LT(relative(own[i].grad(), wide[i].grad()), 0x1p-6) << i;
      }
    }
  }
}

TEST(NarrowAttention, ARowOfWhichAllIsMaskedAwayIsFinite) {
  const Tensor x = narrow(torch::randn({1, 4, 8}));
  const Tensor mask = torch::full({1, 1, 1, 4}, std::numeric_limits<float>::lowest());
  EXPECT_TRUE(detail::self_attention(x, x, x, mask, 2, 0).isfinite().all().item<bool>());
}

// out = P v is linear in v: sum(out g) = sum(v dv) holds only if backward uses the mask of forward.
TEST(NarrowAttention, DropsTheSameInBackward) {
  torch::manual_seed(4);
  const auto input = [] { return narrow(torch::randn({4, 45, 32})).requires_grad_(); };
  const Tensor q = input(), k = input(), v = input();
  const Tensor out = detail::self_attention(q, k, v, {}, 4, 0.3);
  const Tensor other = detail::self_attention(q, k, v, {}, 4, 0.3);
  EXPECT_GT(relative(out.detach(), other.detach()), 0.1) << "another seed";
  const Tensor g = out.detach();
  out.backward(g);
  const auto inner = [](const Tensor& a, const Tensor& b) {
    return (a.detach().to(at::kDouble) * b.detach().to(at::kDouble)).sum().item<double>();
  };
  const double size = std::sqrt(inner(out, out) * inner(g, g));
  EXPECT_NEAR(inner(out, g), inner(v, v.grad()), 0x1p-7 * size);
  // Another mask gives another value.
  EXPECT_LT(inner(other, g), (1 - 0x1p-5) * size);
  // Kept elements are scaled up, so the mean over many draws is the result without dropout.
  Tensor mean = torch::zeros(out.sizes());
  for (int i = 0; i < 64; ++i) {
    const torch::NoGradGuard no_grad;
    mean += detail::self_attention(q, k, v, {}, 4, 0.3) / 64;
  }
  const Tensor plain = detail::self_attention(q, k, v, {}, 4, 0).detach();
  EXPECT_LT(relative(mean, plain), 0.2);
}

// Shapes and strides of the observed products.
struct ProductShapes final : detail::OpObserver {
  void pass(const detail::OpPassing& passing) override {
    if (detail::op_info(passing.op).name == "aten::bmm") {
      std::ostringstream shape;
      for (const c10::IValue& value : torch::jit::last(passing.stack, 2)) {
        shape << value.toTensor().sizes() << value.toTensor().strides();
      }
      shapes.insert(shape.str());
      ++products;
    }
    passing.run();
  }
  std::set<std::string> shapes{};
  int64_t products = 0;
};

// The memory that libraries cache per shape must not grow with the lengths of texts. There are
// three shapes (scores and their gradient share one) for each of 16 paddings up to 512 tokens.
TEST(NarrowAttention, ManyLengthsAreFewShapesOfProducts) {
  ProductShapes seen;
  int64_t passes = 0;
  {
    const detail::OpScope scope(&seen);
    for (int64_t tokens = 2; tokens <= 512; tokens += 7, ++passes) {
      const Tensor x = narrow(torch::ones({1, tokens, 8})).requires_grad_();
      detail::self_attention(x, x, x, {}, 2, 0.1).sum().backward();
    }
  }
  EXPECT_EQ(seen.products, 6 * passes);
  EXPECT_LE(seen.shapes.size(), 3 * 16);
}

TEST(Dropout, InBf16IsThatOfTheSameNumbersInFp32) {
  const Tensor x = narrow(torch::randn({3, 5000})).requires_grad_();
  const Tensor residual = torch::randn({3, 5000}).requires_grad_();
  const auto run = [&](const Tensor& in, const Tensor& add) {
    torch::manual_seed(9);
    return detail::dropout_add(in, add, 0.25);
  };
  const Tensor wide = run(x.detach().to(at::kFloat), residual.detach());
  const Tensor sum = run(x, residual);
  EXPECT_TRUE(torch::equal(sum, wide));
  const Tensor alone = run(x, {});
  EXPECT_TRUE(torch::equal(alone, narrow(run(x.detach().to(at::kFloat), {}))));
  const Tensor g = torch::randn({3, 5000});
  sum.backward(g);
  EXPECT_TRUE(torch::equal(residual.grad(), g));
  EXPECT_TRUE(torch::equal(x.grad(), narrow(run(g, {}))));
}

// Loss and gradients of a whole model are close to those in fp32, and its products ran in bf16.
TEST(NarrowAttention, ABertInBf16FollowsTheOneInFp32) {
  torch::manual_seed(6);
  PreTrainedConfig config = AutoConfig::from_shape("bert-mini");
  config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0;
  config.num_hidden_layers = 2;
  auto model = AutoModelForSequenceClassification::from_config(config);
  const Tensor ids = torch::randint(1, 1000, {4, 33});
  Tensor mask = torch::ones({4, 33}, torch::kLong);
  mask[1].slice(0, 20).zero_();
  const Tensor labels = torch::randint(0, 2, {4});
  const auto gradient = [&](bool bf16) {
    model->zero_grad();
    Tensor loss;
    {
      const Autocast autocast({.enabled = bf16});
      const Tensor logits = model->forward({ids, mask}).logits;
      EXPECT_EQ(logits.scalar_type(), bf16 ? at::kBFloat16 : at::kFloat);
      loss = torch::cross_entropy_loss(logits, labels);
    }
    loss.backward();
    std::vector<Tensor> flat;
    for (const Tensor& parameter : model->parameters()) {
      flat.push_back(parameter.grad().flatten().clone());
    }
    return torch::cat(flat);
  };
  const Tensor wide = gradient(false);
  EXPECT_LT(relative(gradient(true), wide), 0.03);
}

} // namespace hasten
