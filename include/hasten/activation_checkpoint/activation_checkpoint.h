// Runs a piece of forward without keeping what backward needs of it: backward runs
// the piece again. Memory between forward and backward: the region's inputs.
//
//   at::Tensor y = hasten::activation_checkpoint(
//       [&](const at::Tensor& x) { return block->forward(x); }, x);
//
// The non-reentrant kind, torch.utils.checkpoint(use_reentrant=False): the graph is
// recorded as always and only the saved tensors are replaced, so every form of
// backward works: autograd::grad, several backward passes, grads of grads,
// backward inside a region, regions inside regions, hooks that fire once.
// Gradients are bit for bit those without a region.
//
// A recomputation
//   * gets the random numbers, autocast settings and gradient mode of the forward;
//     the surrounding random stream is left as it was
//   * ends as soon as the last tensor that backward needs is there (early stop)
//   * writes nothing outside: in-place changes of tensors that existed before
//     (BatchNorm's statistics, counters) go to copies, so they happen once
//   * belongs to one backward call; its tensors are dropped one by one as backward
//     takes them
// What runs on other threads started by the region is not seen. Scratch memory of
// libraries (oneDNN, BLAS) is not counted anywhere here.
// Cost: some microseconds a region, forward and backward together, and less for every
// operator that is recomputed: `scripts/bench.sh checkpoint_overhead` measures it.
// Nothing while no region is active.
// Threading: regions of several threads are independent; one graph may be derived
// by several threads.
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

/// A recomputation did not give what forward saved, or could not be made.
/// Backward throws it; the graph stays usable where it was retained.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

/// What is compared between forward and recomputation beside the number of saved
/// tensors.
enum class DeterminismCheck {
  /// Shape, dtype and device of each; costs nothing to speak of.
  metadata,
  /// Nothing: another shape goes unnoticed until an operator refuses it.
  none,
};

struct ActivationCheckpointOptions {
  /// Recompute with the random state that forward began with: of torch's default
  /// CPU generator (2.5 kB) and of those of the inputs' devices. Off,
  /// dropout draws other masks and gradients are wrong: only for regions that
  /// draw nothing.
  bool preserve_rng_state = true;
  /// End a recomputation at the last tensor that is needed, by an exception that
  /// is none of std::exception's. Off for regions that catch everything.
  bool early_stop = true;
  DeterminismCheck determinism_check = DeterminismCheck::metadata;
  /// Operators whose results are kept instead of recomputed
  /// (hasten/activation_checkpoint/op_policy.h); null: none. A look-up an operator.
  std::shared_ptr<const OpPolicy> policy{};
  /// Remember every operator's name in forward, so that an error can name the
  /// first that differs. Costs a copy of each name, and their memory.
  bool debug = false;
  /// What messages call this region, "encoder.layer.3".
  std::string name{};
};

namespace detail {

using RegionForward = std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)>;

// Runs forward(inputs) as a region. Inputs may be undefined.
std::vector<at::Tensor> run_region(RegionForward forward, std::vector<at::Tensor> inputs,
                                   const ActivationCheckpointOptions& options);
[[noreturn]] void throw_no_tensor(const ActivationCheckpointOptions& options);

template <typename Fn, typename... Args>
auto run_region_of(const ActivationCheckpointOptions& options, Fn&& fn, Args&&... args) {
  static_assert((!kBorrows<std::decay_t<Args>> && ...),
                "activation_checkpoint binds arguments by value: pass a std::vector or a "
                "std::string instead of a view");
  using Result = std::decay_t<std::invoke_result_t<Fn&, Args...>>;
  static_assert(!std::is_void_v<Result>, "a region returns tensors");
  using Bound = std::tuple<std::decay_t<Args>...>;
  auto bound = std::make_shared<Bound>(std::forward<Args>(args)...);
  TensorTaker inputs;
  inputs(*bound);
  auto result = std::make_shared<ResultShape<Result>>();
  auto kept_fn = std::make_shared<std::decay_t<Fn>>(std::forward<Fn>(fn));

  RegionForward forward = [kept_fn, bound, result](std::vector<at::Tensor> tensors) {
    Bound values = *bound;
    TensorPutter put(std::move(tensors));
    put(values);
    Result output = std::apply(
        [&](auto&... value) { return std::invoke(*kept_fn, static_cast<Passed<Args>>(value)...); },
        values);
    TensorTaker outputs;
    outputs(output);
    if (result->wanted) {
      result->shape.emplace(std::move(output));
    }
    return std::move(outputs.tensors);
  };

  std::vector<at::Tensor> outputs =
      run_region(std::move(forward), std::move(inputs.tensors), options);
  result->wanted = false;
  if (outputs.empty()) {
    throw_no_tensor(options);
  }
  Result value = std::move(*result->shape);
  result->shape.reset();
  TensorPutter put(std::move(outputs));
  put(value);
  return value;
}

