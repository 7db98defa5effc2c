#include "zero_backward.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

namespace hasten::detail {

static at::Tensor values_of(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient._values() : gradient;
}

// NaN is not zero.
static bool has_nonzero(const at::Tensor& gradient) {
  return gradient.defined() && values_of(gradient).ne(0).any().item<bool>();
}

class ZeroHook final : public torch::autograd::FunctionPostHook {
 public:
  using Tensors = torch::autograd::variable_list;

  // `custom`: the node is no derivative of torch's.
  explicit ZeroHook(bool custom) : custom_(custom) {}

  Tensors operator()(const Tensors& outputs, const Tensors& inputs) override {
    if (std::any_of(inputs.begin(), inputs.end(), has_nonzero)) {
      return outputs; // it follows values that other ranks sent
    }
    Tensors result = outputs;
    for (at::Tensor& gradient : result) {
      if (gradient.defined() && !(custom_ && has_nonzero(gradient) &&
                                  values_of(gradient).isfinite().all().item<bool>())) {
        gradient = at::zeros_like(gradient);
      }
    }
    return result;
  }

 private:
  const bool custom_;
};

std::shared_ptr<void> zeros_of_zeros(const at::Tensor& root) {
  using Node = decltype(torch::autograd::Edge::function);
  std::vector<std::pair<Node, std::uintptr_t>> hooked;
  std::unordered_set<const torch::autograd::Node*> seen;
  const auto hook = [&](const Node& node) {
    // A leaf, whose node outlives the graph, returns nothing.
    if (node && node->num_outputs() > 0 && seen.insert(node.get()).second) {
      hooked.emplace_back(node,
                          node->add_post_hook(std::make_unique<ZeroHook>(!node->is_traceable())));
    }
  };
  hook(torch::autograd::impl::gradient_edge(root).function);
  for (size_t i = 0; i < hooked.size(); ++i) {
    const Node node = hooked[i].first; // the vector grows
    for (const auto& edge : node->next_edges()) {
      hook(edge.function);
    }
  }
  return {nullptr, [hooked = std::move(hooked)](void*) {
            for (const auto& [node, known_by] : hooked) {
              node->del_post_hook(known_by);
            }
          }};
}

} // namespace hasten::detail
