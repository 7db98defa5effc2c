#include "hasten/comm/cost_model.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "hasten/core/device.h"

namespace hasten {

namespace detail {

/// Every decision follows from numbers that the ranks have agreed on, so all make the same calls.
class CostMeasurement {
 public:
  explicit CostMeasurement(Communicator& group)
      : group_(group), world_(group.world_size()), device_(group.options().device) {
    const int64_t row = kMostBytes / kElement / world_;
    rows_ = group.allocate_tensor(row * world_, at::TensorOptions(device_)).fill_(1);
    row_ = group.allocate_tensor(row, at::TensorOptions(device_)).fill_(1);
    gradients_ = at::ones_like(rows_);
    model_.backend = group.options().backend;
    model_.world_size = group.world_size();
  }

  CostModel measure() {
    using Kind = Collective::Kind;
    model_.barrier_seconds = agreed(15, [this] { group_.barrier(kName); });
    for (const auto kind :
         {Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather, Kind::broadcast}) {
      model_.operations.push_back({.kind = kind});
    }
    constexpr std::pair<int64_t, int> sizes[] = {{4 << 10, 21}, {64 << 10, 15}, {1 << 20, 11},
                                                 {4 << 20, 9},  {16 << 20, 5},  {kMostBytes, 3}};
    for (const auto& [bytes, calls] : sizes) {
      for (OperationCost& operation : model_.operations) {
        if (operation.points.empty() || // on a loaded machine, too
            spent_ + (operation.alpha + operation.beta * static_cast<double>(bytes)) * (calls + 1) <
                kPointsBudget) {
          add_point(operation, std::max<int64_t>(1, bytes / kElement / world_), calls);
        }
      }
    }
    return std::move(model_);
  }

 private:
  static constexpr const char* kName = "cost model";
  static constexpr int64_t kElement = sizeof(float);
  static constexpr int64_t kMostBytes = 64 << 20; // more than caches keep of a step's data
  static constexpr double kPointsBudget = 0.45; // seconds of their calls

  static double since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  /// The lower quartile of what each call took on the rank that was the slowest in it: other programs
  /// make some calls slower, and none faster. Collective.
  double usual(const std::vector<double>& seconds) {
    const at::Tensor slowest = at::tensor(seconds, at::kDouble);
    group_.all_reduce(slowest, ReduceOp::MAX, kName);
    return std::get<0>(slowest.sort())[slowest.numel() / 4].item<double>();
  }

  /// Every call has other data, as far as there is, which the caches do not have.
  void add_point(OperationCost& operation, int64_t count, int calls) {
    using Kind = Collective::Kind;
    const int64_t places = row_.numel() / count;
    const at::Tensor scratch =
        at::empty_like(rows_.narrow(0, 0, count * world_)).view({world_, count});
    const bool rooted = operation.kind == Kind::broadcast;
    const int64_t parts = rooted ? world_ : 1;
    const int64_t bytes = count * (rooted ? 1 : world_) * kElement;
    int64_t place = 0;
    const double seconds = agreed(calls, [&] {
      const at::Tensor rows = rows_.narrow(0, place * count * world_, count * world_);
      const at::Tensor all = rows.view({world_, count});
      const at::Tensor own = row_.narrow(0, place * count, count);
      std::vector<Collective> what{{operation.kind, kName, all, own}};
      if (operation.kind == Kind::reduce_scatter) {
        what[0].output = own;
        what[0].input = gradients_.narrow(0, rows.storage_offset(), rows.numel()).view_as(all);
        what[0].scratch = scratch;
      } else if (rooted) {
        what.clear();
        for (int rank = 0; rank < world_; ++rank) {
          what.push_back({operation.kind, kName, all[rank], {}, {}, rank});
        }
      }
      group_.start_together(what).wait();
      synchronize(device_);
      place = (place + 1) % places;
    });
    operation.points.push_back({bytes, seconds / static_cast<double>(parts)});
    const OperationCost::Point& first = operation.points.front();
    const OperationCost::Point& last = operation.points.back();
    if (last.bytes > first.bytes) {
      operation.beta = std::max(
          0.0, (last.seconds - first.seconds) / static_cast<double>(last.bytes - first.bytes));
    }
    operation.alpha =
        std::max(0.0, first.seconds - operation.beta * static_cast<double>(first.bytes));
  }

  /// The usual seconds of a call. Collective.
  double agreed(int calls, const std::function<void()>& call) {
    std::vector<double> seconds;
    for (int i = -1; i < calls; ++i) { // the first warms up
      group_.barrier(kName);
      const auto start = std::chrono::steady_clock::now();
      call();
      if (i >= 0) {
        seconds.push_back(since(start));
      }
    }
    const double result = usual(seconds);
    spent_ += result * (calls + 1);
    return result;
  }

  Communicator& group_;
  const int64_t world_;
  const at::Device device_;
  at::Tensor rows_{}, row_{};
  at::Tensor gradients_{}; // as autograd makes them: not in memory that the ranks share
  double spent_ = 0;
  CostModel model_{};
};

} // namespace detail

CostModel measure_cost_model(Communicator& group) {
  return group.world_size() > 1 ? detail::CostMeasurement(group).measure() : CostModel();
}

} // namespace hasten
