// The loss of causal language models: in slices, and of several texts in a row.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "golden_family.h"
#include "hasten/base/json.h"
#include "hasten/core/autocast.h"
#include "hasten/models/linear_cross_entropy.h"
#include "hasten/models/model_family.h"
#include "small_family.h"
#include "support/error_of.h"

namespace hasten::causal_loss_test {

using namespace testing_support;
namespace F = torch::nn::functional;

class CausalLoss : public testing::Test {
  OneThread one_thread_{};
};

struct LossCase {
  at::Tensor hidden, weight, labels;
};

/// 150 tokens are five slices of the smallest size, the last of them not full.
LossCase loss_case(bool learns_weight = true, int64_t hidden_size = 24) {
  torch::manual_seed(5);
  LossCase made{torch::randn({3, 50, hidden_size}), torch::randn({211, hidden_size}) * 0.3,
                torch::randint(211, {3, 50})};
  made.labels.index_put_({0, torch::indexing::Slice(4, 20)}, -100);
  made.labels[2].fill_(-100);
  made.hidden.requires_grad_();
  made.weight.requires_grad_(learns_weight);
  return made;
}

at::Tensor plain_loss(const LossCase& of) {
  return F::cross_entropy(torch::linear(of.hidden, of.weight).to(torch::kFloat).flatten(0, 1),
                          of.labels.flatten(), F::CrossEntropyFuncOptions().reduction(torch::kSum));
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).norm() / b.norm()).item<double>();
}

TEST_F(CausalLoss, SlicesHaveTheLossAndTheGradientsOfTheWholeLogits) {
  // A slice of 32 tokens, or of all with more hidden units than tokens.
  for (const auto& [narrow, bytes, hidden] :
       {std::tuple(false, 1, 24), {true, 1, 24}, {false, 1 << 20, 160}, {true, 1 << 20, 160}}) {
    SCOPED_TRACE(c10::str(narrow, " ", bytes));
    const LossCase sliced = loss_case(true, hidden), plain = loss_case(true, hidden);
    const auto run = [&](const auto& loss_of) {
      const Autocast autocast({.enabled = narrow});
      return loss_of();
    };
    const auto made = run(
        [&] { return linear_cross_entropy(sliced.hidden, sliced.weight, sliced.labels, bytes); });
    const at::Tensor expected = run([&] { return plain_loss(plain); });
    // A product's pieces are summed in another order.
    const double tolerance = narrow ? 1e-2 : 1e-6;
    EXPECT_LE(difference(made.loss_sum.detach(), expected.detach()), narrow ? 1e-4 : 1e-6);
    EXPECT_LE(difference(made.token_losses.sum(), expected.detach()), narrow ? 1e-4 : 1e-6);
    EXPECT_EQ(made.token_losses.ne(0).sum().item<int64_t>(),
              plain.labels.ne(-100).sum().item<int64_t>());
    const at::Tensor first =
        torch::autograd::grad({made.loss_sum / 7}, {sliced.weight}, {}, true)[0].clone();
    (made.loss_sum / 7).backward();
    EXPECT_TRUE(torch::equal(sliced.weight.grad(), first));
    (expected / 7).backward();
    EXPECT_LE(difference(sliced.hidden.grad(), plain.hidden.grad()), tolerance);
    EXPECT_LE(difference(sliced.weight.grad(), plain.weight.grad()), tolerance);
    EXPECT_EQ(sliced.hidden.grad()[2].abs().max().item<double>(), 0);
  }
}

TEST_F(CausalLoss, TokensWithoutALabelHaveNoLogits) {
  const LossCase of = loss_case(), clean = loss_case();
  const at::Tensor no_label = of.labels.eq(-100).unsqueeze(2);
  const auto loss = [](const LossCase& from, const at::Tensor& hidden) {
    return linear_cross_entropy(hidden, from.weight, from.labels).loss_sum;
  };
  const at::Tensor made = loss(of, of.hidden.masked_fill(no_label, std::nan("")));
  const at::Tensor expected = loss(clean, clean.hidden);
  EXPECT_EQ(made.item<double>(), expected.item<double>());
  made.backward();
  expected.backward();
  EXPECT_TRUE(torch::equal(of.hidden.grad(), clean.hidden.grad()));
  EXPECT_TRUE(torch::equal(of.weight.grad(), clean.weight.grad()));
}

TEST_F(CausalLoss, AFrozenWeightHasNoGradientAndBackwardMayRunTwice) {
  const LossCase frozen = loss_case(false), plain = loss_case(false);
  const at::Tensor loss =
      linear_cross_entropy(frozen.hidden, frozen.weight, frozen.labels).loss_sum;
  const auto gradient = [&](bool keep, bool create) {
    return torch::autograd::grad({loss}, {frozen.hidden}, {}, keep, create)[0];
  };
  EXPECT_NE(error_of([&] { gradient(true, true); }).find("create_graph"), std::string::npos);
  const at::Tensor first = gradient(true, false).clone();
  EXPECT_TRUE(torch::equal(first, gradient(false, false)));
  const at::Tensor expected = torch::autograd::grad({plain_loss(plain)}, {plain.hidden})[0];
  EXPECT_LE(difference(first, expected), 1e-6);
  EXPECT_FALSE(frozen.weight.grad().defined());
}

