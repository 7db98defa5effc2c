#include "hasten/flat/flat_layout.h"

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

  for (const auto& [name, parameter] : unique) {
    const at::ScalarType dtype = flat_gradient_dtype(parameter.scalar_type());
    const auto same = [dtype, &parameter = parameter](const FlatGroup& group) {
      return group.dtype == dtype && group.device == parameter.device();
    };
    auto group = std::find_if(groups_.begin(), groups_.end(), same);
    if (group == groups_.end()) {
      groups_.push_back({dtype, parameter.device(), 0, 0, 0});
      group = groups_.end() - 1;
    }
    slots_.push_back({name, parameter, parameter.sizes().vec(),
                      (parameter.is_non_overlapping_and_dense()
                           ? parameter.strides()
                           : at::IntArrayRef(c10::contiguous_strides(parameter.sizes())))
                          .vec(),
                      parameter.scalar_type(), group - groups_.begin(), group->numel,
                      parameter.numel()});
    group->numel += detail::flat_padded(parameter.numel(), group->dtype);
  }
  // Slots are sorted by group. order_ keeps the sequence over all groups.
  std::vector<int64_t> by_group(slots_.size());
  std::iota(by_group.begin(), by_group.end(), 0);
  std::stable_sort(by_group.begin(), by_group.end(), [this](int64_t a, int64_t b) {
    return slots_[static_cast<size_t>(a)].group < slots_[static_cast<size_t>(b)].group;
  });
  std::vector<FlatSlot> sorted;
  order_.resize(slots_.size());
  for (size_t i = 0; i < by_group.size(); ++i) {
    sorted.push_back(std::move(slots_[static_cast<size_t>(by_group[i])]));
    order_[static_cast<size_t>(by_group[i])] = static_cast<int64_t>(i);
  }
  slots_ = std::move(sorted);
  for (size_t i = 0; i < slots_.size(); ++i) {
    FlatGroup& group = groups_[static_cast<size_t>(slots_[i].group)];
    if (group.last_slot == 0) {
      group.first_slot = static_cast<int64_t>(i);
    }
    group.last_slot = static_cast<int64_t>(i) + 1;
    index_[slots_[i].parameter.unsafeGetTensorImpl()] = static_cast<int64_t>(i);
  }
}

void FlatLayout::reorder(std::vector<int64_t> order) {
  std::vector<int64_t> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  bool permutation = sorted.size() == slots_.size();
  for (size_t i = 0; permutation && i < sorted.size(); ++i) {
    permutation = sorted[i] == static_cast<int64_t>(i);
  }
  if (!permutation) {
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

} // namespace hasten
