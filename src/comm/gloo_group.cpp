#include "gloo_group.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "hasten/base/process.h"
#include "hasten/core/memory.h"
#include "thread_scopes.h"

namespace hasten::detail {

GlooGroup::GlooGroup(std::shared_ptr<WorldLink> link, const CommunicatorOptions& options,
                     std::vector<int> members)
    : core_(std::make_shared<GroupCore>(std::move(link), options, std::move(members))) {
  try {
    GlooGroup::connect();
  } catch (...) {
    core_->close(false);
    throw;
  }
}

GlooGroup::~GlooGroup() { core_->close(false); }

GlooGroup::Backend GlooGroup::make_connections(const std::string& name, const std::string& prefix,
                                               std::function<Backend(StorePtr)> make) {
  const std::string operation = operation_label("create", name);
  const uint64_t sequence = core_->enter(operation);
  std::future<Backend> future =
      core_->link->store().post<Backend>([make = std::move(make), keys = prefix + core_->key](
                                             c10d::Store& store, const std::atomic<bool>&) {
        return make(c10::make_intrusive<c10d::PrefixStore>(keys, StorePtr::reclaim_copy(&store)));
      });
  if (!await_future(future, CommClock::now() + core_->options.timeout,
                    [&] { core_->poll(operation); })) {
    core_->diagnose(operation, sequence, {.kind = ErrorKind::timed_out});
  }
  try {
    return future.get();
  } catch (const InputError&) {
    throw;
  } catch (const std::exception& error) {
    const Advice advice = connection_advice(error.what());
    if (!advice.what.empty()) {
      core_->fail(operation, advice.what, advice.fix);
    }
    core_->diagnose(operation, sequence, {error.what(), error_kind(error)});
  }
}

void GlooGroup::connect() {
  raise_descriptor_limit(4 * static_cast<size_t>(world_size()) + 256); // connections to each rank
  const auto gloo_options = c10d::ProcessGroupGloo::Options::create(core_->options.timeout);
  gloo_options->devices.push_back(core_->link->device(core_->options.interface_address));
  const auto made = std::make_shared<Backend>(make_connections(
      core_->options.name, "group/",
      [gloo_options, rank = rank(), size = world_size()](StorePtr store) -> Backend {
        const BatchThreads batch;
        return c10::make_intrusive<c10d::ProcessGroupGloo>(std::move(store), rank, size,
                                                           gloo_options);
      }));
  core_->keep(made);
  gloo_ = made;
  if (const auto uid = core_->link->stranger()) {
    core_->fail(operation_label("create", core_->options.name),
                "a process of another user (uid " + std::to_string(*uid) +
                    ") is connected to rank " + std::to_string(core_->link->launch_rank()),
                "find out what that user runs on this host, then start again");
  }
}

std::shared_ptr<Communicator> GlooGroup::duplicate(const CommunicatorOptions& options) {
  core_->check(operation_label("create", options.name));
  return like_this(options, core_->members);
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
  return like_this(options, std::move(members));
}

std::shared_ptr<Communicator> GlooGroup::like_this(const CommunicatorOptions& options,
                                                   std::vector<int> members) {
  return std::make_shared<GlooGroup>(core_->link, options, std::move(members));
}

std::shared_ptr<Communicator> make_gloo_group(const BackendContext& context) {
  return std::make_shared<GlooGroup>(context.link, context.options);
}

} // namespace hasten::detail
