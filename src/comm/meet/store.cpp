#include "store.h"

#include <c10/util/Logging.h>
#include <c10/util/ScopeExit.h>
#include <netinet/in.h>
#include <resolv.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "network_interface.h"
#include "sealed_store.h"
#include "socket_store.h"
#include "thread_scopes.h"

namespace hasten::detail {

std::string peer_address(const FileDescriptor& fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  auto* const peer = reinterpret_cast<sockaddr*>(&address);
  return getpeername(fd.get(), peer, &size) == 0 ? socket_address_text(peer) : "";
}

static std::mutex quiet_mutex; // guards the variables below
static int quiet_users = 0;
static int level_before_quiet = 0;

QuietStore::QuietStore() {
  const std::lock_guard<std::mutex> lock(quiet_mutex);
  std::atomic_ref<int> level(FLAGS_caffe2_log_level);
  if (quiet_users++ == 0) {
    level_before_quiet = level;
    if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) {
      level = std::max(level_before_quiet, c10::GLOG_ERROR);
    }
  }
}

QuietStore::~QuietStore() {
  const std::lock_guard<std::mutex> lock(quiet_mutex);
  if (--quiet_users == 0) {
    std::atomic_ref<int>{FLAGS_caffe2_log_level}.store(level_before_quiet);
  }
}

void silence_torch() {
  const std::lock_guard<std::mutex> lock(quiet_mutex);
  if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) {
    level_before_quiet = c10::GLOG_FATAL;
    std::atomic_ref<int>{FLAGS_caffe2_log_level}.store(c10::GLOG_FATAL);
  }
}

bool world_on_one_host(const World& world) { return world.local_world_size == world.world_size; }

bool launcher_serves(const World& world) {
  return world.agent_store || launcher_store(world).has_value();
}

bool serves_store(const World& world) { return world.rank == 0 && !launcher_serves(world); }

StoreAddress store_address(const World& world) {
  if (auto served = launcher_store(world)) {
    return *std::move(served);
  }
  StoreAddress address;
  const std::string& host = world.master_addr;
  // A name is not loopback: on its own host it may be 127.0.1.1 (Debian), elsewhere not.
  const bool loopback = host == "localhost" || is_loopback_address(host);
  if (world_on_one_host(world) || (loopback && world.store_file.empty())) {
    address.socket =
        "hasten1-" + std::to_string(geteuid()) + "-" + std::to_string(world.master_port);
  } else {
    address.host = host;
    address.port = world.master_port;
    address.key = store_key_from_environment().value_or(StoreKey{});
  }
  return address;
}

std::shared_ptr<StoreServer> serve_store(const World& world) {
  if (!serves_store(world)) {
    return nullptr;
  }
  StoreAddress address = store_address(world);
  if (!world.store_file.empty() && !address.socket.empty()) {
    address.socket = unique_socket_name("hasten1-");
  } else if (!world.store_file.empty()) {
    address.port = 0;
  }
  address.host.clear(); // every interface
  return std::make_shared<StoreServer>(std::move(address));
}

/// The store that torchrun's agent serves.
StorePtr open_agent_store(const World& world, CommClock::time_point deadline,
                          const std::atomic<bool>& cancelled) {
  const StoreAddress place{.host = world.master_addr, .port = world.master_port};
  // If no server listens, TCPStore's own first attempt would print a stack trace and sleep for a
  // second.
  const std::string host = peer_address(connect_to(place, deadline, cancelled));
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(place.port);
  options.waitWorkers = false;
  options.numWorkers = static_cast<size_t>(world.world_size);
  try {
    const QuietStore quiet; // TCPStore warns about addresses without a name
#ifdef __GLIBC__
    // This thread looks up names only in /etc/hosts. c10d looks up the name of every address to
    // which it connects, for messages. A name server that does not answer would delay each
    // connection by 5 s or more.
    if ((_res.options & RES_INIT) == 0) {
      res_init();
    }
    const auto servers =
        c10::make_scope_exit([count = std::exchange(_res.nscount, 0)] { _res.nscount = count; });
#endif
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    throw CommunicationError(
        "comm::create",
        "cannot reach the store at " + place.text() + " (" + text.substr(0, text.find('\n')) + ")",
        {}, "check MASTER_ADDR and MASTER_PORT");
  }
}

StorePtr open_store(const World& world, const StoreAddress& address, std::string prefix,
                    CommClock::time_point deadline, const std::atomic<bool>& cancelled) {
  StorePtr store;
  std::optional<StoreKey> key;
  if (world.agent_store) { // the store outlives a restart of the workers
    const std::string attempt = environment_value("TORCHELASTIC_RESTART_COUNT").value_or("0");
    prefix = "hasten/" + attempt + "/" + prefix;
    key = store_key_from_environment();
    store = open_agent_store(world, deadline, cancelled);
  } else {
    store = c10::make_intrusive<SocketStore>(address, deadline, cancelled);
  }
  store->setTimeout(
      std::max(std::chrono::milliseconds(1000),
               std::chrono::duration_cast<std::chrono::milliseconds>(deadline - CommClock::now())));
  if (key) {
    return c10::make_intrusive<SealedStore>(prefix, std::move(store), *key);
  }
  return c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store));
}

std::shared_ptr<StoreThread> StoreThread::start(Open open) {
  auto running = std::make_shared<StoreThread>();
  std::thread([running, open = std::move(open)] { running->run(open); }).detach();
  return {running.get(),
          [running](StoreThread* thread) { thread->stop(std::chrono::milliseconds(0)); }};
}

void StoreThread::run(const Open& open) {
  const NoBrokenPipeSignal none; // for the threads of store and groups, too
  try {
    store_ = open(cancelled_);
  } catch (...) {
    open_error_ = std::current_exception();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) {
      break;
    }
    const std::function<void()> task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    task();
    lock.lock();
  }
  // The broken promises end the calls that still wait.
  queue_.clear();
  StorePtr store = std::move(store_);
  lock.unlock();
  store.reset();
  lock.lock();
  ended_ = true;
  changed_.notify_all();
}

void StoreThread::enqueue(std::function<void()> task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!stopping_) { // otherwise the promise is broken here
    queue_.push_back(std::move(task));
    changed_.notify_all();
  }
}

void StoreThread::stop(std::chrono::milliseconds limit) {
  cancel();
  std::unique_lock<std::mutex> lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, limit, [&] { return ended_; });
}

void StorePause::operator()() {
  std::this_thread::sleep_for(next_);
  next_ = std::min(next_ * 2, std::chrono::microseconds(5000));
}

} // namespace hasten::detail