template <typename Tuple, size_t... I>
auto run_region_with_last(Tuple&& all, std::index_sequence<I...>) {
  using All = std::decay_t<Tuple>;
  constexpr size_t last = std::tuple_size_v<All> - 1;
  return run_region_of(std::get<last>(all),
                       std::forward<std::tuple_element_t<I, All>>(std::get<I>(all))...);
}

template <typename... Args>
inline constexpr bool kEndsWithOptions = false;
template <typename First, typename... Rest>
inline constexpr bool kEndsWithOptions<First, Rest...> =
    sizeof...(Rest) == 0 ? std::is_same_v<std::decay_t<First>, ActivationCheckpointOptions>
                         : kEndsWithOptions<Rest...>;

} // namespace detail

/// fn(inputs...), as a region. `fn` is anything callable; it is copied or moved and
/// lives as long as the graph, so capture modules by holder and no tensor that is
/// to be freed. `inputs` may be tensors, optionals, vectors, pairs and tuples of
/// them or structs with flatten() (see call_block), and anything else, which is
/// copied. The last argument may be ActivationCheckpointOptions. Results likewise;
/// parts that are no tensors are those of the forward.
/// With gradients disabled: fn(inputs...). Local.
/// Throws what fn throws; InputError where the region returns no tensor or changed
/// an input in place. Backward throws CheckpointError where the recomputation
/// saves other tensors than forward did, or where an input or a parameter was
/// changed since (an optimizer stepped), naming it.
/// Where another autograd engine is installed in the process (a Python
/// interpreter's) it warns once and works by a nested backward: autograd::grad and
/// gradients of gradients are refused then.
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

/// A chain of functions in `segments` regions of floor(n / segments) functions;
/// the last, with the remainder, is kept as it is: backward begins there.
/// Throws InputError unless 1 <= segments <= functions.
at::Tensor activation_checkpoint_sequential(
    const std::vector<std::function<at::Tensor(at::Tensor)>>& functions, int64_t segments,
    at::Tensor input, const ActivationCheckpointOptions& options = {});

/// Overrides early_stop of regions whose forward runs while it lives, on this
/// thread.
class [[nodiscard]] EarlyStopGuard {
 public:
  explicit EarlyStopGuard(bool early_stop);
  EarlyStopGuard(const EarlyStopGuard&) = delete;
  EarlyStopGuard& operator=(const EarlyStopGuard&) = delete;
  ~EarlyStopGuard();

 private:
  std::optional<bool> before_;
};

/// Backward calls of this thread share their recomputations while it lives: each
/// region is recomputed once for all of them. The calls must not need the same
/// saved tensors (disjoint parts of a graph); one that does recomputes again.
/// Memory: what was recomputed and not used yet stays until the guard ends.
class [[nodiscard]] SharedRecompute {
 public:
  SharedRecompute();
  SharedRecompute(const SharedRecompute&) = delete;
  SharedRecompute& operator=(const SharedRecompute&) = delete;
  ~SharedRecompute();

 private:
  int64_t before_ = 0;
  std::shared_ptr<void> regions_{};
};

/// Regions recomputed by this process so far, and how many of those recomputations
/// ended early.
struct RecomputeCounts {
  int64_t recomputed = 0;
  int64_t stopped_early = 0;
};
RecomputeCounts recompute_counts();

} // namespace hasten
