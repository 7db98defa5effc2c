#include "world_link.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <nlohmann/json.hpp>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "hasten/base/recorded_error.h"
#include "hasten/base/text.h"
#include "hellos.h"
#include "network_interface.h"
#include "store_file.h"
#include "thread_scopes.h"

namespace hasten::detail {

using std::chrono::milliseconds;

StoreConnections::StoreConnections(const WorldRanks& ranks, CommClock::time_point deadline)
    : thread(
          StoreThread::start([world = ranks.first_world, address = ranks.store, keys = ranks.keys(),
                              deadline, watch = watch](const std::atomic<bool>& cancelled) {
            const auto open = [&] { return open_store(world, address, keys, deadline, cancelled); };
            StorePtr store = open();
            // Opened before this rank says hello: if connecting is slow, the start is slow, and no
            // peer takes a late connection for a lost store.
            *watch = open();
            return store;
          })) {}

WorldLink::WorldLink(WorldRanks ranks, const StoreConnections& store)
    : ranks_(std::move(ranks)),
      store_(store.thread),
      liveness_(Liveness::start(LivenessConfig{ranks_.world, std::move(*store.watch), ranks_.hellos,
                                               ranks_.heartbeat_timeout,
                                               [store = std::weak_ptr<StoreThread>(store_)] {
                                                 if (const auto alive = store.lock()) {
                                                   alive->cancel();
                                                 }
                                               }})) {}

/// The ranks' hellos.
static std::vector<Hello> shake_hands(const World& world, const Hello& own, milliseconds timeout,
                                      StoreThread& thread, CommClock::time_point deadline) {
  auto progress = std::make_shared<ArrivedHellos>();
  progress->hellos.resize(static_cast<size_t>(world.world_size));
  std::future<std::vector<Hello>> future = thread.post<std::vector<Hello>>(
      [own, progress, world, deadline](c10d::Store& store, const std::atomic<bool>& cancelled) {
        return exchange_hellos(store, cancelled, own, world, *progress, deadline);
      });
  // One second more, so that an error of the store comes first.
  const bool met = await_future(future, deadline + milliseconds(1000), [&thread] {
    if (interrupt_signal() != 0) {
      thread.cancel();
      throw_if_interrupted();
    }
  });
  try {
    if (met) {
      return future.get();
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) { // the store is gone
    if (CommClock::now() < deadline) {
      const std::string server = launcher_serves(world) ? "the launcher" : "rank 0";
      throw CommunicationError("comm::create",
                               "the store of " + server + " is gone, but not all of " +
                                   std::to_string(world.world_size) + " ranks have met",
                               {}, "read the messages of " + server);
    }
  }
  thread.cancel();
  std::vector<std::string> absent;
  {
    const std::lock_guard<std::mutex> lock(progress->mutex);
    for (size_t i = 0; i < progress->hellos.size(); ++i) {
      if (!progress->hellos[i]) {
        absent.push_back(std::to_string(i));
      } else if (static_cast<int>(i) < own.rank &&
                 progress->hellos[i]->process_host == own.process_host) {
        set_said_by_peer(true);
      }
    }
  }
  throw CommunicationError(
      "comm::create",
      "not all of " + std::to_string(world.world_size) + " ranks have arrived within " +
          std::to_string(timeout.count()) + " ms: missing " +
          (absent.empty() ? "rank 0's answer" : joined(absent)),
      "every rank to start within the timeout", "read the messages of the missing ranks");
}

std::shared_ptr<WorldLink> WorldLink::join(const World& world, const CommunicatorOptions& options,
                                           std::map<std::string, std::string> transport) {
  static std::weak_ptr<WorldLink> latest; // threads do not join at the same time
  const auto open = latest.lock();
  if (open && open->open_groups_ > 0 && !world.agent_store && world.store_file.empty() &&
      world.rank == open->world().rank && world.master_port == open->world().master_port) {
    throw InputError("comm::create",
                     "this process is already in the world of " + std::to_string(world.world_size) +
                         " ranks at " + world.master_addr + ":" + std::to_string(world.master_port),
                     "one open world for each RANK and MASTER_PORT",
                     "use that world: Accelerator b({}, a.communicator()), or "
                     "communicator->duplicate(); or close it first");
  }
  static std::atomic<int> worlds{0};
  const int generation = worlds++;
  if (world.rank == 0 && !world_on_one_host(world) && !store_key_from_environment()) {
    log_warning(
        "this world has no secret: anyone who can reach its network can join it. "
        "Fix: set HASTEN_SECRET_FILE on all hosts.");
  }
  const std::shared_ptr<StoreServer> server = serve_store(world);
  const StoreFile file( // exists until all ranks have found the store
      world, options.interface_address, generation, CommClock::now() + options.timeout,
      server.get());
  const CommClock::time_point deadline = CommClock::now() + options.timeout;
  WorldRanks ranks{.world = file.world(),
                   .first_world = file.world(),
                   .generation = generation,
                   .timeout = options.timeout,
                   .heartbeat_timeout = options.heartbeat_timeout,
                   .store = file.store(),
                   .server = server};
  const StoreConnections store(ranks, deadline);
  const Hello own = own_hello(ranks.world, c10::DeviceTypeName(options.device.type(), true),
                              options.backend, std::move(transport));
  ranks.hellos = shake_hands(ranks.world, own, options.timeout, *store.thread, deadline);
  auto link = std::make_shared<WorldLink>(std::move(ranks), store);
  latest = link;
  return link;
}

bool WorldLink::on_hosts(const std::vector<int>& members) const {
  const auto boot = [&](int member) {
    const std::string& host = ranks_.hellos[static_cast<size_t>(member)].process_host;
    return host.substr(0, host.find(' '));
  };
  return std::ranges::any_of(members, [&](int member) { return boot(member) != boot(members[0]); });
}

std::vector<int> WorldLink::beside(const std::vector<int>& members) const {
  const Hello& own = ranks_.hellos[static_cast<size_t>(world().rank)];
  std::vector<int> here;
  for (size_t i = 0; i < members.size(); ++i) {
    const Hello& other = ranks_.hellos[static_cast<size_t>(members[i])];
    if (other.process_host == own.process_host && other.network_host == own.network_host) {
      here.push_back(static_cast<int>(i));
    }
  }
  return here;
}

Hosts WorldLink::by_host(const std::vector<int>& members) const {
  return ranks_by_host(mapped(members, [this](int member) {
    return ranks_.hellos[static_cast<size_t>(member)].process_host;
  }));
}

std::string WorldLink::apart(const std::vector<int>& members) const {
  const auto host = [&](int member) {
    return ranks_.hellos[static_cast<size_t>(member)].process_host;
  };
  for (const int member : members) {
    if (host(member) != host(members[0])) {
      return "ranks " + std::to_string(launch_rank(members[0])) + " and " +
             std::to_string(launch_rank(member)) +
             (on_hosts(members) ? " are on different hosts" : " are in different containers");
    }
  }
  return "";
}

std::shared_ptr<gloo::transport::Device> WorldLink::device(const std::string& address) {
  const bool one_host = std::ranges::all_of(ranks_.hellos, [this](const Hello& hello) {
    return hello.network_host == ranks_.hellos[0].network_host;
  });
  const std::string host =
      one_host && address.empty()
          ? "127.0.0.1"
          : reachable_address(address, store_address_of(ranks_.hellos, world().rank));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!device_ || device_address_ != host) {
    const NoBrokenPipeSignal none; // for the device's thread
    const BatchThreads batch;
    const std::set<int> before = listening_ports();
    device_ = c10d::ProcessGroupGloo::createDeviceForHostname(host);
    gloo_ports_ = listening_ports();
    std::erase_if(gloo_ports_, [&](int port) { return before.contains(port); });
    device_address_ = host;
  }
  return device_;
}

std::optional<unsigned> WorldLink::stranger() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stranger_at(gloo_ports_);
}

