#include "hasten/flat/flat_layout.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>

#include "hasten/base/error.h"

namespace hasten {

namespace detail {

constexpr int64_t kFlatAlignment = 64; // bytes: a cache line, an AVX-512 register

int64_t flat_padded(int64_t numel, at::ScalarType dtype) {
  const auto unit = kFlatAlignment / static_cast<int64_t>(c10::elementSize(dtype));
  return (numel + unit - 1) / unit * unit;
}

} // namespace detail

at::ScalarType flat_gradient_dtype(at::ScalarType parameter_dtype) {
  return parameter_dtype == at::kHalf || parameter_dtype == at::kBFloat16 ? at::kFloat
                                                                          : parameter_dtype;
}

FlatLayout::FlatLayout(const NamedParameters& parameters) {
  // The place of a tied parameter is that of its first registration: its gradient is complete when
  // backward reaches its first use, which is about then.
  std::unordered_set<const void*> seen;
  NamedParameters unique;
  for (const auto& entry : parameters) {
    if (entry.second.defined() && entry.second.requires_grad() &&
        seen.insert(entry.second.unsafeGetTensorImpl()).second) {
      unique.push_back(entry);
    }
  }
  std::reverse(unique.begin(), unique.end());

  std::vector<int64_t> group_of;
  for (const auto& [name, parameter] : unique) {
    const FlatGroup own{flat_gradient_dtype(parameter.scalar_type()), parameter.device(), 0};
    const auto group = std::find_if(groups_.begin(), groups_.end(), [&](const FlatGroup& other) {
      return other.dtype == own.dtype && other.device == own.device;
    });
    group_of.push_back(group - groups_.begin());
    if (group == groups_.end()) {
      groups_.push_back(own);
    }
  }
  // Slots are sorted by group. order_ keeps the sequence over all groups.
  order_.resize(unique.size());
  for (int64_t g = 0; g < std::ssize(groups_); ++g) {
    FlatGroup& group = groups_[static_cast<size_t>(g)];
    for (size_t i = 0; i < unique.size(); ++i) {
      if (group_of[i] != g) {
        continue;
      }
      const auto& [name, parameter] = unique[i];
      order_[i] = index_[parameter.unsafeGetTensorImpl()] = std::ssize(slots_);
      slots_.push_back({name, parameter, parameter.sizes().vec(),
                        (parameter.is_non_overlapping_and_dense()
                             ? parameter.strides()
                             : at::IntArrayRef(c10::contiguous_strides(parameter.sizes())))
                            .vec(),
                        parameter.scalar_type(), g, group.numel, parameter.numel()});
      group.numel += detail::flat_padded(parameter.numel(), group.dtype);
    }
  }
}

void FlatLayout::reorder(std::vector<int64_t> order) {
  std::vector<int64_t> sorted = order, all(slots_.size());
  std::sort(sorted.begin(), sorted.end());
  std::iota(all.begin(), all.end(), 0);
  if (sorted != all) {
    throw InputError("flat::FlatLayout", "order has " + std::to_string(order.size()) + " entries",
                     "each of the " + std::to_string(slots_.size()) + " slots once");
  }
  std::vector<int64_t> end(groups_.size(), 0);
  for (const int64_t index : order) {
    FlatSlot& slot = slots_[static_cast<size_t>(index)];
    const auto group = static_cast<size_t>(slot.group);
    slot.offset = end[group];
    end[group] += detail::flat_padded(slot.numel, groups_[group].dtype);
  }
  order_ = std::move(order);
}

int64_t FlatLayout::find(const at::Tensor& parameter) const {
  const auto it = index_.find(parameter.unsafeGetTensorImpl());
  return it == index_.end() ? -1 : it->second;
}

bool FlatLayout::fits(int64_t slot) const {
  const FlatSlot& was = slots_[static_cast<size_t>(slot)];
  return was.parameter.sizes() == was.sizes && was.parameter.scalar_type() == was.dtype &&
         was.parameter.device() == groups_[static_cast<size_t>(was.group)].device;
}

std::vector<char> FlatLayout::reachable(const at::Tensor& loss) const {
  std::vector<char> found(slots_.size(), 0);
  std::vector<torch::autograd::Node*> open;
  std::unordered_set<const torch::autograd::Node*> seen;
  const auto add = [&](const torch::autograd::Edge& edge) {
    if (edge.function && seen.insert(edge.function.get()).second) {
      open.push_back(edge.function.get());
    }
  };
  add(torch::autograd::impl::gradient_edge(loss));
  while (!open.empty()) {
    torch::autograd::Node* const node = open.back();
    open.pop_back();
    if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      if (const int64_t slot = find(leaf->variable); slot >= 0) {
        found[static_cast<size_t>(slot)] = 1;
      }
    }
    for (const auto& edge : node->next_edges()) {
      add(edge);
    }
  }
  return found;
}

} // namespace hasten
