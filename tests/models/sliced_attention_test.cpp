#include "sliced_attention.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "small_family.h"
#include "support/error_of.h"

namespace hasten::sliced_attention_test {

using at::Tensor;
using detail::AttentionOptions;
using detail::sliced_attention;

class SlicedAttention : public testing::Test {
  testing_support::OneThread one_thread_{};
};

struct SlicedCase {
  int64_t rows, queries, tokens, width;
  AttentionOptions options;
};

Tensor reference(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                 const AttentionOptions& options) {
  const auto split = [&](const Tensor& x, int64_t heads) {
    return x.view({x.size(0), x.size(1), heads, -1})
        .transpose(1, 2)
        .repeat_interleave(options.heads / heads, 1);
  };
  const Tensor keys = split(k, options.key_value_heads);
  Tensor scores = split(q, options.heads).matmul(keys.transpose(2, 3)) /
                  std::sqrt(static_cast<double>(keys.size(3)));
  if (options.softcap > 0) {
    scores = (scores / options.softcap).tanh() * options.softcap;
  }
  if (mask.defined()) {
    scores = scores + mask;
  }
  if (options.causal) {
    const Tensor later = at::ones({q.size(1), k.size(1)}, at::kBool).triu(1);
    scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
  }
  return at::softmax(scores, -1)
      .matmul(split(v, options.key_value_heads))
      .transpose(1, 2)
      .reshape(q.sizes());
}

double distance(const Tensor& a, const Tensor& b) {
  return ((a.to(at::kDouble) - b.to(at::kDouble)).norm() / b.to(at::kDouble).norm()).item<double>();
}

TEST_F(SlicedAttention, EqualsAttentionOnTheWholeScores) {
  torch::manual_seed(1);
  const std::vector<SlicedCase> cases{
      {2, 5, 5, 8, {.heads = 2, .key_value_heads = 2}},
      {3, 1, 37, 16, {.heads = 4, .key_value_heads = 2}},
      {1, 270, 270, 8, {.heads = 6, .key_value_heads = 2, .causal = true}},
      {1, 140, 260, 8, {.heads = 3, .key_value_heads = 3}},
      {2, 129, 129, 4, {.heads = 2, .key_value_heads = 1, .causal = true}},
      {2, 129, 129, 4, {.heads = 2, .key_value_heads = 1, .softcap = 0.5, .causal = true}}};
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const SlicedCase& c : cases) {
      for (const char* masked : {"no", "texts", "both"}) {
        SCOPED_TRACE(c10::str(dtype, " queries ", c.queries, " mask ", masked));
        std::vector<Tensor> own, wide;
        for (const auto& [length, heads] : {std::pair{c.queries, c.options.heads},
                                            {c.tokens, c.options.key_value_heads},
                                            {c.tokens, c.options.key_value_heads}}) {
          own.push_back(at::randn({c.rows, length, heads * c.width}).to(dtype).requires_grad_());
          wide.push_back(own.back().detach().to(at::kDouble).requires_grad_());
        }
        Tensor mask;
        if (masked != std::string("no")) {
          mask = at::zeros({c.rows, 1, masked == std::string("texts") ? 1 : c.queries, c.tokens});
          const Tensor ignored = at::rand_like(mask) < 0.4;
          ignored.select(3, 0).fill_(false);
          mask.masked_fill_(ignored, std::numeric_limits<float>::lowest());
        }
        const Tensor mine = sliced_attention(own[0], own[1], own[2], mask, c.options);
        const Tensor theirs = reference(wide[0], wide[1], wide[2], mask, c.options);
        ASSERT_EQ(mine.scalar_type(), dtype);
        const double limit = dtype == at::kFloat ? 2e-6 : 0x1p-6;
        EXPECT_LT(distance(mine, theirs), limit);
        const Tensor gradient = at::randn(mine.sizes()).to(dtype);
        mine.backward(gradient);
        theirs.backward(gradient.to(at::kDouble));
        for (size_t i = 0; i < 3; ++i) {
          EXPECT_LT(distance(own[i].grad(), wide[i].grad()), limit) << i;
        }
      }
    }
  }
}

// out = P v is linear in v: sum(out g) = sum(v dv) holds only if backward uses the mask of forward.
TEST_F(SlicedAttention, DropsTheSameInBackward) {
  torch::manual_seed(4);
  const AttentionOptions options{.heads = 4, .key_value_heads = 2, .dropout = 0.3, .causal = true};
  const auto input = [](int64_t heads) { return at::randn({2, 200, heads * 8}).requires_grad_(); };
  const Tensor q = input(4), k = input(2), v = input(2);
  const Tensor out = sliced_attention(q, k, v, {}, options);
  const Tensor g = out.detach();
  out.backward(g);
  EXPECT_NEAR((out * g).sum().item<double>() / (v * v.grad()).sum().item<double>(), 1, 1e-4);
  EXPECT_GT(distance(sliced_attention(q, k, v, {}, options).detach(), g), 0.1) << "another seed";
  Tensor mean = at::zeros(out.sizes());
  const at::NoGradGuard no_grad;
  for (int i = 0; i < 24; ++i) {
    mean += sliced_attention(q, k, v, {}, options) / 24;
  }
  AttentionOptions plain = options;
  plain.dropout = 0;
  EXPECT_LT(distance(mean, sliced_attention(q, k, v, {}, plain)), 0.3);
}

TEST_F(SlicedAttention, ADecoderGivesTheSameWithAndWithoutIt) {
  for (const char* type : {"gpt2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3"}) {
    SCOPED_TRACE(type);
    PreTrainedConfig config = testing_support::small_config(type);
    config.max_position_embeddings = 160;
    const auto run = [&](const char* implementation, at::ScalarType dtype) {
      config.attn_implementation = implementation;
      torch::manual_seed(2);
      PreTrainedModel model = model_from_config(config, ModelTask::causal_lm);
      model->to(dtype);
      const Tensor ids = at::randint(2, testing_support::kSmallVocab, {2, 150}, at::kLong);
      Tensor mask = at::ones_like(ids);
      mask[1].slice(0, 146).fill_(0); // a window of 7 tokens has others
      model->forward({.input_ids = ids, .attention_mask = mask, .labels = ids}).loss.backward();
      std::vector<Tensor> gradients;
      for (const auto& parameter : model->parameters()) {
        gradients.push_back(parameter.grad());
      }
      return gradients;
    };
    const auto expected = run("eager", at::kDouble);
    for (const auto* implementation : {"eager", "sdpa"}) {
      const auto found = run(implementation, at::kFloat);
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_LT((found[i] - expected[i]).abs().max().item<double>(), 2e-5) << implementation;
      }
    }
  }
  PreTrainedConfig config = testing_support::small_config("gpt2");
  config.attn_implementation = "flash";
  EXPECT_NE(testing_support::error_of([&] { config.validate(); }).find("attn_implementation"),
            std::string::npos);
}

} // namespace hasten::sliced_attention_test
