// Every autograd function of ours compared with the same formula in torch's operators, in double and on
// the same dropout mask: first derivatives, and second ones of each pair of inputs, or the error that
// says what to set. The graph shows that our function ran.
#include "derivatives_rig.h"

#include "attention.h"
#include "attention_rows.h"
#include "core/dropout.h"
#include "few_rows.h"
#include "hasten/activation_checkpoint/activation_checkpoint.h"
#include "hasten/core/autocast.h"
#include "hasten/core/linear.h"
#include "hasten/models/linear_cross_entropy.h"
#include "hasten/models/lora.h"
#include "sliced_attention.h"
#include "sync_batch_norm_function.h"

namespace hasten::derivatives_test {

/// The factors of a dropout that begins with this seed.
Tensor kept(at::IntArrayRef sizes, double p, uint64_t seed = 7) {
  torch::manual_seed(seed);
  return detail::dropout_add(at::ones(sizes), {}, p).to(at::kDouble);
}

Tensor activated(const std::string& name, const Tensor& x) {
  return name == "relu"       ? at::relu(x)
         : name == "silu"     ? x * at::sigmoid(x)
         : name == "tanh"     ? at::tanh(x)
         : name == "gelu"     ? at::gelu(x)
         : name == "gelu_new" ? at::gelu(x, "tanh")
                              : x;
}

TEST_F(Derivatives, OfTheLinearLayerAreRight) {
  for (const bool narrow : {false, true}) {
    if (narrow && !linear_uses_bf16()) {
      continue; // torch's linear
    }
    for (const char* name : {"", "relu", "silu", "tanh", "gelu", "gelu_new"}) {
      for (const bool gated : {false, true}) {
        if (gated && *name == '\0') {
          continue;
        }
        const Activation activation{name, gated};
        compare({.name = c10::str("linear ", name, gated ? " gated" : "", narrow ? " bf16" : ""),
                 .node = "LinearNode",
                 .inputs = {random({40, gated ? 64 : 32}), random({24, 32}, 0.3), random({24})},
                 .own =
                     [&](const Tensors& in) {
                       std::optional<Autocast> autocast;
                       if (narrow) {
                         autocast.emplace(AutocastOptions{});
                       }
                       const Tensor y = fast_linear(activation, in[0], in[1], in[2]);
                       return y.to(at::kFloat).square() / 2;
                     },
                 .plain =
                     [&](const Tensors& in) {
                       const auto halves = in[0].chunk(gated ? 2 : 1, 1);
                       const Tensor x = activated(name, halves[0]);
                       const Tensor read = gated ? x * halves[1] : x;
                       return (read.matmul(in[1].t()) + in[2]).square() / 2;
                     },
                 .limit = narrow ? 3e-2 : 1e-4});
      }
    }
  }
}

TEST_F(Derivatives, OfDropoutAreRightInEveryDtype) {
  const std::vector<int64_t> sizes{7, 700}; // more than a block
  for (const double p : {0.0, 0.4}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const bool adds : {false, true}) {
        compare({.name = c10::str("dropout ", p, " ", dtype, adds ? " with a residual" : ""),
                 .node = p > 0 ? "DropoutAdd" : "",
                 .inputs = {random(sizes), random(sizes)},
                 .own =
                     [&](const Tensors& in) {
                       const Tensor y = detail::dropout_add(in[0].to(at::kFloat).sin().to(dtype),
                                                            adds ? in[1] : Tensor(), p);
                       return y.to(at::kFloat).square() * in[1];
                     },
                 .plain =
                     [&](const Tensors& in) {
                       const Tensor dropped =
                           in[0].sin() * (p > 0 ? kept(sizes, p) : 1 + 0 * in[0]);
                       return (adds ? dropped + in[1] : dropped).square() * in[1];
                     },
                 .limit = dtype == at::kFloat ? 1e-4 : 2e-2},
                dtype);
      }
    }
  }
}

struct AttentionCase {
  bool eager = true, sliced = false;
  double dropout = 0;
  const char* node = "";
};

constexpr int64_t kHeads = 2, kWidth = 8, kTokens = 10;

/// Attention of [2, T, heads * width] without padding, with the factors that drop probabilities.
Tensor plain_attention(const Tensors& in, const Tensor& mask, const Tensor& factors) {
  const auto split = [](const Tensor& x) {
    return x.view({x.size(0), x.size(1), kHeads, kWidth}).transpose(1, 2);
  };
  const Tensor scores = split(in[0]).matmul(split(in[1]).transpose(2, 3)) / std::sqrt(kWidth * 1.0);
  return (at::softmax(scores + mask, -1) * factors)
      .matmul(split(in[2]))
      .transpose(1, 2)
      .reshape(in[0].sizes());
}

