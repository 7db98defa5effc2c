#include "run_context.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "hasten/base/store_channel.h"
#include "hasten/comm/backend.h"
#include "hasten/comm/cost_model.h"
#include "hasten/core/device.h"
#include "hasten/tracking/tracker.h"

namespace hasten::detail {

bool debugs(const AcceleratorOptions& options) {
  return options.debug || environment_value("HASTEN_DEBUG") == "1";
}

const AcceleratorOptions& checked_options(const AcceleratorOptions& options) {
  const auto refuse = [](const std::string& what, const char* expected) {
    throw InputError("accelerator::Accelerator", what, expected);
  };
  if (options.gradient_accumulation_steps < 1) {
    refuse("gradient_accumulation_steps=" + std::to_string(options.gradient_accumulation_steps),
           "1 or more");
  }
  if (!(options.bucket_cap_mb > 0)) {
    refuse("bucket_cap_mb=" + std::to_string(options.bucket_cap_mb), "above 0");
  }
  for (const TrackerChoice& choice : options.log_with) {
    if (const auto* name = std::get_if<std::string>(&choice)) {
      check_trackers("accelerator::Accelerator", *name, "log_with");
      if (options.project_dir.empty() && options.logging_dir.empty()) {
        refuse("log_with=" + *name + " without a folder", "a project_dir or a logging_dir");
      }
    } else if (!std::get<1>(choice)) {
      refuse("log_with=null", "a tracker, or the name of one");
    }
  }
  return options;
}

/// Ranks of other launchers log their launcher; hasten launch has warned already.
void announce_world(const World& world) {
  const bool launched_by_us = launcher_store(world).has_value();
  if (world.local_rank == 0 && !launched_by_us && world.source != "alone") {
    log_info(describe(world)); // only rank 0 logs
    const std::string warning = oversubscription(world.local_world_size, threads_per_rank(world));
    if (!warning.empty()) {
      log_warning(warning);
    }
  }
}

static World context_world(const std::shared_ptr<Communicator>& communicator) {
  World world = world_from_environment();
  if (communicator) {
    world.rank = communicator->rank();
    world.world_size = communicator->world_size();
  }
  set_error_rank(world.rank, world.world_size);
  set_log_rank(world.rank, world.world_size);
  at::set_num_threads(threads_per_rank(world));
  return world;
}

/// A group that is passed in has met the limits of its back end.
static at::Device context_device(const AcceleratorOptions& options, const World& world,
                                 bool owns_group) {
  DeviceChoice choice =
      choose_device(options.device, world, !owns_group || moves_host_memory(options.backend));
  if (world.local_rank == 0 && !choice.note.empty()) {
    log_info(choice.note);
  }
  if (!choice.device.is_cpu()) {
    c10::impl::VirtualGuardImpl(choice.device.type()).setDevice(choice.device);
  }
  if (options.tf32) {
    allow_tf32(choice.device);
  }
  if (options.full_determinism) {
    use_deterministic_algorithms(choice.device);
  }
  return choice.device;
}

static std::shared_ptr<Communicator> context_group(const AcceleratorOptions& options,
                                                   const World& world, const at::Device& device) {
  announce_world(world);
  CommunicatorOptions comm;
  comm.timeout = options.timeout;
  comm.heartbeat_timeout = options.heartbeat_timeout;
  comm.backend = options.backend;
  comm.check_shapes = debugs(options) ? ShapeCheck::always : ShapeCheck::first;
  comm.device = device;
  auto group = Communicator::create(world, comm);
  const std::string hosts = describe_hosts(*group);
  if (!hosts.empty() && world.rank == 0) {
    log_info("world of " + hosts);
    if (options.strategy == Strategy::fsdp && ranks_of_host(*group).size() > 1) {
      log_info(
          "strategy=fsdp sends parameters between hosts; strategy=hsdp keeps them inside each host, "
          "and sends gradients only");
    }
  }
  return group;
}

RunContext::RunContext(AcceleratorOptions options, std::shared_ptr<Communicator> communicator)
    : options_(checked_options(options)),
      world_(context_world(communicator)),
      owns_group_(!communicator),
      device_(context_device(options_, world_, owns_group_)),
      communicator_(communicator ? std::move(communicator)
                                 : context_group(options_, world_, device_)) {
  count_ranks_of_host();
  if (debugs(options_)) {
    order_check_ = std::make_shared<OrderCheck>(communicator_);
    communicator_ = order_check_;
  }
}

/// A launcher that says nothing of the host lets each rank believe that it is alone there.
void RunContext::count_ranks_of_host() {
  const std::vector<int> here = ranks_of_host(*communicator_);
  if (!owns_group_ || std::cmp_less_equal(here.size(), world_.local_world_size)) {
    return;
  }
  world_.local_world_size = static_cast<int>(here.size());
  world_.local_rank = static_cast<int>(std::ranges::find(here, world_.rank) - here.begin());
  at::set_num_threads(threads_per_rank(world_));
  const std::string warning = oversubscription(world_.local_world_size, at::get_num_threads());
  if (world_.local_rank == 0 && !warning.empty()) {
    log_warning(warning);
  }
}

std::optional<uint64_t> RunContext::order_seed() const {
  return !options_.seed && world_.world_size > 1 ? 0 : options_.seed;
}

void RunContext::fail_peers(const std::string& why, ErrorKind kind) const {
  if (!alone()) {
    communicator_->abort(why, kind);
  }
}

void RunContext::fail_peers(const std::exception& error) const {
  if (!alone()) {
    communicator_->abort(error);
  }
}

void RunContext::close() const {
  if (owns_group_) {
    communicator_->close();
  }
}

bool RunContext::shrink() {
  const auto left = communicator_->shrink();
  if (!left) {
    return false;
  }
  std::vector<int> launch_ranks;
  std::string names;
  for (const int rank : left->ranks) {
    launch_ranks.push_back(launch_ranks_.empty() ? rank : launch_ranks_[static_cast<size_t>(rank)]);
    names += (names.empty() ? "" : ", ") + std::to_string(launch_ranks.back());
  }
  launch_ranks_ = std::move(launch_ranks);
  world_.rank = communicator_->rank();
  world_.world_size = communicator_->world_size();
  if (world_.rank == 0) {
    log_warning("local sgd: " + left->cause + "; continuing with " +
                (left->ranks.size() == 1 ? "rank " : "ranks ") + names);
  }
  return true;
}

} // namespace hasten::detail
