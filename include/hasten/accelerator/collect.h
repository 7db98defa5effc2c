// Collectives on values other than gradients, and functions that run code on certain ranks.
// Accelerator derives from Collect: accelerator.gather(x), accelerator.reduce(metric), ….
// "Collective" = every rank calls it, in the same order; these calls block. Tensors may lie on any
// device and have any strides. They are sent by way of the CPU. Results are detached and on the
// device of the argument.
// With AcceleratorOptions::debug the ranks compare shapes before anything is sent; the error for a
// difference names two ranks. Without it, Gloo's own message may end ranks whose shapes differ.
// Functions marked "agreed" always compare.
// Functions that take a Value look for tensors inside, in order: pair, tuple, vector, map by name,
// hasten::Batch, structs of tensors and structs with flatten (hasten/loader/batch.h). Other
// members stay unchanged.
// In a loop over a range that was not prepared, ranks may have different numbers of batches: call
// no collectives in its body except those of the windows.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "hasten/comm/communicator.h"
#include "hasten/loader/batch.h"
#include "hasten/metrics/metric.h"

namespace hasten {

namespace detail {
class AcceleratorCore;
/// Replaces `metric` by the total over ranks. Do not reduce it again, also after further updates:
/// the samples in this total would then count once per rank. Collective.
void reduce_in_place(AcceleratorCore& core, Metric& metric);

// Values in which the functions below look for tensors; a Tensor has its own overload.
template <typename Value>
concept Nested =
    !std::is_convertible_v<const Value&, at::Tensor> && !std::is_base_of_v<Metric, Value>;
} // namespace detail

class Collect {
 public:
  // Who this process is. Local.
  at::Device device() const;
  int process_index() const;
  int local_process_index() const;
  int num_processes() const;
  bool is_main_process() const { return process_index() == 0; }
  bool is_local_main_process() const { return local_process_index() == 0; }
  bool is_last_process() const { return process_index() == num_processes() - 1; }
  const std::shared_ptr<Communicator>& communicator() const;

  /// Returns all ranks' tensors, concatenated along dimension 0 in rank order; a 0-d tensor is one
  /// element. Shapes are equal on all ranks. Any dtype. Collective. Memory: world_size times the
  /// tensor.
  at::Tensor gather(const at::Tensor& tensor);
  template <detail::Nested Value>
  Value gather(Value value) {
    return map(std::move(value), [this](const auto& t) { return gather(t); });
  }

  /// Returns the samples of all ranks' batches, concatenated in rank order: each sample of the data
  /// exactly once, for any world size, also after skip_first_batches and for a range without
  /// length. Dimension 0 may differ by rank and may be 0 (agreed). In the loop over a loader with
  /// even_batches, the repeated samples are dropped.
  /// Collective. Throws InputError on every rank if the loader's batch has repeated samples and
  /// dimension 0 of `rows` is not the batch's number of samples.
  at::Tensor gather_for_metrics(const at::Tensor& rows);
  template <detail::Nested Value>
  Value gather_for_metrics(Value value) {
    return map(std::move(value), [this](const auto& t) { return gather_for_metrics(t); });
  }

  /// Returns a reduced copy, times `scale`. Shapes are equal on all ranks. AVG, MIN and MAX for
  /// float, double, half and bfloat16; SUM, MIN and MAX also for int64, int32, int8 and uint8.
  /// 16-bit types are summed in fp32 and rounded once, so neither SUM nor AVG overflows on the way.
  /// Every rank gets the same bits. Collective.
  at::Tensor reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::SUM, double scale = 1);
  template <detail::Nested Value>
  Value reduce(Value value, ReduceOp op = ReduceOp::SUM, double scale = 1) {
    return map(std::move(value), [=, this](const auto& t) { return reduce(t, op, scale); });
  }
  /// Returns a copy of the metric that has counted the samples of all ranks:
  ///   double r = accelerator.reduce(pearson).compute();
  /// This rank's metric is unchanged, so a second call counts nothing twice. Ranks are merged in
  /// rank order, so all get the same bits. Collective.
  template <std::derived_from<Metric> M>
  M reduce(const M& metric) {
    M joined = metric;
    detail::reduce_in_place(*core_, joined);
    return joined;
  }

  /// Overwrites the tensor with rank `from`'s, in place, and returns it. Shapes and dtypes are
  /// equal on all ranks; any dtype. Collective.
  at::Tensor broadcast(at::Tensor tensor, int from = 0);
  template <detail::Nested Value>
  Value broadcast(Value value, int from = 0) {
    return map(std::move(value), [=, this](const auto& t) { return broadcast(t, from); });
  }

  /// Pads dimension `dim` (negative: counted from the end) with `pad_index` to the largest size of
  /// any rank, after the data or, with pad_first, before it. Other dimensions may differ, too.
  /// Tensors without that dimension stay unchanged. Collective (agreed). Throws InputError if the
  /// ranks' numbers of dimensions differ.
  at::Tensor pad_across_processes(const at::Tensor& tensor, int64_t dim = 0, double pad_index = 0,
                                  bool pad_first = false);
  template <detail::Nested Value>
  Value pad_across_processes(Value value, int64_t dim = 0, double pad_index = 0,
                             bool pad_first = false) {
    return map(std::move(value), [=, this](const auto& t) {
      return pad_across_processes(t, dim, pad_index, pad_first);
    });
  }

