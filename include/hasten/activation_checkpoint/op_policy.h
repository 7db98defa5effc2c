// Which operators of a checkpointed region keep their results: keep what is
// expensive, recompute what is cheap. Operators are seen below autograd and
// autocast, by their names in torch's dispatcher ("aten::mm"); what a module calls
// linear() is a matrix product there.
//
// A kept result is used as it is: the operator does not run a second time. Kept
// results are dropped as backward goes, unless the graph is retained.
// Threading: immutable once built.
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

/// What a policy is asked about: one call of an operator in a region's forward.
struct OpCall {
  /// "aten::mm".
  std::string_view name{};
  /// Which call of this operator in the region, from 0.
  int64_t index = 0;
  /// Bytes of its results' storages that are new (views are 0).
  int64_t bytes = 0;
};

/// What was measured of one call: see measure_ops.
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
  /// Keeps what `decide` says yes to; asked after the call ran, in forward only.
  /// Throws InputError where it is empty.
  static std::shared_ptr<const OpPolicy> keep_if(std::function<bool(const OpCall&)> decide);
  /// Keeps the calls with the most measured time for each byte, as many as fit
  /// into `bytes`. `costs` are those of the same region (measure_ops).
  static std::shared_ptr<const OpPolicy> keep_by_cost(const std::vector<OpCost>& costs,
                                                      int64_t bytes);

  bool keeps(const OpCall& call) const { return decide_(call); }

 private:
  std::function<bool(const OpCall&)> decide_{};
};

/// Matrix products, attention, convolutions, top-k (whose ties may differ), and
/// collectives, which must not run a second time on some ranks only. A collective
/// is always kept where there is a policy, whatever the policy says.
const std::set<std::string>& expensive_ops();
/// Whether `name` is a collective of torch's ("c10d::…", "_c10d_functional::…").
bool is_collective_op(std::string_view name);

/// Runs `forward` once without gradient and measures each operator: seconds of
/// this call, new bytes. Random state is put back. In order of calls.
std::vector<OpCost> measure_ops(const std::function<void()>& forward);

} // namespace hasten