std::string WorldLink::add_group(const std::string& name, const std::vector<int>& members) {
  const auto list = mapped(members, [](int member) { return std::to_string(member); });
  const std::string full =
      std::ssize(members) < world().world_size ? name + " of " + joined(list, ",") : name;
  const std::lock_guard<std::mutex> lock(mutex_);
  ++open_groups_;
  return std::to_string(++names_[full]) + " " + full;
}

int WorldLink::open_groups() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return open_groups_;
}

uint64_t WorldLink::count_operation(const std::vector<int>& members) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ++operations_[members];
}

/// What owns connections ends in a thread of its own: a Gloo group's destructor waits for running
/// operations, which may be stuck until their timeout, and a device's may be slow to end its.
static std::future<void> end_connections(std::vector<ClosedGroup> groups) {
  auto ended = std::make_shared<std::promise<void>>();
  std::future<void> future = ended->get_future();
  std::thread([ended, groups = std::move(groups)]() mutable {
    const NoBrokenPipeSignal none;
    groups.clear();
    ended->set_value();
  }).detach();
  return future;
}

/// Ends the groups that all their ranks have closed. Those that a slower rank closes later end here
/// the next time.
void WorldLink::end_closed_groups(const std::string& latest) {
  store_->post<bool>([latest, groups = closed_groups_, watch = std::weak_ptr(liveness_)](
                         c10d::Store& store, const std::atomic<bool>&) {
    const auto closings = [&](const std::string& group, int more) {
      return store.add("closed/" + group, more);
    };
    closings(latest, 1);
    std::set<std::string> over;
    for (const auto& [name, ranks] : groups->withLock([](const auto& all) {
           return mapped(all, [](const ClosedGroup& closed) {
             return std::pair(closed.progress->group, closed.world_size);
           });
         })) {
      if (closings(name, 0) == ranks) {
        over.insert(name);
      }
    }
    std::vector<ClosedGroup> ended;
    groups->withLock([&](auto& all) {
      const auto is_over = [&](const auto& closed) {
        return over.contains(closed.progress->group);
      };
      std::ranges::copy_if(all, std::back_inserter(ended), is_over);
      std::erase_if(all, is_over);
    });
    if (const auto liveness = watch.lock()) {
      for (const ClosedGroup& closed : ended) {
        liveness->remove_group(closed.progress);
      }
    }
    end_connections(std::move(ended));
    return true;
  });
}