TEST_F(CausalLoss, WrongShapesAndLabelsAreErrors) {
  LossCase of = loss_case();
  of.labels[1][3] = 211;
  const auto loss = [&] { linear_cross_entropy(of.hidden, of.weight, of.labels); };
  EXPECT_NE(error_of(loss).find("label=211"), std::string::npos);
  of.weight = torch::randn({211, 23});
  EXPECT_NE(error_of(loss).find("weight=Float[211, 23]"), std::string::npos) << error_of(loss);
}

TEST_F(CausalLoss, AModelsLossIsThatOfItsLogits) {
  for (const std::string type : {"gpt2", "llama", "qwen3", "gemma2"}) { // tied, not, softcapped
    SCOPED_TRACE(type);
    torch::manual_seed(7);
    PreTrainedModel model = model_from_config(small_config(type), ModelTask::causal_lm);
    ModelInputs inputs = small_inputs(2, 12);
    inputs.labels = inputs.input_ids.masked_fill(inputs.input_ids == 1, -100);
    const auto gradients = [&](const at::Tensor& loss) {
      model->zero_grad();
      loss.backward();
      std::vector<at::Tensor> made;
      for (const at::Tensor& p : model->parameters()) {
        made.push_back(p.grad().clone());
      }
      return made;
    };
    const LinearCrossEntropy made = model->causal_loss(inputs);
    const double labels =
        static_cast<double>(inputs.labels.slice(1, 1).ne(-100).sum().item<int64_t>());
    const auto sliced = gradients(made.loss_sum / labels);
    const at::Tensor mean = model->forward(inputs).loss;
    EXPECT_NEAR(made.loss_sum.item<double>() / labels, mean.item<double>(),
                1e-6 * mean.item<double>());
    const auto plain = gradients(mean);
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_LE((sliced[i] - plain[i]).abs().max().item<double>(), 1e-6);
    }
    EXPECT_NE(error_of([&] { model->causal_loss({.input_ids = inputs.input_ids}); }).find("labels"),
              std::string::npos);
  }
}

TEST_F(CausalLoss, TextsThatShareARowHaveTheLossesOfTransformers) {
  const nlohmann::json golden = read_json_file("test", kPackingGoldenFile);
  const auto tensor = [](const nlohmann::json& rows) {
    std::vector<at::Tensor> made;
    for (const auto& row : rows) {
      made.push_back(at::tensor(row.get<std::vector<double>>()));
    }
    return at::stack(made);
  };
  const at::Tensor ids = tensor(golden.at("ids")).to(at::kLong);
  std::vector<at::Tensor> places, labels;
  for (const auto& row : golden.at("rows")) {
    std::vector<at::Tensor> of_row;
    for (const int64_t tokens : row) {
      of_row.push_back(at::arange(tokens));
    }
    places.push_back(at::cat(of_row));
  }
  const at::Tensor positions = at::stack(places);
  for (const auto& [name, losses] : golden.at("losses").items()) {
    SCOPED_TRACE(name);
    PreTrainedModel model = golden_model(name);
    model->eval();
    const at::Tensor made = model
                                ->causal_loss({.input_ids = ids,
                                               .labels = ids.masked_fill(positions == 0, -100),
                                               .position_ids = positions})
                                .token_losses.slice(1, 0, -1);
    EXPECT_LE((made - tensor(losses)).abs().max().item<double>(), 1e-5);
  }
}

TEST_F(CausalLoss, ATextDoesNotDependOnItsNeighbours) {
  std::vector<PreTrainedModel> models{golden_model("llama_dynamic"), golden_model("phi3_longrope")};
  for (const std::string& type : model_types()) {
    if (model_family(type).tasks.front() == ModelTask::causal_lm && !type.starts_with("test_")) {
      models.push_back(model_from_config(small_config(type), ModelTask::causal_lm));
    }
  }
  for (PreTrainedModel& model : models) {
    for (const bool narrow : {false, true}) {
      SCOPED_TRACE(model->config().model_type);
      model->eval();
      const torch::NoGradGuard no_grad;
      const Autocast autocast({.enabled = narrow});
      const at::Tensor ids = torch::randint(4, kGoldenVocab, {1, 20});
      at::Tensor other = ids.clone();
      other.slice(1, 0, 6).remainder_(4).add_(7); // the first and the last of three texts
      other.slice(1, 13).remainder_(5).add_(3);
      const at::Tensor places =
          at::cat({at::arange(6), at::arange(7), at::arange(7)}).view({1, 20});
      const auto middle = [&](const at::Tensor& of) {
        return model->forward({.input_ids = of, .position_ids = places}).logits.slice(1, 6, 13);
      };
      EXPECT_TRUE(torch::equal(middle(ids), middle(other)));
      const at::Tensor alone = model->forward({.input_ids = ids.slice(1, 6, 13)}).logits;
      EXPECT_LE((middle(ids) - alone).abs().max().item<double>(), narrow ? 0.2 : 1e-5);
    }
  }
}

} // namespace hasten::causal_loss_test