/// The factors of attention's kernels: each row has its block.
Tensor kept_by_rows(bool narrow, double p) {
  torch::manual_seed(7);
  const uint64_t seed = detail::draw_dropout_seed();
  const Tensor ones = at::ones({kTokens});
  const Tensor factors = at::empty({2, kHeads, kTokens, kTokens});
  for (int64_t row = 0; row < factors.numel() / kTokens; ++row) {
    detail::drop_row(false, ones.const_data_ptr(), detail::block_dropout(seed, row, p), kTokens,
                     factors.mutable_data_ptr<float>() + row * kTokens);
  }
  return narrow ? factors.to(at::kBFloat16).to(at::kDouble) : factors.to(at::kDouble);
}

TEST_F(Derivatives, OfAttentionAreRightOrAdviseEagerWhichHasThem) {
  Tensor mask = at::zeros({2, 1, 1, kTokens});
  mask.index_put_({1, 0, 0, at::arange(6, kTokens)}, -1e4);
  const std::vector<std::pair<at::ScalarType, AttentionCase>> cases{
      {at::kFloat, {}},
      {at::kFloat, {.dropout = 0.3, .node = "DropoutAdd"}},
      {at::kBFloat16, {}},
      {at::kBFloat16, {.dropout = 0.3, .node = "DropoutAdd"}},
      {at::kFloat, {.eager = false, .node = "ScaledDotProductFlashAttentionForCpu"}},
      {at::kFloat, {.eager = false, .dropout = 0.3, .node = "DropoutAdd"}},
      {at::kBFloat16, {.eager = false, .node = "NarrowAttention"}},
      {at::kBFloat16, {.eager = false, .dropout = 0.3, .node = "NarrowAttention"}},
      {at::kFloat, {.eager = false, .sliced = true, .node = "SlicedAttention"}},
      {at::kFloat, {.eager = false, .sliced = true, .dropout = 0.3, .node = "SlicedAttention"}},
      {at::kBFloat16, {.eager = false, .sliced = true, .node = "SlicedAttention"}},
      {at::kBFloat16, {.eager = false, .sliced = true, .dropout = 0.3, .node = "SlicedAttention"}}};
  for (const auto& [dtype, how] : cases) {
    const bool narrow = dtype == at::kBFloat16;
    const bool rows = how.dropout > 0 && std::string(how.node) != "DropoutAdd";
    const std::vector<int64_t> sizes{2, kTokens, kHeads * kWidth};
    const Tensor factors = rows              ? kept_by_rows(narrow, how.dropout)
                           : how.dropout > 0 ? kept({2, kHeads, kTokens, kTokens}, how.dropout)
                                             : at::ones({}, at::kDouble);
    const bool once = std::string(how.node) != "" && std::string(how.node) != "DropoutAdd";
    compare({.name = c10::str(how.eager    ? "eager "
                              : how.sliced ? "sliced "
                                           : "kernel ",
                              dtype, " dropout ", how.dropout),
             .node = how.node,
             .inputs = {random(sizes, 2), random(sizes, 2), random(sizes)},
             .own =
                 [&](const Tensors& in) {
                   if (how.sliced) {
                     return detail::sliced_attention(
                         in[0], in[1], in[2], mask,
                         {.heads = kHeads, .key_value_heads = kHeads, .dropout = how.dropout});
                   }
                   return detail::self_attention(in[0], in[1], in[2], mask.to(dtype), kHeads,
                                                 how.dropout, how.eager);
                 },
             .plain = [&](const Tensors& in) { return plain_attention(in, mask, factors); },
             .limit = narrow ? 3e-2 : 1e-4,
             .refused = once ? "set attn_implementation=eager" : ""},
            dtype);
  }
}

