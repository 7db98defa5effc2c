#include "hasten/comm/cost_model.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "hasten/base/process.h"
#include "hasten/base/text.h"
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

/// Bytes that each network interface of this host has sent; not those of loopback.
static std::map<std::string, int64_t> bytes_by_interface() {
  std::map<std::string, int64_t> bytes;
  std::ifstream table("/proc/net/dev");
  for (std::string line; std::getline(table, line);) {
    std::replace(line.begin(), line.end(), ':', ' ');
    std::istringstream words(line);
    std::string name;
    words >> name;
    int64_t sent = -1; // in the heading
    for (int column = 0; column < 9; ++column) {
      words >> sent;
    }
    if (words && name != "lo") {
      bytes[name] = sent;
    }
  }
  return bytes;
}

/// " over eth0" and " (940 Mbit/s, 0.2 ms)".
static std::pair<std::string, std::string> describe_link(Communicator& group, int hosts) {
  constexpr const char* kName = "link between hosts";
  const auto seconds = [&](int64_t bytes) {
    const at::Tensor data = group.allocate_tensor(bytes / 4, at::kFloat);
    group.barrier(kName);
    const auto start = std::chrono::steady_clock::now();
    group.all_reduce(data, ReduceOp::SUM, kName + std::to_string(bytes));
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  double small = seconds(4);
  for (int i = 0; i < 8; ++i) {
    small = std::min(small, seconds(4));
  }
  constexpr double kLeast = 256 << 10;
  const double guess = kLeast * 0.1 / seconds(int64_t{256} << 10); // bytes of a tenth of a second
  const auto bytes =
      group
          .broadcast_object(static_cast<int64_t>(std::clamp(guess, kLeast, 64 * kLeast)) / 4 * 4,
                            kName)
          .get<int64_t>();
  auto sent = bytes_by_interface();
  const double taken = seconds(bytes);
  std::pair<std::string, int64_t> most;
  for (const auto& [name, now] : bytes_by_interface()) {
    if (now - sent[name] > most.second) {
      most = {name, now - sent[name]};
    }
  }
  if (most.second == 0) {
    return {};
  }
  const double megabits = 8e-6 * static_cast<double>(most.second) / taken;
  const double latency = 1000 * small / (2 * (hosts - 1)); // steps of a ring
  return {" over " + most.first, " (" + format_fixed(megabits, megabits < 10 ? 1 : 0) +
                                     " Mbit/s, " + format_fixed(latency, latency < 1 ? 2 : 1) +
                                     " ms)"};
}

std::string describe_hosts(Communicator& group) {
  const std::vector<int> here = detail::ranks_of_host(group);
  if (std::cmp_equal(here.size(), group.world_size())) {
    return {};
  }
  std::vector<std::string> hosts;
  const auto all = group.all_gather_object({host_name(), here}, "hosts");
  for (int rank = 0; rank < group.world_size(); ++rank) {
    const auto ranks = all[static_cast<size_t>(rank)][1].get<std::vector<int>>();
    if (ranks.front() == rank) {
      const bool in_a_row =
          ranks.back() - ranks.front() + 1 == std::ssize(ranks) && ranks.size() > 1;
      const auto numbers = mapped(ranks, [](int one) { return std::to_string(one); });
      hosts.push_back(all[static_cast<size_t>(rank)][0].get<std::string>() + ": " +
                      (in_a_row ? numbers.front() + "-" + numbers.back() : joined(numbers)));
    }
  }
  const std::string backend = group.options().backend;
  const bool measures = group.options().device.is_cpu();
  const auto [over, cost] = measures ? describe_link(group, static_cast<int>(hosts.size()))
                                     : std::pair<std::string, std::string>();
  return std::to_string(group.world_size()) + " ranks on " + std::to_string(hosts.size()) +
         " hosts (" + joined(first_items(hosts, 8)) + "): " +
         (backend == "shm+gloo" ? "memory inside a host, Gloo" + over + " between"
          : backend == "gloo"   ? "Gloo" + over
                                : backend) +
         cost;
}

} // namespace hasten
