#include "module_buffers.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <unordered_set>

#include "hasten/base/text.h"

namespace hasten::detail {

FlatLayout::NamedParameters unique_tensors(
    const torch::OrderedDict<std::string, at::Tensor>& named) {
  std::unordered_set<const void*> seen;
  FlatLayout::NamedParameters unique;
  for (const auto& item : named) {
    if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second) {
      unique.emplace_back(item.key(), item.value());
    }
  }
  return unique;
}

std::string replaced_parameter(const torch::nn::Module& module,
                               const FlatLayout::NamedParameters& known) {
  std::unordered_set<const void*> impls;
  for (const auto& entry : known) {
    impls.insert(entry.second.unsafeGetTensorImpl());
  }
  for (const auto& item : module.named_parameters()) {
    if (item.value().defined() && !impls.contains(item.value().unsafeGetTensorImpl())) {
      return item.key();
    }
  }
  return {};
}

// torch's batch norm writes running statistics without changing their version counters; writes to
// integer buffers change them.
bool to_even_out(const FlatLayout::NamedParameters& buffers, BroadcastBuffers policy,
                 bool any_dtype) {
  return policy != BroadcastBuffers::off &&
         std::any_of(buffers.begin(), buffers.end(), [any_dtype](const auto& entry) {
           return any_dtype || entry.second.is_floating_point() || entry.second.is_complex();
         });
}

std::vector<uint32_t> versions_of(const FlatLayout::NamedParameters& buffers) {
  return mapped(buffers,
                [](const auto& entry) { return static_cast<uint32_t>(entry.second._version()); });
}

void even_out_buffers(Communicator& communicator, const FlatLayout::NamedParameters& named,
                      BroadcastBuffers policy, const DdpRanks& ranks) {
  at::NoGradGuard no_grad;
  std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype;
  for (const auto& entry : named) {
    by_dtype[entry.second.scalar_type()].push_back(entry.second.detach());
  }
  for (const auto& [dtype, buffers] : by_dtype) {
    at::Tensor flat =
        at::cat(mapped(buffers, [](const at::Tensor& buffer) { return buffer.reshape({-1}); }));
    const bool average = policy == BroadcastBuffers::average && at::isFloatingType(dtype);
    if (average) {
      if (!ranks.here) {
        flat.zero_();
      }
      communicator.all_reduce(flat, ReduceOp::SUM, "buffers");
      flat.div_(ranks.count > 0 ? ranks.count : communicator.world_size());
    } else {
      communicator.broadcast(flat, ranks.first, "buffers");
    }
    if (average || communicator.rank() != ranks.first) {
      at::_foreach_copy_(buffers, at::unflatten_dense_tensors(flat, buffers));
    }
  }
}

} // namespace hasten::detail