void WorldLink::remove_group(ClosedGroup closed, bool orderly) {
  const std::string name = closed.progress->group;
  closed_groups_->withLock([&](auto& all) { all.push_back(std::move(closed)); });
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--open_groups_ > 0) {
      end_closed_groups(name);
      return;
    }
    device_.reset();
  }
  if (orderly && !liveness_->failed() && meet()) {
    disconnect(milliseconds(2000));
    part();
    return;
  }
  disconnect(milliseconds(300));
  if (orderly && interrupt_signal() != 0) {
    liveness_->fail({launch_rank(),
                     "",
                     "rank " + std::to_string(launch_rank()) + " was stopped by signal " +
                         std::to_string(interrupt_signal()),
                     "",
                     {world().rank}},
                    milliseconds(300));
  }
  if (serves_store(world()) && liveness_->failed() && !shrunk_) {
    liveness_->wait_until_known();
  }
  liveness_->stop(milliseconds(300));
  store_->stop(milliseconds(300));
  ranks_.server.reset();
}

/// The ranks meet before they disconnect. Otherwise data that peers have not read would be lost,
/// and with rank 0 the store.
bool WorldLink::meet() {
  auto enough = std::make_shared<std::atomic<bool>>(false);
  std::future<bool> future = store_->post<bool>(
      [enough, ranks = world().world_size](c10d::Store& store, const std::atomic<bool>& cancelled) {
        store.add("closing", 1);
        StorePause pause;
        while (!cancelled && !*enough && store.add("closing", 0) < ranks) {
          pause();
        }
        return true;
      });
  const milliseconds limit = world().rank == 0 ? ranks_.timeout : ranks_.heartbeat_timeout;
  const CommClock::time_point until = CommClock::now() + limit;
  while (future.wait_for(milliseconds(20)) != std::future_status::ready &&
         CommClock::now() <= until) {
    liveness_->poll_store();
    if (liveness_->failed() || interrupt_signal() != 0) {
      store_->cancel();
      return false;
    }
  }
  *enough = true; // stop waiting for late ranks
  return !liveness_->failed(); // a failure cancels the call
}

void WorldLink::disconnect(milliseconds limit) {
  end_connections(closed_groups_->withLock([](auto& groups) {
    return std::exchange(groups, {});
  })).wait_for(limit);
}

/// All ranks have agreed to leave.
void WorldLink::part() {
  liveness_->leave(milliseconds(1000));
  std::future<bool> gone = store_->post<bool>(
      [others = world().world_size - 1, last = world().rank == 0, ends = !launcher_serves(world())](
          c10d::Store& store, const std::atomic<bool>& cancelled) {
        if (!last) {
          store.add("gone", 1);
        }
        // The others wait until the store has ended, because a later world at this port would
        // find it. check() throws then.
        StorePause pause;
        while (!cancelled &&
               (last ? store.add("gone", 0) < others : ends && store.check({"gone"}))) {
          pause();
        }
        return true;
      });
  gone.wait_for(milliseconds(2000));
  store_->stop(milliseconds(1000));
  ranks_.server.reset();
}

} // namespace hasten::detail
