// Policies that keep the results of expensive operators in a checkpointed region, so that only
// cheap ones are recomputed. Operators are seen below autograd and autocast, by their names in
// torch's dispatcher ("aten::mm"). A module's linear() is a matrix product there.
//
// The recomputation uses a kept result and does not run the operator again. Backward frees kept
// results as it proceeds, unless the graph is retained.
// Threading: immutable after construction.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace hasten {

/// One call of an operator in a region's forward: the argument of a policy.
struct OpCall {
  /// "aten::mm".
  std::string_view name{};
  /// Index of this call among the region's calls of this operator, from 0.
  int64_t index = 0;
  /// Bytes of the results' new storages (0 for views).
  int64_t bytes = 0;
};

/// Measured cost of one call, from measure_ops.
struct OpCost {
  std::string name{};
  int64_t index = 0;
  int64_t bytes = 0;
  double seconds = 0;
};

class OpPolicy {
 public:
  /// Keeps the results of these operators.
  static std::shared_ptr<const OpPolicy> keep(std::set<std::string> names);
  /// keep(expensive_ops()).
  static std::shared_ptr<const OpPolicy> keep_expensive();
  /// Keeps the results for which `decide` returns true. It is called after the operator, only in
  /// forward. Throws InputError if `decide` is empty.
  static std::shared_ptr<const OpPolicy> keep_if(std::function<bool(const OpCall&)> decide);
  /// Keeps the calls with the highest measured time per byte, as many as fit into `bytes`. `costs`
  /// must come from the same region (measure_ops).
  static std::shared_ptr<const OpPolicy> keep_by_cost(const std::vector<OpCost>& costs,
                                                      int64_t bytes);

  bool keeps(const OpCall& call) const { return decide_(call); }

 private:
  std::function<bool(const OpCall&)> decide_{};
};

/// Matrix products, attention, convolutions, and top-k (whose ties may differ). Collectives are not
/// listed: they must not run a second time on some ranks only, so every policy keeps their results.
const std::set<std::string>& expensive_ops();

/// Runs `forward` once without gradient and measures each operator: seconds and new bytes of each
/// call, in the order of calls. Restores the random state.
std::vector<OpCost> measure_ops(const std::function<void()>& forward);

} // namespace hasten
