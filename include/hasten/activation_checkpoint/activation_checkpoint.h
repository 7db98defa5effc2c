// Activation checkpointing: runs a part of the forward as a region whose activations are not kept.
// Backward runs the region again (a recomputation). Between forward and backward only the region's
// inputs are kept.
//
//   at::Tensor y = hasten::activation_checkpoint(
//       [&](const at::Tensor& x) { return block->forward(x); }, x);
//
// This is the non-reentrant variant, torch.utils.checkpoint(use_reentrant=False). The graph is
// recorded as usual and only the saved tensors are replaced. So every form of backward works:
// autograd::grad, several backward passes, higher-order gradients, backward inside a region, nested
// regions, and hooks that run once. Gradients are bit for bit the same as without a region.
//
// A recomputation
//   * uses the random numbers, autocast settings and gradient mode of the forward, and restores
//     the random state of the code around it
//   * stops as soon as it has the last tensor that backward needs (early stop)
//   * does not write to tensors that existed before: in-place changes (BatchNorm's statistics,
//     counters) go to copies, so they happen once
//   * belongs to one backward call, which frees its tensors one by one as it uses them
// Operators on other threads that the region starts are not seen. Memory numbers in this part do
// not include the scratch memory of libraries (oneDNN, BLAS).
// Cost: some microseconds per region, forward and backward together, and less for every recomputed
// operator: `scripts/bench.sh checkpoint_overhead` measures it. No cost while no region is active.
// Threading: regions of several threads are independent. Several threads may run backward on one
// graph.
// Design: docs/design/activation_checkpointing.md
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/core/block_call.h"
#include "hasten/core/recompute.h"