  /// Returns rank `from`'s value on every rank; other ranks' values are ignored. Doubles keep every
  /// bit, also NaN and infinity. Any size. Collective.
  nlohmann::json broadcast_object(const nlohmann::json& value, int from = 0);
  /// Returns all ranks' values in rank order. Any sizes. Collective. Memory: world_size times the
  /// longest value, in bytes.
  std::vector<nlohmann::json> gather_object(const nlohmann::json& value);

  /// Returns the first and one past the last index of this rank's block of `count` items. Blocks
  /// are in rank order; the first count % world_size ranks have one item more. Local.
  std::pair<int64_t, int64_t> split_between_processes(int64_t count) const;
  /// Returns this rank's block of values that every rank holds: of a vector's elements, or of a
  /// tensor's dimension 0 (a view). With apply_padding all blocks have equal size: shorter ones
  /// repeat their last element, and an empty one repeats the last of all. Local.
  at::Tensor split_between_processes(const at::Tensor& rows, bool apply_padding = false) const;
  template <typename T>
  std::vector<T> split_between_processes(const std::vector<T>& values,
                                         bool apply_padding = false) const {
    const auto [begin, end] = split_between_processes(static_cast<int64_t>(values.size()));
    std::vector<T> part(values.begin() + begin, values.begin() + end);
    const auto largest =
        (values.size() + num_processes() - 1) / static_cast<size_t>(num_processes());
    while (apply_padding && part.size() < largest) {
      part.push_back(part.empty() ? values.back() : part.back());
    }
    return part;
  }

  /// Calls `function` on the main process and, after it has returned there, on all other ranks.
  /// Returns this rank's result when all ranks have finished. For work whose first run leaves
  /// something for the others, such as a download or a cache. Collective. If one rank throws, it
  /// rethrows its exception, and every other rank throws Error (InputError for an InputError) with
  /// that rank and its message. If the main process throws, the others do not run `function`. The
  /// group stays usable.
  template <typename Function>
  auto main_process_first(Function&& function) {
    return in_turns(is_main_process(), "main_process_first", function);
  }
  /// The same, but the local main process of each host goes first.
  template <typename Function>
  auto local_main_process_first(Function&& function) {
    return in_turns(is_local_main_process(), "local_main_process_first", function);
  }

  /// Calls `function` on one rank only. Returns its result there and an empty optional on other
  /// ranks; returns void if `function` does. Local: an exception is thrown on that rank only.
  template <typename Function>
  auto on_main_process(Function&& function) const {
    return only_if(is_main_process(), function);
  }
  template <typename Function>
  auto on_local_main_process(Function&& function) const {
    return only_if(is_local_main_process(), function);
  }
  template <typename Function>
  auto on_last_process(Function&& function) const {
    return only_if(is_last_process(), function);
  }
  template <typename Function>
  auto on_process(int process_index, Function&& function) const {
    return only_if(this->process_index() == process_index, function);
  }

  /// Sets this rank's flag for check_trigger, for example to stop early or to save now. Local.
  void set_trigger();
  /// Returns true on every rank if any rank's flag is set, and clears all flags. Collective.
  bool check_trigger();

  /// Blocks until every rank has called it. Collective.
  void wait_for_everyone();
  /// Prints a line to stdout (or `out`) on the main process only. Local.
  void print(std::string_view line) const;
  void print(std::ostream& out, std::string_view line) const;

  /// For the parts of hasten that work on an accelerator.
  const std::shared_ptr<detail::AcceleratorCore>& core() const { return core_; }

 protected:
  explicit Collect(std::shared_ptr<detail::AcceleratorCore> core);
  ~Collect() = default;
  Collect(Collect&&) noexcept = default;

  std::shared_ptr<detail::AcceleratorCore> core_;

 private:
  template <typename Value, typename Change>
  Value map(Value value, Change change) {
    if (detail::change_tensors(value, change) == 0) {
      detail::throw_no_tensor_inside();
    }
    return value;
  }
  template <typename Function>
  auto in_turns(bool first, const char* name, Function& function) {
    using Result = std::remove_cvref_t<std::invoke_result_t<Function&>>;
    if constexpr (std::is_void_v<Result>) {
      take_turns(first, name, [&] { function(); });
    } else {
      std::optional<Result> result;
      take_turns(first, name, [&] { result.emplace(function()); });
      return std::move(*result);
    }
  }
  template <typename Function>
  static auto only_if(bool here, Function& function) {
    using Result = std::remove_cvref_t<std::invoke_result_t<Function&>>;
    if constexpr (std::is_void_v<Result>) {
      if (here) {
        function();
      }
    } else {
      return here ? std::optional<Result>(function()) : std::nullopt;
    }
  }
  void take_turns(bool first, const char* name, const std::function<void()>& body);

  bool triggered_ = false;
};

} // namespace hasten
