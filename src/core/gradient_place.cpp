#include "hasten/core/gradient_place.h"

#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace hasten::detail {

static const GradientPlaceScope::Find*& place_finder() {
  static thread_local const GradientPlaceScope::Find* find = nullptr;
  return find;
}

// Only in a backward that adds to grad(): torch::autograd::grad gives its results to the caller.
at::Tensor gradient_place(const at::Tensor& parameter) {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  return place_finder() == nullptr || wanted == nullptr || !wanted->empty()
             ? at::Tensor()
             : (*place_finder())(parameter);
}

GradientPlaceScope::GradientPlaceScope(Find find)
    : find_(std::move(find)), before_(std::exchange(place_finder(), &find_)) {}
GradientPlaceScope::~GradientPlaceScope() { place_finder() = before_; }

} // namespace hasten::detail