namespace hasten {

class OpPolicy;

/// A recomputation saved other tensors than forward, or was not possible. Backward throws it. A
/// retained graph stays usable.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

/// What is compared between forward and recomputation, in addition to the number of saved tensors.
enum class DeterminismCheck {
  /// Shape, dtype and device of each saved tensor; negligible cost.
  metadata,
  /// Nothing: a different shape is only found if an operator fails.
  none,
};

struct ActivationCheckpointOptions {
  /// Recomputes with the random state of the forward: that of torch's default CPU generator (2.5
  /// kB) and of the default generators of the inputs' devices. If false, dropout draws other masks
  /// and gradients are wrong; use it only for regions that draw no random numbers.
  bool preserve_rng_state = true;
  /// Stops a recomputation after the last tensor that is needed, by an exception that does not
  /// derive from std::exception. Set it to false for regions that catch every exception.
  bool early_stop = true;
  DeterminismCheck determinism_check = DeterminismCheck::metadata;
  /// Operators whose results are kept instead of recomputed
  /// (hasten/activation_checkpoint/op_policy.h); null: none. Cost: one look-up per operator.
  std::shared_ptr<const OpPolicy> policy{};
  /// Records the name of every operator in forward, so that an error can name the first operator
  /// that differs. Costs a copy of each name, and the memory for them.
  bool debug = false;
  /// Name of the region in messages, for example "encoder.layer.3".
  std::string name{};
};

namespace detail {

using RegionForward = Forward;

// Runs forward(inputs) as a region. Inputs may be undefined.
std::vector<at::Tensor> run_region(RegionForward forward, std::vector<at::Tensor> inputs,
                                   const ActivationCheckpointOptions& options);
[[noreturn]] void throw_no_tensor(const ActivationCheckpointOptions& options);

template <typename Fn, typename... Args>
auto run_region_of(const ActivationCheckpointOptions& options, Fn&& fn, Args&&... args) {
  using Result = std::decay_t<std::invoke_result_t<Fn&, Args...>>;
  static_assert(!std::is_void_v<Result>, "a region returns tensors");
  using Call = TensorCall<Result, std::decay_t<Fn>, Args...>;
  const std::shared_ptr<Call> call(new Call{std::forward<Fn>(fn), {std::forward<Args>(args)...}});
  std::vector<at::Tensor> outputs =
      run_region([call](std::vector<at::Tensor> inputs) { return call->run(std::move(inputs)); },
                 call->take_inputs(), options);
  std::optional<Result> value = call->take_shape();
  if (outputs.empty()) {
    throw_no_tensor(options);
  }
  TensorPutter put(std::move(outputs));
  put(*value);
  return std::move(*value);
}

template <typename Tuple, size_t... I>
auto run_region_with_last(Tuple&& all, std::index_sequence<I...>) {
  using All = std::decay_t<Tuple>;
  constexpr size_t last = std::tuple_size_v<All> - 1;
  return run_region_of(std::get<last>(all),
                       std::forward<std::tuple_element_t<I, All>>(std::get<I>(all))...);
}

// Whether the last of several types is ActivationCheckpointOptions.
template <typename... Args>
inline constexpr bool kEndsWithOptions =
    std::is_same_v<std::decay_t<std::tuple_element_t<sizeof...(Args) - 1, std::tuple<Args...>>>,
                   ActivationCheckpointOptions>;

} // namespace detail

/// Runs fn(inputs...) as a region and returns its result. `fn` is any callable. It is copied or
/// moved and lives as long as the graph: capture modules by their holders, and no tensors that are
/// to be freed. `inputs` may be tensors; optionals, vectors, pairs and tuples of tensors; structs
/// with flatten() (see call_block); and any other values, which are copied. The last argument may
/// be ActivationCheckpointOptions. Results may have the same types; their parts that are not
/// tensors are those of the forward.
/// With gradients disabled it only calls fn(inputs...). Local.
/// Throws what fn throws. Throws InputError if the region returns no tensor or changes an input in
/// place. Backward throws CheckpointError, which names the tensor, if the recomputation saves other
/// tensors than forward, or if an input or parameter was changed since (for example by an optimizer
/// step).
/// If another autograd engine is installed in the process (by a Python interpreter), it warns once
/// and runs a nested backward. autograd::grad and higher-order gradients through the region then
/// throw.
template <typename Fn, typename... Inputs>
auto activation_checkpoint(Fn&& fn, Inputs&&... inputs) {
  if constexpr (detail::kEndsWithOptions<void*, Inputs...>) {
    return detail::run_region_with_last(
        std::forward_as_tuple(std::forward<Fn>(fn), std::forward<Inputs>(inputs)...),
        std::make_index_sequence<sizeof...(Inputs)>());
  } else {
    return detail::run_region_of(ActivationCheckpointOptions{}, std::forward<Fn>(fn),
                                 std::forward<Inputs>(inputs)...);
  }
}

/// Runs a chain of functions in `segments` segments of floor(n / segments) functions. Each is a
/// region, except the last: it has the remaining functions too, and its activations are kept
/// because backward begins there. Throws InputError unless 1 <= segments <= functions.
at::Tensor activation_checkpoint_sequential(
    const std::vector<std::function<at::Tensor(at::Tensor)>>& functions, int64_t segments,
    at::Tensor input, const ActivationCheckpointOptions& options = {});

/// While it lives, overrides early_stop of the regions whose forward runs on this thread.
class [[nodiscard]] EarlyStopGuard {
 public:
  explicit EarlyStopGuard(bool early_stop);
  EarlyStopGuard(const EarlyStopGuard&) = delete;
  EarlyStopGuard& operator=(const EarlyStopGuard&) = delete;
  ~EarlyStopGuard();

 private:
  std::optional<bool> before_;
};

/// While it lives, the backward calls of this thread share recomputations: each region is
/// recomputed once for all of them. The calls should use different saved tensors (disjoint parts of
/// a graph). A call that needs a tensor again recomputes again. Memory: recomputed tensors that are
/// not used stay until the guard ends.
class [[nodiscard]] SharedRecompute {
 public:
  SharedRecompute();
  SharedRecompute(const SharedRecompute&) = delete;
  SharedRecompute& operator=(const SharedRecompute&) = delete;
  ~SharedRecompute();

 private:
  std::shared_ptr<void> before_{};
};

/// Recomputations in this process so far, how many of them stopped early, and the seconds that all
/// took. Without the hook engine nothing is counted.
struct RecomputeCounts {
  int64_t recomputed = 0;
  int64_t stopped_early = 0;
  double seconds = 0;
};
RecomputeCounts recompute_counts();

} // namespace hasten
