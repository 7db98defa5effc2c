// The state of an Averager.
#pragma once

#include <nlohmann/json.hpp>

#include <array>
#include <chrono>
#include <exception>
#include <memory>
#include <ranges>
#include <string>
#include <vector>

#include "averager_kernels.h"
#include "hasten/local_sgd/averager.h"

namespace hasten {

struct Averager::Impl {
  using Clock = std::chrono::steady_clock;
  using PassSums = detail::PassSums;

  struct Entry {
    std::string name{};
    at::Tensor tensor{};
    at::Tensor staging{}; // a copy on the CPU of a tensor on another device
    at::ScalarType dtype = at::kFloat;
    int64_t numel = 0;
    size_t group = 0;
    int64_t offset = 0; // in the group's buffer
    int64_t fragment = 0;
    std::vector<int64_t> sizes{};
    std::vector<int64_t> strides{};
    bool direct = false; // reduced in place
  };
  // The entries whose buffers have one dtype.
  struct Group {
    at::ScalarType dtype = at::kFloat;
    int64_t numel = 0; // in buffers, without tensors that are reduced in place
    at::Tensor buffer{};
    at::Tensor snapshot{}; // of start()
    at::Tensor anchor{};
    at::Tensor anchor_before{}; // during a driver's round, until it is committed
  };
  struct Slice {
    size_t group = 0;
    int64_t fragment = 0;
    int64_t begin = 0; // in the group's buffer; for direct entries in the tensor
    int64_t count = 0;
    bool direct = false;
    std::vector<Piece> pieces{};
  };
  struct Operation {
    size_t slice = 0;
    at::Tensor range{};
    at::Tensor gathered{}; // [rank, …] on the driver
    Work handle{};
    CommHook::Step step{}; // of a hook; empty: done
  };
  // A round, between start() and finish().
  struct Round {
    bool open = false;
    bool corrects = false; // x += mean - snapshot
    bool whole = false; // a commit needs nothing more than the total
    int ranks = 1;
    int64_t fragment = kAll;
    double weight = 1;
    double total = -1; // sum of weights; below 0: not known yet
    double learning_rate = 0;
    double seconds = 0;
    double copy_seconds = 0;
    std::vector<Operation> operations{};
  };

  Impl(std::shared_ptr<Communicator> group, const NamedTensorList& tensors,
       AveragerOptions settings);

  bool has_anchor() const { return options.outer || options.comm_hook; }
  // Parts with a state of their own, by name in the state; null where there is none.
  std::array<std::pair<const char*, Stateful*>, 2> parts() const {
    return {{{"outer", options.outer.get()}, {"hook", options.comm_hook.get()}}};
  }
  void stage_in();
  char* address(const at::Tensor& buffer, int64_t element) const;
  void begin(double weight, double learning_rate, int64_t fragment, bool later);
  void complete();
  void await_data();
  void settle_spread();
  void forget_spread();
  RoundOutcome recover(std::shared_ptr<Communicator> remaining);
  void make_buffers();
  // Calls function(entry, data, buffer offset, count) for every piece of the slice.
  template <typename Function>
  void for_pieces(const Slice& slice, const Function& function) const {
    int64_t offset = slice.begin;
    for (const Piece& piece : slice.pieces) {
      const Entry& entry = entries[static_cast<size_t>(piece.tensor)];
      const auto size = static_cast<int64_t>(c10::elementSize(entry.dtype));
      function(entry, data_of(entry) + piece.begin * size, offset, piece.count);
      offset += piece.count;
    }
  }

  std::shared_ptr<Communicator> communicator;
  AveragerOptions options;
  std::vector<Entry> entries{};
  std::vector<Group> groups{};
  std::vector<Slice> all_slices{};
  int64_t fragment_count = 1;

  Round round{};
  double last_total = 0; // of the last committed round
  bool dropped = false; // a round was dropped, and none has been committed since
  bool recovering = false; // ranks may be at different points, so nothing is sent
  AverageReport report{};
  at::Tensor spread{}; // [2] fp64
  Work spread_handle{};
  std::exception_ptr spread_error{}; // it could not be sent
  at::Tensor ballot{};

 private:
  void add_entries(const NamedTensorList& tensors);
  void lay_out();
  void cut_slices();
  void compare_ranks();
  bool drives() const { return options.sync == SyncStrategy::driver; }
  bool takes_part(int64_t fragment) const {
    return round.fragment == kAll || fragment == round.fragment;
  }
  // Those of the open round.
  auto open_slices() const {
    return all_slices |
           std::views::filter([this](const Slice& slice) { return takes_part(slice.fragment); });
  }
  static at::Tensor range_of(const at::Tensor& flat, const Slice& slice) {
    return flat.narrow(0, slice.begin, slice.count);
  }
  void check_tensors() const;
  void stage_out();
  char* data_of(const Entry& entry) const;
  void load(const Slice& slice);
  void launch(size_t index);
  void end_round();
  void vote();
  void commit();
  void commit_direct();
  void step_outer();
  void outer_steps();
  void drive();
  void send_spread(const PassSums& sums, bool measured);
  int64_t bytes_of_round() const;
  bool driven() const { return drives() && round.ranks > 1; }
  /// Whether the group's mean is the weighted one: in place the sum of weights is known before.
  bool means() const { return !options.transactional && round.total == round.ranks; }
  void drop_round();
};

} // namespace hasten
