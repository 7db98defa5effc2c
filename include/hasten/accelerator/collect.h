// What ranks exchange in a loop beside gradients, and which of them runs what. An
// Accelerator is a Collect: accelerator.gather(x), accelerator.reduce(metric), ….
// "Collective" = every rank calls it, in the same order; these block. Tensors may
// lie on any device and be of any strides; they travel by the CPU, and what comes
// back is on the device of what went in, and detached.
// With AcceleratorOptions::debug shapes are compared before anything travels, and
// a difference is an error that names two ranks; without it, ranks whose shapes
// differ may end with Gloo's message. Functions that say "agreed" always compare.
// The functions that take a Value look for tensors inside, in order: pair, tuple,
// vector, map by name, hasten::Batch, structs of tensors and structs with flatten
// (hasten/accelerator/batch.h). Other members stay as they are.
// In a loop over a training loader ranks may have different numbers of batches:
// call nothing collective from its body that the windows do not call themselves.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "hasten/accelerator/batch.h"
#include "hasten/comm/communicator.h"
#include "hasten/metrics/metric.h"

namespace hasten {

namespace detail {
class AcceleratorCore;

// Values that functions below look into; a Tensor takes its own overload.
template <typename Value>
concept Nested =
    !std::is_convertible_v<const Value&, at::Tensor> && !std::is_base_of_v<Metric, Value>;
} // namespace detail

class Collect {
  friend class LocalSGD;

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

  /// Every rank's tensor, joined along dim 0 in rank order, on every rank; a 0-d
  /// tensor is one row. All have one shape. Any dtype. Collective.
  /// Memory: world_size times the tensor.
  at::Tensor gather(const at::Tensor& tensor);
  template <detail::Nested Value>
  Value gather(Value value) {
    return map(std::move(value), [this](const auto& t) { return gather(t); });
  }

  /// The rows of every rank's batch, joined in rank order, on every rank: each
  /// row of the data exactly once, whatever the world, also after
  /// skip_first_batches and from a range without length. Dim 0 may differ by
  /// rank, 0 included (agreed). In the loop over a loader with even_batches the
  /// rows that were repeated are left out.
  /// Collective. Throws InputError on every rank where the loader's batch holds
  ///   repeated rows and `rows` does not hold one row for each of the batch's.
  at::Tensor gather_for_metrics(const at::Tensor& rows);
  template <detail::Nested Value>
  Value gather_for_metrics(Value value) {
    return map(std::move(value), [this](const auto& t) { return gather_for_metrics(t); });
  }

  /// A reduced copy, times `scale`. One shape on all ranks. mean, min and max of
  /// float, double, half, bfloat16; sum, min and max also of int64, int32, int8,
  /// uint8. 16-bit types are summed in fp32 and rounded once, so neither sum nor
  /// mean overflows on the way. Every rank gets the same bits. Collective.
  at::Tensor reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::SUM, double scale = 1);
  template <detail::Nested Value>
  Value reduce(Value value, ReduceOp op = ReduceOp::SUM, double scale = 1) {
    return map(std::move(value), [=, this](const auto& t) { return reduce(t, op, scale); });
  }
  /// A copy of the metric that has seen what it has seen on all ranks:
  ///   double r = accelerator.reduce(pearson).compute();
  /// This rank's metric stays as it is, so asking again counts nothing twice.
  /// Ranks are merged in rank order, so all get the same bits. Collective.
  template <std::derived_from<Metric> M>
  M reduce(const M& metric) {
    M joined = metric;
    reduce_(joined);
    return joined;
  }
  /// The same in place, for a metric that is not asked to go on: counted further
  /// and reduced again, every rank would bring all rows. Collective.
  void reduce_(Metric& metric);

  /// Overwrites the tensor with rank `from`'s, in place, and returns it. One
  /// shape and dtype on all ranks; any dtype. Collective.
  at::Tensor broadcast(at::Tensor tensor, int from = 0);
  template <detail::Nested Value>
  Value broadcast(Value value, int from = 0) {
    return map(std::move(value), [=, this](const auto& t) { return broadcast(t, from); });
  }

  /// Pads dim `dim` (negative: from the end) with `pad_index` to the largest size
  /// any rank has, behind the data or, with pad_first, before it. The other dims
  /// may differ too. A dim the tensors do not have leaves them as they are.
  /// Collective (agreed). Throws InputError where numbers of dims differ.
  at::Tensor pad_across_processes(const at::Tensor& tensor, int64_t dim = 0, double pad_index = 0,
                                  bool pad_first = false);
  template <detail::Nested Value>
  Value pad_across_processes(Value value, int64_t dim = 0, double pad_index = 0,
                             bool pad_first = false) {
    return map(std::move(value), [=, this](const auto& t) {
      return pad_across_processes(t, dim, pad_index, pad_first);
    });
  }

  /// Rank `from`'s value on every rank; the others' is not looked at. Doubles
  /// keep every bit, NaN and infinity included. Any size. Collective.
  nlohmann::json broadcast_object(const nlohmann::json& value, int from = 0);
  /// Every rank's value, in rank order, on every rank. Any sizes. Collective.
  /// Memory: world_size times the longest, as bytes.
  std::vector<nlohmann::json> gather_object(const nlohmann::json& value);

  /// First and one past the last of `count` things that are this rank's: blocks
  /// in rank order, the first count % world_size ranks have one more. Local.
  std::pair<int64_t, int64_t> split_between_processes(int64_t count) const;
  /// This rank's part of values that every rank holds: of a vector's elements, or
  /// of a tensor's rows (a view). With apply_padding ranks with fewer get their
  /// last one again (an empty part: the last of all), so that parts are equal.
  /// Local.
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

  /// Calls `function` on the main process, then, once it has returned there, on
  /// all others; returns when all are through, with what it returned here. For
  /// work whose first run leaves something for the others: a download, a cache.
  /// Collective. What it throws on one rank is thrown there, and every other rank
  /// throws Error (InputError for an InputError) with that rank and its text;
  /// after a throw on the main process the others do not run it. The group lives
  /// on.
  template <typename Function>
  auto main_process_first(Function&& function) {
    return in_turns(is_main_process(), "main_process_first", function);
  }
  /// The same with the local main process of each host going first.
  template <typename Function>
  auto local_main_process_first(Function&& function) {
    return in_turns(is_local_main_process(), "local_main_process_first", function);
  }

  /// Calls `function` on one rank alone. Returns what it returned, an empty
  /// optional elsewhere; nothing where it returns nothing. Local: what it throws
  /// is thrown on that rank only.
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

  /// Raises this rank's flag for check_trigger: stop early, save now. Local.
  void set_trigger();
  /// True on every rank if any rank's flag is up; then all flags are down again.
  /// Collective.
  bool check_trigger();

  /// The same without a message of its own: these bits (below kWindowRequests) go to
  /// all ranks with this rank's next complete window, whose
  /// WindowReport::requests has what any rank asked for. In a LocalSGD scope windows,
  /// and so requests, stay the rank's own. Local.
  void request(uint32_t bits);

  /// Blocks until every rank is here. Collective.
  void wait_for_everyone();
  /// A line on stdout (or `out`), from the main process only. Local.
  void print(std::string_view line) const;
  void print(std::ostream& out, std::string_view line) const;

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
