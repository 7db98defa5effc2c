#include "zero_backward.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <unordered_set>

namespace hasten::detail {

// NaN is not zero.
static bool has_nonzero(const at::Tensor& gradient) {
  return gradient.defined() && gradient.numel() > 0 &&
         (gradient.is_sparse() ? gradient._values() : gradient)
             .ne(0)
             .any()
             .item<bool>();
}

static bool is_finite(const at::Tensor& gradient) {
  return (gradient.is_sparse() ? gradient._values() : gradient)
      .isfinite()
      .all()
      .item<bool>();
}

class ZeroHook final : public torch::autograd::FunctionPostHook {
 public:
  using Tensors = torch::autograd::variable_list;

  // `custom`: the node is no derivative of torch's.
  explicit ZeroHook(bool custom) : custom_(custom) {}

  Tensors operator()(const Tensors& outputs, const Tensors& inputs) override {
    if (std::any_of(inputs.begin(), inputs.end(), has_nonzero)) {
      return outputs; // behind what other ranks sent
    }
    Tensors result = outputs;
    for (at::Tensor& gradient : result) {
      if (gradient.defined() &&
          !(custom_ && has_nonzero(gradient) && is_finite(gradient))) {
        gradient = at::zeros_like(gradient);
      }
    }
    return result;
  }

 private:
  const bool custom_;
};

ZeroBackward::ZeroBackward(const at::Tensor& root) {
  std::unordered_set<const torch::autograd::Node*> seen;
  const auto hook = [&](const auto& node) {
    // A leaf, whose node outlives the graph, returns nothing.
    if (node && node->num_outputs() > 0 && seen.insert(node.get()).second) {
      hooked_.emplace_back(
          node,
          node->add_post_hook(
              std::make_unique<ZeroHook>(!node->is_traceable())));
    }
  };
  hook(torch::autograd::impl::gradient_edge(root).function);
  for (size_t i = 0; i < hooked_.size(); ++i) {
    const auto node = hooked_[i].first; // the vector grows
    for (const auto& edge : node->next_edges()) {
      hook(edge.function);
    }
  }
}

ZeroBackward::~ZeroBackward() {
  for (const auto& [node, hook] : hooked_) {
    node->del_post_hook(hook);
  }
}

} // namespace hasten::detail
