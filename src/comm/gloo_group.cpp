#include "gloo_group.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "hasten/base/process.h"
#include "hasten/core/memory.h"
#include "tensor_checks.h"
#include "thread_scopes.h"

namespace hasten::detail {

GlooGroup::GlooGroup(std::shared_ptr<WorldLink> link, const CommunicatorOptions& options,
                     std::vector<int> members)
    : core_(std::make_shared<GroupCore>(std::move(link), options, std::move(members))) {
  try {
    connect();
  } catch (...) {
    core_->close(false);
    throw;
  }
}

GlooGroup::~GlooGroup() { core_->close(false); }

void GlooGroup::connect() {
  const std::string operation = operation_label("create", core_->options.name);
  const uint64_t sequence = core_->enter(operation);
  raise_descriptor_limit(4 * static_cast<size_t>(world_size()) + 256); // connections to each rank
  const auto gloo_options = c10d::ProcessGroupGloo::Options::create(core_->options.timeout);
  gloo_options->devices.push_back(core_->link->device(core_->options.interface_address));
  using Gloo = c10::intrusive_ptr<c10d::ProcessGroupGloo>;
  std::future<Gloo> future = core_->link->store().post<Gloo>(
      [gloo_options, rank = rank(), size = world_size(), prefix = "group/" + core_->key](
          c10d::Store& store, const std::atomic<bool>&) {
        const BatchThreads batch;
        return c10::make_intrusive<c10d::ProcessGroupGloo>(
            c10::make_intrusive<c10d::PrefixStore>(prefix, StorePtr::reclaim_copy(&store)), rank,
            size, gloo_options);
      });
  const bool connected = await_future(future, CommClock::now() + core_->options.timeout,
                                      [&] { core_->poll(operation); });
  if (!connected) {
    core_->diagnose(operation, sequence, {.kind = ErrorKind::timed_out});
  }
  try {
    GroupCore::keep(core_, future.get());
  } catch (const std::exception& error) {
    core_->diagnose(operation, sequence, {error.what(), error_kind(error)});
  }
  if (const auto uid = core_->link->stranger()) {
    core_->fail(operation,
                "a process of another user (uid " + std::to_string(*uid) +
                    ") is connected to rank " + std::to_string(core_->link->launch_rank()),
                "find out what that user runs on this host, then start again");
  }
}

std::shared_ptr<Communicator> GlooGroup::duplicate(const CommunicatorOptions& options) {
  core_->check(operation_label("create", options.name));
  return std::make_shared<GlooGroup>(core_->link, options, core_->members);
}

std::shared_ptr<Communicator> GlooGroup::new_group(const std::vector<int>& ranks,
                                                   const CommunicatorOptions& options) {
  check_members(ranks, rank(), world_size());
  core_->check(operation_label("create", options.name));
  if (ranks.size() == 1) {
    return make_local_group(options);
  }
  std::vector<int> members;
  for (const int rank : ranks) {
    members.push_back(core_->members[static_cast<size_t>(rank)]);
  }
  return std::make_shared<GlooGroup>(core_->link, options, std::move(members));
}

std::shared_ptr<Communicator> make_gloo_group(const BackendContext& context) {
  return std::make_shared<GlooGroup>(context.link, context.options);
}

} // namespace hasten::detail
