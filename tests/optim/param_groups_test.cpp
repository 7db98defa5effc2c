#include "hasten/optim/param_groups.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>

#include <sstream>
#include <string>

#include "hasten/optim/adamw.h"
#include "optim/optim_golden.h"

namespace hasten {

namespace detail {

struct EmptyModule : torch::nn::Module {};

std::shared_ptr<torch::nn::Module> golden_tree() {
  auto root = std::make_shared<EmptyModule>();
  for (const golden::LeafCase& leaf : golden::kLeaves) {
    std::shared_ptr<torch::nn::Module> parent = root;
    std::stringstream path(leaf.path);
    std::vector<std::string> elements;
    for (std::string element; std::getline(path, element, '.');) {
      elements.push_back(element);
    }
    for (size_t i = 0; i + 1 < elements.size(); ++i) {
      const auto children = parent->named_children(); // outlives `child`
      const auto* child = children.find(elements[i]);
      parent = child != nullptr
                   ? *child
                   : parent->register_module(elements[i], std::make_shared<EmptyModule>());
    }
    if (parent->named_children().contains(elements.back())) {
      continue;
    }
    const std::string kind = leaf.kind;
    if (kind == "Embedding") {
      parent->register_module(elements.back(), torch::nn::Embedding(3, 2));
    } else if (kind == "Linear") {
      parent->register_module(elements.back(), torch::nn::Linear(2, 2));
    } else {
      parent->register_module(elements.back(),
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({2})));
    }
  }
  return root;
}

} // namespace detail

TEST(DecayGroups, DecayTheParametersHuggingFaceDecays) {
  const auto model = detail::golden_tree();
  const std::vector<std::string> expected(golden::kDecayed.begin(), golden::kDecayed.end());
  EXPECT_EQ(decayed_parameter_names(*model), expected);
  const auto groups = decay_groups(*model, 0.1);
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].params().size(), expected.size());
  EXPECT_EQ(groups[0].params().size() + groups[1].params().size(), model->parameters().size());
}

// A parameter inside a user's LayerNorm counts as the LayerNorm's, whatever its name is.
TEST(DecayGroups, TakeAllInsideALayerNormForIts) {
  struct GatedNorm : torch::nn::LayerNormImpl {
    GatedNorm() : LayerNormImpl(torch::nn::LayerNormOptions({3})) {
      register_module("gate", torch::nn::Linear(3, 3));
    }
  };
  struct Net : torch::nn::Module {
    Net() {
      register_module("scale", std::make_shared<GatedNorm>());
      register_module("last", torch::nn::Linear(3, 1));
    }
  };
  EXPECT_EQ(decayed_parameter_names(Net()), std::vector<std::string>{"last.weight"});
}

TEST(DecayGroups, LeaveFrozenParametersOutAndCountTiedOnesOnce) {
  auto model = std::make_shared<detail::EmptyModule>();
  auto embedding = model->register_module("embedding", torch::nn::Embedding(3, 2));
  auto head = model->register_module("head", torch::nn::Linear(2, 2));
  model->register_parameter("tied_norm", embedding->weight);
  head->weight.requires_grad_(false);
  // The root's own parameters come first, so the tied tensor's first name is the one without decay.
  EXPECT_EQ(decayed_parameter_names(*model), std::vector<std::string>{});
  const auto groups = decay_groups(*model, 0.1);
  EXPECT_EQ(groups[0].params().size(), 0u);
  ASSERT_EQ(groups[1].params().size(), 2u);
  EXPECT_TRUE(groups[1].params()[0].is_same(embedding->weight));
  EXPECT_TRUE(groups[1].params()[1].is_same(head->bias));
}

TEST(DecayGroups, KeepTheirDecayInsideAnOptimizer) {
  const auto model = detail::golden_tree();
  for (const double decay : {0.0, 0.01, 0.3}) {
    const AdamW optimizer(decay_groups(*model, decay),
                          torch::optim::AdamWOptions(1e-3).weight_decay(decay));
    const auto decay_of = [&](size_t group) {
      return static_cast<const torch::optim::AdamWOptions&>(
                 optimizer.param_groups()[group].options())
          .weight_decay();
    };
    EXPECT_EQ(decay_of(0), decay);
    EXPECT_EQ(decay_of(1), 0.0);
  }
}

} // namespace hasten