TEST_F(Derivatives, OfTheSlicedLossAreRightOrAdviseTheLogitsWhichHaveThem) {
  const Tensor labels = at::randint(0, 50, {60});
  labels.slice(0, 0, 60, 4).fill_(-100);
  const Formula plain = [&](const Tensors& in) {
    return at::cross_entropy_loss(in[0].matmul(in[1].t()), labels, {}, at::Reduction::Sum);
  };
  for (const bool narrow : {false, true}) {
    for (const int64_t slice : {1, 1 << 20}) { // several slices, one slice
      compare({.name = c10::str("sliced loss ", slice, narrow ? " bf16" : ""),
               .node = "SlicedLoss",
               .inputs = {random({60, 64}), random({50, 64}, 0.3)},
               .own =
                   [&](const Tensors& in) {
                     std::optional<Autocast> autocast;
                     if (narrow) {
                       autocast.emplace(AutocastOptions{});
                     }
                     return linear_cross_entropy(in[0], in[1], labels, slice).loss_sum;
                   },
               .plain = plain,
               .limit = narrow ? 2e-2 : 1e-4,
               .refused = "compute the loss from the model's logits"});
    }
  }
  compare({.name = "the loss of logits",
           .node = "LinearNode",
           .inputs = {random({60, 64}), random({50, 64}, 0.3)},
           .own =
               [&](const Tensors& in) {
                 return at::cross_entropy_loss(fast_linear(in[0], in[1]), labels, {},
                                               at::Reduction::Sum);
               },
           .plain = plain});
}

TEST_F(Derivatives, OfAnAdapterAreRightWithItsDropout) {
  for (const bool narrow : {false, true}) {
    for (const bool train : {true, false}) {
      for (const int64_t dims : {2, 3}) { // addmm, and matmul
        torch::manual_seed(3);
        torch::nn::Sequential model(torch::nn::Linear(32, 24));
        get_peft_model(model.ptr(),
                       {.r = 16, .lora_alpha = 32, .lora_dropout = 0.3, .target_modules = {"0"}});
        model->train(train);
        std::map<std::string, Tensor> named;
        for (auto& item : model->named_parameters()) {
          named[item.key()] = item.value();
        }
        const Tensor base = named.at("0.weight").detach().to(at::kDouble);
        const Tensor bias = named.at("0.bias").detach().to(at::kDouble);
        std::vector<int64_t> sizes{40, 32};
        if (dims == 3) {
          sizes = {4, 10, 32};
        }
        const Tensor factors = train ? kept(sizes, 0.3) : at::ones({}, at::kDouble);
        const Tensor x = random(sizes).requires_grad_();
        const Tensor a = named.at("0.lora_A.weight"), b = named.at("0.lora_B.weight");
        {
          const at::NoGradGuard no_grad;
          b.normal_(0, 0.3);
        }
        std::optional<Autocast> autocast;
        if (narrow) {
          autocast.emplace(AutocastOptions{});
        }
        torch::manual_seed(7);
        const Tensor y = model->forward(x).to(at::kFloat).sin();
        autocast.reset();
        EXPECT_EQ(nodes_of(y, "DropoutAdd"), train ? 1 : 0);
        const Tensors in{x, a, b};
        Tensors wide;
        for (const Tensor& tensor : in) {
          wide.push_back(tensor.detach().to(at::kDouble).requires_grad_());
        }
        const Tensor z = (wide[0].matmul(base.t()) + bias +
                          2 * (wide[0] * factors).matmul(wide[1].t()).matmul(wide[2].t()))
                             .sin();
        const double limit = narrow ? 4e-2 : 1e-4;
        SCOPED_TRACE(c10::str(narrow ? "bf16" : "fp32", train ? " train " : " eval ", dims));
        expect_close(y, z, 0, limit);
        const Tensor along = at::randn(y.sizes());
        const Tensors first = gradients(y, in, along, true);
        const Tensors exact = gradients(z, wide, along.to(at::kDouble), true);
        for (size_t i = 0; i < in.size(); ++i) {
          expect_close(first[i], exact[i], 0, limit);
          const Tensor v = at::randn(in[i].sizes());
          const Tensors second = gradients(first[i], in, v, false);
          const Tensors wanted = gradients(exact[i], wide, v.to(at::kDouble), false);
          for (size_t j = 0; j < in.size(); ++j) {
            SCOPED_TRACE(c10::str("inputs ", i, " and ", j));
            expect_close(second[j], wanted[j], 0, limit);
          }
        }
      }
    }
  }
}

