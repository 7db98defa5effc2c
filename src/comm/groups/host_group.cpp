#include "host_group.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "back_ends.h"
#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "hasten/base/recorded_error.h"
#include "hasten/base/store_server.h"
#include "hasten/base/text.h"
#include "hasten/comm/few_sizes.h"
#include "hasten/core/memory.h"
#include "host_rails.h"
#include "meet/thread_scopes.h"
#include "shm/transfer_queue.h"

namespace hasten::detail {

/// The name of what HostRails does. Not to be asked for.
constexpr const char* kHierarchical = "shm+gloo";

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

std::map<std::string, std::string> transport_options(const CommunicatorOptions& options) {
  constexpr const char* kChecks[] = {"never", "first", "always"};
  const auto check = static_cast<size_t>(with_environment(options).check_shapes);
  return {{"HASTEN_COMM_BACKEND or backend", wanted_backend(options.backend)},
          {"HASTEN_COMM_CHECK or check_shapes", kChecks[check]},
          {"sum_in_fp32", options.sum_in_fp32 ? "true" : "false"},
          {"name of the group", options.name}};
}

HostGroup::HostGroup(std::shared_ptr<WorldLink> link, const CommunicatorOptions& options,
                     std::vector<int> members)
    : core_(std::make_shared<GroupCore>(std::move(link), options, std::move(members))),
      wanted_(wanted_backend(options.backend)) {
  try {
    HostGroup::connect();
  } catch (const std::exception& error) {
    if (core_->link->open_groups() == 1) { // the others learn why from no other group
      core_->abort(message_of(error), error_kind(error));
    }
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
  const Hosts hosts = core_->link->by_host(core_->members);
  const auto queues = wanted_ == "gloo" ? std::vector<Queue>() : connect_shared(hosts);
  const std::string& name = core_->options.backend;
  if (name == "auto" || name == "gloo" || name == "shm" || name == kHierarchical) { // or a device's
    core_->options.backend = queues.empty() ? "gloo" : queues.size() == 1 ? "shm" : kHierarchical;
  }
  shared_.reset();
  rails_.reset();
  if (queues.size() > 1) {
    connect_rails(hosts, queues);
  } else if (!queues.empty()) {
    // With the group ends what runs there, though handles keep the memory.
    core_->keep({queues[0].get(), [made = queues[0]](void*) { made->stop(); }});
    shared_ = queues[0];
  } else {
    const auto gloo = std::make_shared<Backend>(connect_gloo("group/", rank(), world_size()));
    core_->keep(gloo);
    gloo_ = gloo;
  }
}

std::vector<HostGroup::Queue> HostGroup::connect_shared(const Hosts& hosts) {
  const std::string operation = operation_label("create", core_->options.name);
  const auto sizes = mapped(hosts, [](const auto& ranks) { return ranks.size(); });
  const bool equal = std::ranges::count(sizes, sizes[0]) == std::ssize(sizes);
  const bool alone = equal && sizes[0] == 1; // on each host
  const auto name_of = [this](int rank) {
    return core_->link->launch_rank(core_->members[static_cast<size_t>(rank)]);
  };
  std::string why = core_->link->apart(core_->members);
  if (why.empty() || (wanted_ != "shm" && equal && !alone)) {
    const auto [host, index] = place_in(hosts, rank());
    const std::vector<int>& here = hosts[static_cast<size_t>(host)];
    try {
      return share_memory(
          index, mapped(here, name_of),
          [&](const nlohmann::json& own) {
            const auto all = core_->exchange(operation, core_->enter(operation), own);
            for (int rank = 0; rank < world_size(); ++rank) { // of any host
              const nlohmann::json& reason = all[static_cast<size_t>(rank)];
              if (reason.is_string()) {
                throw Error("comm::share_memory", "rank " + std::to_string(name_of(rank)) + ": " +
                                                      reason.get<std::string>());
              }
            }
            return mapped(here, [&](int rank) { return all[static_cast<size_t>(rank)]; });
          },
          hosts.size() > 1 ? 2 : 1);
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
  const bool expected = alone && core_->link->on_hosts(core_->members);
  if (!expected && rank() == 0 && core_->link->first_to_say_why()) {
    log_info("tensors go through gloo, because " +
             (equal ? "the ranks cannot share memory: " + why
                    : "the hosts have different numbers of ranks: " +
                          joined(mapped(sizes, [](size_t size) { return std::to_string(size); }))));
  }
  return {};
}

void HostGroup::connect_rails(const Hosts& hosts, const std::vector<Queue>& queues) {
  const auto [host, index] = place_in(hosts, rank());
  const auto rails = std::make_shared<HostRails>(
      hosts, rank(), queues[0], queues[1],
      connect_gloo("rail " + std::to_string(index) + "/", host, static_cast<int>(hosts.size())));
  core_->keep({rails.get(), [rails](void*) { rails->stop(); }});
  rails_ = rails;
  // The first ranks of the hosts meet in the store.
  core_->exchange_by_hosts = [this, hosts, queue = queues[0]](const std::string& operation,
                                                              uint64_t sequence,
                                                              const nlohmann::json& value) {
    const std::vector<nlohmann::json> here = share_values(queue, operation, sequence, value);
    const std::vector<int> first = mapped(hosts, [](const auto& ranks) { return ranks[0]; });
    nlohmann::json all; // [host][index]
    if (std::ranges::count(first, rank()) > 0) {
      all = core_->exchange_in_store(operation, sequence, here, first);
    }
    all = share_values(queue, operation, sequence, all)[0];
    std::vector<nlohmann::json> by_rank(core_->members.size());
    for (size_t i = 0; i < hosts.size(); ++i) {
      for (size_t j = 0; j < hosts[i].size(); ++j) {
        by_rank[static_cast<size_t>(hosts[i][j])] = std::move(all[i][j]);
      }
    }
    return by_rank;
  };
}

HostGroup::Backend HostGroup::connect_gloo(const std::string& prefix, int rank, int size) {
  raise_descriptor_limit(4 * static_cast<size_t>(size) + 256); // connections to each rank
  const auto gloo_options = c10d::ProcessGroupGloo::Options::create(core_->options.timeout);
  gloo_options->devices.push_back(core_->link->device(core_->options.interface_address));
  Backend made = make_connections(
      core_->options.name, prefix, [gloo_options, rank, size](const StorePtr& store) -> Backend {
        const BatchThreads batch;
        return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, gloo_options);
      });
  if (const auto uid = core_->link->stranger()) {
    core_->fail(operation_label("create", core_->options.name),
                "a process of another user (uid " + std::to_string(*uid) +
                    ") is connected to rank " + std::to_string(core_->link->launch_rank()),
                "find out what that user runs on this host, then start again");
  }
  return made;
}

void HostGroup::close() noexcept {
  if (const auto queue = shared_.lock()) {
    queue->progress_in_thread(); // operations for which nobody waits
  }
  if (const auto rails = rails_.lock()) {
    rails->progress_in_thread();
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

/// Starts a transfer that completes `state`, and that the threads that wait for it move on.
static void start_transfer(const std::shared_ptr<GroupCore::Started>& state,
                           const std::shared_ptr<TransferQueue>& queue,
                           TransferArguments arguments) {
  try {
    const auto item = queue->start(std::move(arguments));
    state->drive = [queue, item](std::chrono::milliseconds limit) { queue->drive(*item, limit); };
    item->on_end([state](const std::exception_ptr& error) { complete(*state, error); });
  } catch (...) {
    state->complete(current_failure());
  }
}

Work HostGroup::submit(std::string operation, const std::string& tensors, Collective what) {
  if (const auto queue = shared_.lock()) { // in which the ranks compare every operation
    const uint64_t sequence = core_->enter(operation, tensors);
    std::string text = operation + '\n' + tensors;
    auto state = std::make_shared<GroupCore::Started>(core_, std::move(operation), sequence);
    start_transfer(state, queue, {std::move(what), std::move(text)});
    return Work(std::move(state));
  }
  if (const auto rails = rails_.lock()) {
    const uint64_t sequence = core_->enter_equal(operation, tensors);
    const std::string text = operation + '\n' + tensors;
    auto state = std::make_shared<GroupCore::Started>(core_, std::move(operation), sequence);
    rails->start(what, text, state);
    return Work(std::move(state));
  }
  BackendCall call(what, rank(), world_size());
  const uint64_t sequence = core_->enter_equal(operation, tensors);
  auto state = std::make_shared<GroupCore::Started>(core_, std::move(operation), sequence);
  try {
    // c10d's own timed wait throws whenever its time ends.
    call.start(**gloo_.lock())->getFuture()->addCallback([state](c10::ivalue::Future& f) {
      complete(*state, f.hasError() ? f.exception_ptr() : nullptr);
    });
  } catch (...) {
    state->complete(current_failure());
  }
  Work work(std::move(state));
  return call.finish ? joined_work({std::move(work)}, std::move(call.finish)) : work;
}

/// The back ends move host memory only, so the tensors of another device go through copies there.
Work HostGroup::start_staged(const Collective& what) {
  using Kind = Collective::Kind;
  const bool reads = what.kind <= Kind::broadcast && gives(what, rank()); // the output
  const bool writes = gets(what, rank());
  Collective staged = what;
  staged.output = reads    ? what.output.detach().cpu()
                  : writes ? at::empty_like(what.output, at::kCPU)
                           : at::Tensor();
  staged.input =
      what.input.defined() && gives(what, rank()) ? what.input.detach().cpu() : at::Tensor();
  const Work work = start(staged);
  return writes ? joined_work({work},
                              [to = what.output.detach(), from = staged.output] { to.copy_(from); })
                : work;
}

Work HostGroup::start(const Collective& what) {
  using Kind = Collective::Kind;
  check_collective(what, rank(), world_size());
  if (what.kind == Kind::reduce_scatter && has_gloo_alone()) {
    return reduce_scatter_by_all_to_all(what);
  }
  if (!what.shared().is_cpu()) {
    return start_staged(what);
  }
  Collective own = what;
  if (what.kind == Kind::reduce_scatter) {
    own.op = ReduceOp::SUM; // a Communicator has no other
  } else if (what.kind == Kind::reduce && what.root != rank() && !has_gloo_alone()) {
    own.output = what.output.detach().clone(); // peers read it later
  }
  return submit(operation_label(what.kind_name(), what.name), collective_text(what),
                std::move(own));
}

at::Tensor HostGroup::allocate_tensor(int64_t numel, const at::TensorOptions& options) {
  return !has_gloo_alone() ? shared_zeros(numel, options) : at::zeros({numel}, options);
}

void HostGroup::barrier(std::string_view name) {
  const Collective token{Collective::Kind::all_reduce, name, at::ones({1}, at::kInt)};
  submit(operation_label("barrier", name), "", token).wait();
}

std::vector<nlohmann::json> HostGroup::exchange(std::string_view operation, std::string_view name,
                                                const nlohmann::json& value) {
  const std::string label = operation_label(operation, name);
  const uint64_t sequence = core_->enter(label);
  const Queue queue = shared_.lock();
  return queue ? share_values(queue, label, sequence, value)
               : core_->exchange(label, sequence, value);
}

std::vector<nlohmann::json> HostGroup::share_values(const Queue& queue,
                                                    const std::string& operation, uint64_t sequence,
                                                    const nlohmann::json& value) {
  const WaitTime time;
  // CBOR, since JSON text has no NaN and no infinity.
  const auto texts =
      std::make_shared<std::vector<std::string>>(static_cast<size_t>(queue->world_size()));
  nlohmann::json::to_cbor(value, (*texts)[static_cast<size_t>(queue->rank())]);
  auto state = std::make_shared<GroupCore::Started>(core_, operation, sequence);
  start_transfer(state, queue, {.text = core_->entered(), .values = texts});
  state->wait();
  return mapped(*texts, [](const std::string& text) { return nlohmann::json::from_cbor(text); });
}

// The numbers of rows go through the host.
at::Tensor HostGroup::all_gather_rows(const at::Tensor& rows, std::string_view name) {
  check_rows(rows);
  // The number of rows and a hash of their form in one small tensor, without the store.
  const std::string row_text = "rows of " + tensor_text(rows, 1);
  const auto form = static_cast<int64_t>(std::hash<std::string>{}(row_text));
  const at::Tensor own = at::tensor({rows.size(0), form}, at::kLong);
  const at::Tensor all = at::empty({world_size(), 2}, at::kLong);
  all_gather_async(all, own, std::string(name) + ", rows").wait();
  if (!all.select(1, 1).eq(form).all().item<bool>()) {
    const std::string operation = operation_label("all_gather_rows", name);
    core_->check_equal(operation, core_->enter(operation), row_text);
  }
  const at::Tensor counts = all.select(1, 0); // [rank]
  const int64_t longest = few_sizes(counts.max().item<int64_t>());
  at::Tensor padded = rows.detach();
  if (rows.size(0) < longest) {
    std::vector<int64_t> sizes = rows.sizes().vec();
    sizes[0] = longest;
    padded = at::zeros(sizes, rows.options());
    padded.narrow(0, 0, rows.size(0)).copy_(rows.detach());
  }
  std::vector<int64_t> sizes = padded.sizes().vec();
  sizes.insert(sizes.begin(), world_size());
  const at::Tensor gathered = at::empty(sizes, padded.options());
  all_gather_async(gathered, padded, name).wait();
  std::vector<at::Tensor> parts;
  for (int i = 0; i < world_size(); ++i) {
    parts.push_back(gathered[i].narrow(0, 0, counts[i].item<int64_t>()));
  }
  return at::cat(parts);
}

std::optional<Survivors> HostGroup::shrink() {
  std::shared_ptr<WorldLink> link = core_->link;
  if (world_size() < link->world().world_size) {
    throw InputError(
        "comm::shrink",
        "name=" + core_->options.name + ", a group of " + std::to_string(world_size()) +
            " of the world's " + std::to_string(link->world().world_size) + " ranks",
        "a group of all ranks", "shrink the world's own group, and make new groups of it");
  }
  if (!link->liveness().failed()) {
    return std::nullopt;
  }
  Survivors left;
  left.cause = link->liveness().cause().text;
  left.ranks = core_->members; // all
  for (bool first = true;; first = false) {
    std::vector<int> members;
    auto next = link->shrink(members);
    if (!next) {
      if (!first) { // the connections of the smaller world could not be made
        core_->check(operation_label("create", core_->options.name));
      }
      return std::nullopt;
    }
    for (int& member : members) {
      member = left.ranks[static_cast<size_t>(member)];
    }
    left.ranks = std::move(members);
    core_->close(false);
    core_ = std::make_shared<GroupCore>(next, core_->options, std::vector<int>{});
    try {
      connect();
      return left;
    } catch (const CommunicationError&) {
      if (!next->liveness().failed()) {
        throw;
      }
      left.cause += "; " + next->liveness().cause().text;
      link = std::move(next);
    }
  }
}

std::shared_ptr<Communicator> make_host_group(const BackendContext& context) {
  return std::make_shared<HostGroup>(context.link, context.options);
}

} // namespace hasten::detail
