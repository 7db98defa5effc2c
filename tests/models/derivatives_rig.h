// Compares a function of ours with the same formula in torch's operators, in double: results, first
// derivatives, and second ones of each pair of inputs, or the error that says what to set.
#pragma once

#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

#include "small_family.h"
#include "support/error_of.h"

namespace hasten::derivatives_test {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Formula = std::function<Tensor(const Tensors&)>;
using testing_support::error_of;

/// Nodes of the graph whose names contain `name`.
inline int64_t nodes_of(const Tensor& result, const std::string& name) {
  std::vector<torch::autograd::Node*> open{result.grad_fn().get()};
  std::unordered_set<const torch::autograd::Node*> seen{open[0]};
  int64_t found = 0;
  while (!open.empty()) {
    torch::autograd::Node* const node = open.back();
    open.pop_back();
    found += node->name().find(name) != std::string::npos;
    for (const auto& edge : node->next_edges()) {
      if (edge.function && seen.insert(edge.function.get()).second) {
        open.push_back(edge.function.get());
      }
    }
  }
  return found;
}

inline Tensors gradients(const Tensor& of, const Tensors& inputs, const Tensor& along, bool again) {
  if (!of.requires_grad()) {
    return Tensors(inputs.size());
  }
  return torch::autograd::grad({of}, inputs, {along}, /*retain_graph=*/true, again,
                               /*allow_unused=*/true);
}

struct Case {
  std::string name;
  std::string node; // in the graph of `own`; empty: not asked
  Tensors inputs; // fp32
  Formula own;
  Formula plain; // in torch's operators
  double limit = 1e-4;
  std::string refused{}; // in the error of a second derivative; empty: there is one
};

class Derivatives : public testing::Test {
 protected:
  testing_support::OneThread one_thread_{};

  static void expect_close(const Tensor& own, const Tensor& plain, double scale, double limit) {
    const double length = plain.defined() ? plain.norm().item<double>() : 0;
    const Tensor a = own.defined() ? own.to(at::kDouble) : at::zeros({}, at::kDouble);
    const Tensor b = plain.defined() ? plain : at::zeros({}, at::kDouble);
    EXPECT_LE((a - b).norm().item<double>(), limit * std::max(length, 1e-3 * scale));
  }

  static void compare(const Case& c, at::ScalarType dtype = at::kFloat) {
    SCOPED_TRACE(c.name);
    Tensors own, plain;
    for (const Tensor& input : c.inputs) {
      own.push_back(input.detach().to(dtype).clone().requires_grad_());
      plain.push_back(own.back().detach().to(at::kDouble).requires_grad_());
    }
    torch::manual_seed(7);
    const Tensor y = c.own(own);
    const Tensor z = c.plain(plain);
    if (!c.node.empty()) {
      EXPECT_GT(nodes_of(y, c.node), 0) << "torch's function ran";
      EXPECT_EQ(nodes_of(z, c.node), 0);
    }
    ASSERT_EQ(y.sizes(), z.sizes());
    expect_close(y, z, 0, c.limit);
    torch::manual_seed(8);
    const Tensor along = at::randn(y.sizes()).to(y.scalar_type());
    const Tensors exact = gradients(z, plain, along.to(at::kDouble), true);
    const Tensors first = gradients(y, own, along, false);
    for (size_t i = 0; i < own.size(); ++i) {
      SCOPED_TRACE("input " + std::to_string(i));
      expect_close(first[i], exact[i], 0, c.limit);
    }
    if (!c.refused.empty()) {
      const std::string what = error_of([&] { gradients(y, own, along, true); });
      EXPECT_NE(what.find(c.refused), std::string::npos) << what;
      return;
    }
    const Tensors again = gradients(y, own, along, true);
    for (size_t i = 0; i < own.size(); ++i) {
      SCOPED_TRACE("input " + std::to_string(i));
      expect_close(again[i], exact[i], 0, c.limit);
      const Tensor v = at::randn(own[i].sizes()).to(own[i].scalar_type());
      const Tensors second = gradients(again[i], own, v, false);
      const Tensors wanted = gradients(exact[i], plain, v.to(at::kDouble), false);
      double scale = 0; // of the row, for derivatives that are 0
      for (const Tensor& w : wanted) {
        scale = std::max(scale, w.defined() ? w.norm().item<double>() : 0);
      }
      for (size_t j = 0; j < own.size(); ++j) {
        SCOPED_TRACE("and input " + std::to_string(j));
        expect_close(second[j], wanted[j], scale, c.limit);
      }
    }
  }

  static Tensor random(at::IntArrayRef sizes, double scale = 1) {
    return at::randn(sizes).mul_(scale);
  }
};

} // namespace hasten::derivatives_test