TEST_F(Derivatives, OfSyncBatchNormAreRightOrAdviseTheLayerThatHasThem) {
  const auto layer = std::make_shared<const detail::SyncLayer>(detail::SyncLayer{
      .communicator = Communicator::create(World{}), .name = "norm", .channels = 5});
  const Formula plain = [](const Tensors& in) {
    const Tensor mean = in[0].mean(0), centred = in[0] - mean;
    const Tensor var = centred.square().mean(0);
    return centred / (var + 1e-5).sqrt() * in[1] + in[2];
  };
  const Tensors inputs{random({30, 5}), random({5}), random({5})};
  compare({.name = "synchronised",
           .node = "SyncNorm",
           .inputs = inputs,
           .own =
               [&](const Tensors& in) {
                 return detail::sync_batch_norm(
                     in[0], {.weight = in[1], .bias = in[2], .eps = 1e-5}, layer);
               },
           .plain = plain,
           .refused = "do not convert this layer"});
  compare({.name = "not converted",
           .node = "",
           .inputs = inputs,
           .own =
               [](const Tensors& in) {
                 return at::batch_norm(in[0], in[1], in[2], {}, {}, /*training=*/true, 0, 1e-5,
                                       false);
               },
           .plain = plain});
}

TEST_F(Derivatives, OfCheckpointedRegionsAreThoseOfTheirFunctions) {
  const auto block = [](const Tensor& x, const Tensor& w, const Tensor& v) {
    const Tensor hidden = fast_linear(x, w);
    return fast_linear(Activation{"silu"}, detail::dropout_add(hidden, x, 0.3), v).sin();
  };
  const Formula plain = [&](const Tensors& in) {
    const Tensor dropped = in[0].matmul(in[1].t()) * kept({40, 32}, 0.3) + in[0];
    return (dropped * at::sigmoid(dropped)).matmul(in[2].t()).sin();
  };
  const Tensors inputs{random({40, 32}), random({32, 32}, 0.2), random({24, 32}, 0.2)};
  compare(
      {.name = "region",
       .node = "DropoutAdd",
       .inputs = inputs,
       .own = [&](const Tensors& in) { return activation_checkpoint(block, in[0], in[1], in[2]); },
       .plain = plain});
  compare({.name = "nested regions",
           .node = "DropoutAdd",
           .inputs = inputs,
           .own =
               [&](const Tensors& in) {
                 return activation_checkpoint(
                     [&](const Tensor& x, const Tensor& w, const Tensor& v) {
                       return activation_checkpoint(block, x, w, v);
                     },
                     in[0], in[1], in[2]);
               },
           .plain = plain});
}

// The kernels for a few rows take tensors of inference mode only, which have no derivative.
TEST_F(Derivatives, OfFewRowsAreTheLinearLayers) {
  const Tensor weight = random({24, 32}).requires_grad_();
  EXPECT_FALSE(detail::takes_few_rows(random({4, 32}), weight));
  EXPECT_FALSE(detail::takes_few_rows(random({4, 32}).requires_grad_(), weight));
  const c10::InferenceMode inference;
  const Tensor x = random({4, 32});
  EXPECT_TRUE(detail::takes_few_rows(x, weight));
  EXPECT_FALSE(detail::few_rows_linear(x, weight, {}).requires_grad());
}

// Without these kernels the results are bf16.
TEST_F(Derivatives, OfOperatorsThatAutocastKeepsInFp32AreRight) {
  const Tensors inputs{random({6, 20}), random({20}), random({20})};
  const auto in_scope = [](const Formula& formula) {
    return [formula](const Tensors& in) {
      const Autocast autocast(AutocastOptions{});
      const Tensor y = formula(in);
      EXPECT_EQ(y.scalar_type(), at::kFloat);
      return y;
    };
  };
  const std::vector<std::pair<const char*, Formula>> cases{
      {"layer_norm",
       [](const Tensors& in) { return at::layer_norm(in[0], {20}, in[1], in[2]).sin(); }},
      {"rms_norm", [](const Tensors& in) { return at::rms_norm(in[0], {20}, in[1], 1e-5).sin(); }},
      {"softmax", [](const Tensors& in) { return (at::softmax(in[0], 1) * in[1] + in[2]).exp(); }},
      {"logsumexp", [](const Tensors& in) { return at::logsumexp(in[0] * in[1] + in[2], {1}); }}};
  for (const auto& [name, formula] : cases) {
    compare(
        {.name = name, .node = "", .inputs = inputs, .own = in_scope(formula), .plain = formula});
  }
  compare({.name = "a bf16 input",
           .node = "",
           .inputs = inputs,
           .own = in_scope([](const Tensors& in) {
             return at::softmax(in[0], 1) * in[1].to(at::kFloat) + in[2].to(at::kFloat);
           }),
           .plain = [](const Tensors& in) { return at::softmax(in[0], 1) * in[1] + in[2]; },
           .limit = 2e-2},
          at::kBFloat16);
}

