// What an Accelerator runs on: its options, the world, the group and the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hasten/accelerator/accelerator_options.h"
#include "hasten/base/world.h"
#include "order_check.h"

namespace hasten::detail {

/// Throws InputError for options out of range.
const AcceleratorOptions& checked_options(const AcceleratorOptions& options);

class RunContext {
 public:
  /// Without a communicator it meets the peers and owns the group. Collective then.
  RunContext(AcceleratorOptions options, std::shared_ptr<Communicator> communicator);

  const AcceleratorOptions& options() const { return options_; }
  void set_accumulation(int64_t steps) { options_.gradient_accumulation_steps = steps; }
  const World& world() const { return world_; }
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  /// Where this rank computes: its own GPU, or the CPU.
  const at::Device& device() const { return device_; }
  /// Null unless in debug mode.
  const std::shared_ptr<OrderCheck>& order_check() const { return order_check_; }

  bool alone() const { return communicator_->world_size() == 1; }
  /// The strategy in use: ddp with one rank.
  Strategy strategy() const { return alone() ? Strategy::ddp : options_.strategy; }
  /// The seed of ranges that draw from torch's generator. Empty: their generator is left alone.
  std::optional<uint64_t> order_seed() const;

  /// Ends the peers with an error that contains `why`. Does nothing with one rank.
  void fail_peers(const std::string& why, ErrorKind kind) const;
  void fail_peers(const std::exception& error) const;
  /// After a failure: continues with the remaining ranks. False if none is lost. Collective over
  /// them.
  bool shrink();

  bool owns_group() const { return owns_group_; }
  /// The run has ended; later collective calls are an error of the caller.
  void mark_closed() { closed_ = true; }
  bool closed() const { return closed_; }
  void close() const;

 private:
  void count_ranks_of_host();

  AcceleratorOptions options_;
  World world_;
  bool owns_group_;
  at::Device device_;
  std::shared_ptr<OrderCheck> order_check_; // debug only, else null
  std::shared_ptr<Communicator> communicator_;
  std::vector<int> launch_ranks_{}; // [rank] once ranks have been lost
  bool closed_ = false;
};

} // namespace hasten::detail
