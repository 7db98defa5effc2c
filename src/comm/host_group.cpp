#include "host_group.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "hasten/base/store_server.h"
#include "hasten/base/text.h"
#include "hasten/core/memory.h"
#include "shared_backend.h"
#include "thread_scopes.h"

namespace hasten::detail {

std::string wanted_backend(const std::string& name) {
  if (name == "shm" || name == "gloo") {
    return name;
  }
  const auto chosen = environment_value("HASTEN_COMM_BACKEND");
  if (chosen && chosen != "gloo" && chosen != "shm") {
    throw InputError("comm::create", "HASTEN_COMM_BACKEND=" + *chosen, "gloo or shm");
  }
  return chosen.value_or("auto");
}

HostGroup::HostGroup(std::shared_ptr<WorldLink> link, const CommunicatorOptions& options,
                     std::vector<int> members)
    : core_(std::make_shared<GroupCore>(std::move(link), options, std::move(members))),
      wanted_(wanted_backend(options.backend)) {
  try {
    HostGroup::connect();
  } catch (...) {
    core_->close(false);
    throw;
  }
}

HostGroup::~HostGroup() { core_->close(false); }

HostGroup::Backend HostGroup::make_connections(const std::string& name, const std::string& prefix,
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

void HostGroup::connect() {
  Backend made = wanted_ == "gloo" ? nullptr : connect_shared();
  const std::string& name = core_->options.backend;
  if (name == "auto" || name == "gloo" || name == "shm") { // else that of a device
    core_->options.backend = made ? "shm" : "gloo";
  }
  const auto kept = std::make_shared<Backend>(made ? made : connect_gloo());
  core_->keep(kept);
  backend_ = kept;
}

HostGroup::Backend HostGroup::connect_shared() {
  const std::string operation = operation_label("create", core_->options.name);
  std::string why = core_->link->apart(core_->members);
  if (why.empty()) {
    const std::vector<int> names =
        mapped(core_->members, [this](int member) { return core_->link->launch_rank(member); });
    try {
      return c10::make_intrusive<SharedBackend>(
          rank(), world_size(), share_memory(rank(), names, [&](const nlohmann::json& own) {
            return core_->exchange(operation, core_->enter(operation), own);
          }));
    } catch (const CommunicationError&) {
      throw;
    } catch (const Error& error) { // the same on all ranks
      why = error.text();
    }
  }
  if (wanted_ == "shm") {
    throw InputError("comm::create", "backend=shm, but " + why,
                     "processes of one host that can share memory", "set backend=auto");
  }
  if (!core_->link->on_hosts(core_->members) && rank() == 0 && core_->link->first_to_say_why()) {
    log_info("tensors go through gloo, because the ranks cannot share memory: " + why);
  }
  return nullptr;
}

HostGroup::Backend HostGroup::connect_gloo() {
  raise_descriptor_limit(4 * static_cast<size_t>(world_size()) + 256); // connections to each rank
  const auto gloo_options = c10d::ProcessGroupGloo::Options::create(core_->options.timeout);
  gloo_options->devices.push_back(core_->link->device(core_->options.interface_address));
  Backend made = make_connections(
      core_->options.name, "group/",
      [gloo_options, rank = rank(), size = world_size()](StorePtr store) -> Backend {
        const BatchThreads batch;
        return c10::make_intrusive<c10d::ProcessGroupGloo>(std::move(store), rank, size,
                                                           gloo_options);
      });
  if (const auto uid = core_->link->stranger()) {
    core_->fail(operation_label("create", core_->options.name),
                "a process of another user (uid " + std::to_string(*uid) +
                    ") is connected to rank " + std::to_string(core_->link->launch_rank()),
                "find out what that user runs on this host, then start again");
  }
  return made;
}

c10::intrusive_ptr<SharedBackend> HostGroup::shared() const {
  const auto backend = backend_.lock();
  // c10::dynamic_intrusive_pointer_cast leaks what is of another class.
  auto* const found = backend ? dynamic_cast<SharedBackend*>(backend->get()) : nullptr;
  return c10::intrusive_ptr<SharedBackend>::reclaim_copy(found);
}

void HostGroup::close() noexcept {
  if (const auto backend = shared()) {
    backend->progress_in_thread(); // operations for which nobody waits
  }
  core_->close(true);
}

std::shared_ptr<Communicator> HostGroup::duplicate(const CommunicatorOptions& options) {
  core_->check(operation_label("create", options.name));
  return like_this(options, core_->members);
}

std::shared_ptr<Communicator> HostGroup::new_group(const std::vector<int>& ranks,
                                                   const CommunicatorOptions& options) {
  check_members(ranks, rank(), world_size());
  core_->check(operation_label("create", options.name));
  if (ranks.size() == 1) {
    return make_local_group(options);
  }
  return like_this(options, mapped(ranks, [this](int rank) {
                     return core_->members[static_cast<size_t>(rank)];
                   }));
}

std::shared_ptr<Communicator> HostGroup::like_this(const CommunicatorOptions& options,
                                                   std::vector<int> members) {
  CommunicatorOptions same = options;
  same.backend = wanted_;
  return std::make_shared<HostGroup>(core_->link, same, std::move(members));
}

std::shared_ptr<Communicator> make_host_group(const BackendContext& context) {
  return std::make_shared<HostGroup>(context.link, context.options);
}

} // namespace hasten::detail