struct ModelRun {
  PreTrainedModel model{nullptr};
  Tensors parameters{};

  ModelRun(const PreTrainedConfig& config, bool train) {
    torch::manual_seed(1);
    model = model_from_config(config, ModelTask::sequence_classification);
    model->train(train);
    for (const auto& parameter : model->parameters()) {
      parameters.push_back(parameter);
    }
  }
  Tensor loss(const ModelInputs& inputs) {
    torch::manual_seed(2);
    return model->forward(inputs).logits.sin().sum();
  }
};

/// The second derivatives of a loss along `v`, of all parameters.
Tensors along(ModelRun& run, const ModelInputs& inputs, const Tensors& v) {
  const Tensors first =
      gradients(run.loss(inputs), run.parameters, at::ones({}, run.parameters[0].options()), true);
  Tensor sum = at::zeros({}, run.parameters[0].options());
  for (size_t i = 0; i < v.size(); ++i) {
    sum = first[i].defined() ? sum + (first[i] * v[i].to(sum.scalar_type())).sum() : sum;
  }
  return gradients(sum, run.parameters, at::ones_like(sum), false);
}

double distance(const Tensors& own, const Tensors& wanted) {
  double difference = 0, length = 0;
  for (size_t i = 0; i < own.size(); ++i) {
    const Tensor b = wanted[i].defined() ? wanted[i].to(at::kDouble) : at::zeros({}, at::kDouble);
    const Tensor a = own[i].defined() ? own[i].to(at::kDouble) : at::zeros({}, at::kDouble);
    difference += (a - b).square().sum().item<double>();
    length += b.square().sum().item<double>();
  }
  return std::sqrt(difference / length);
}

// In double every layer is torch's. With dropout the masks would differ, so there it is the difference of
// first derivatives.
TEST_F(Derivatives, OfAWholeModelAreRightInEveryFamily) {
  for (const char* type :
       {"bert", "roberta", "distilbert", "modernbert", "gpt2", "llama", "qwen3"}) {
    for (const double dropout : {0.0, 0.2}) {
      SCOPED_TRACE(c10::str(type, " dropout ", dropout));
      PreTrainedConfig config = testing_support::small_config(type, dropout);
      config.attn_implementation = "eager";
      if (dropout > 0 && std::string(type) == "distilbert") {
        continue; // a difference over the kink of its relu is no derivative
      }
      ModelRun own(config, dropout > 0);
      torch::manual_seed(5);
      const ModelInputs inputs = testing_support::small_inputs(4, 12);
      Tensors v;
      for (const Tensor& parameter : own.parameters) {
        v.push_back(at::randn(parameter.sizes()) * 0.1);
      }
      const Tensors mine = along(own, inputs, v);
      if (dropout == 0) {
        ModelRun wide(config, false);
        wide.model->to(at::kDouble);
        EXPECT_LT(distance(mine, along(wide, inputs, v)), 1e-4);
        continue;
      }
      constexpr double kStep = 5e-3;
      std::vector<Tensors> at_ends;
      for (const double sign : {1.0, -2.0}) {
        const at::AutoGradMode grad(true);
        for (size_t i = 0; i < v.size(); ++i) {
          own.parameters[i].set_data(own.parameters[i].detach() + sign * kStep * v[i]);
        }
        at_ends.push_back(gradients(own.loss(inputs), own.parameters, at::ones({}), false));
      }
      Tensors difference;
      for (size_t i = 0; i < v.size(); ++i) {
        difference.push_back(at_ends[0][i].defined() ? (at_ends[0][i] - at_ends[1][i]) / (2 * kStep)
                                                     : Tensor());
      }
      EXPECT_LT(distance(mine, difference), 2e-2);
    }
  }
}

TEST_F(Derivatives, AModelSaysWhichAttentionHasThem) {
  for (const char* type : {"bert", "llama"}) {
    ModelRun run(testing_support::small_config(type), true);
    const ModelInputs inputs = testing_support::small_inputs(2, 12);
    const std::string what = error_of([&] { along(run, inputs, run.parameters); });
    EXPECT_NE(what.find("attn_implementation=eager"), std::string::npos) << what;
  }
}

} // namespace hasten::derivatives_test
