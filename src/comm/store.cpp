#include "store.h"

#include <c10/util/Logging.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <resolv.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "broken_pipe.h"
#include "hasten/base/error.h"
#include "network_interface.h"

namespace hasten::detail {

struct StoreAddressList {
  StoreAddressList(const std::string& host, int port) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    const std::string service = std::to_string(port);
    if (getaddrinfo(host.c_str(), service.c_str(), &hints, &first) != 0) {
      first = nullptr;
    }
  }
  ~StoreAddressList() {
    if (first != nullptr) {
      freeaddrinfo(first);
    }
  }
  StoreAddressList(const StoreAddressList&) = delete;
  StoreAddressList& operator=(const StoreAddressList&) = delete;

  addrinfo* first = nullptr;
};

std::string store_host(const World& world) {
  return world_on_one_host(world) ? "127.0.0.1" : world.master_addr;
}

std::string store_address(const World& world) {
  return store_host(world) + ":" + std::to_string(world.master_port);
}

/// Loopback reaches nobody else. A name counts as reachable: on its own host it may be
/// 127.0.1.1 (Debian), elsewhere not.
bool store_on_loopback(const World& world) {
  const std::string host = store_host(world);
  return host == "localhost" || is_loopback_address(host);
}

/// As digits.
std::string address_text(const addrinfo& address) {
  char text[NI_MAXHOST] = "";
  getnameinfo(
      address.ai_addr,
      address.ai_addrlen,
      text,
      sizeof text,
      nullptr,
      0,
      NI_NUMERICHOST);
  return text;
}

// TCPStore's own first attempt would, while nobody listens, print a stack and sleep
// a second.
std::string listening_address(const std::string& host, int port) {
  const StoreAddressList addresses(host, port);
  for (const addrinfo* a = addresses.first; a != nullptr; a = a->ai_next) {
    const int fd =
        socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
      continue;
    }
    bool connected = connect(fd, a->ai_addr, a->ai_addrlen) == 0;
    if (!connected && errno == EINPROGRESS) {
      pollfd wait{fd, POLLOUT, 0};
      int error = 1;
      socklen_t size = sizeof error;
      connected = poll(&wait, 1, 1000) == 1 &&
                  getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 &&
                  error == 0;
    }
    ::close(fd);
    if (connected) {
      return address_text(*a);
    }
  }
  return {};
}

/// The only address of `host` as digits; `host` where it has several, or none.
std::string only_address(const std::string& host, int port) {
  const StoreAddressList addresses(host, port);
  return addresses.first != nullptr && addresses.first->ai_next == nullptr
             ? address_text(*addresses.first)
             : host;
}

NoNameServers::NoNameServers() {
#ifdef __GLIBC__
  if ((_res.options & RES_INIT) == 0) {
    res_init();
  }
  count_ = std::exchange(_res.nscount, 0);
#endif
}

NoNameServers::~NoNameServers() {
#ifdef __GLIBC__
  _res.nscount = count_;
#endif
}

/// A store of one host is not to be reached from others, but TCPStore by
/// itself would listen on every interface.
int listen_on_loopback_port(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      listen(fd, 1024) != 0) {
    const int error = errno;
    if (fd >= 0) {
      ::close(fd);
    }
    throw InputError(
        "comm::create",
        "cannot listen on 127.0.0.1: MASTER_PORT=" + std::to_string(port) +
            " (" + std::strerror(error) + ")",
        "a free port",
        "choose another MASTER_PORT, or start with hasten launch");
  }
  return fd;
}

struct QuietStoreState {
  std::mutex mutex;
  int users = 0;
  int level = 0;
};

QuietStoreState& quiet_store_state() {
  static QuietStoreState state;
  return state;
}

QuietStore::QuietStore() {
  QuietStoreState& state = quiet_store_state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  std::atomic_ref<int> level(FLAGS_caffe2_log_level);
  if (state.users++ == 0) {
    state.level = level;
    if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) {
      level = std::max(state.level, c10::GLOG_ERROR);
    }
  }
}

QuietStore::~QuietStore() {
  QuietStoreState& state = quiet_store_state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (--state.users == 0) {
    std::atomic_ref<int> level(FLAGS_caffe2_log_level);
    level = state.level;
  }
}

bool world_on_one_host(const World& world) {
  return world.local_world_size == world.world_size;
}

bool serves_store(const World& world) {
  return world.rank == 0 && !world.agent_store;
}

StorePtr open_store(
    const World& world,
    bool serve,
    int generation,
    CommClock::time_point deadline,
    const std::atomic<bool>& cancelled) {
  std::string host = store_host(world);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(world.master_port);
  options.isServer = serve;
  options.waitWorkers = false;
  options.numWorkers = static_cast<size_t>(world.world_size);
  options.timeout = std::max(
      std::chrono::milliseconds(1000),
      std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - CommClock::now()));
  if (serve) {
    if (world.listen_fd >= 0) {
      options.masterListenFd = world.listen_fd;
    } else if (store_on_loopback(world)) {
      options.masterListenFd = listen_on_loopback_port(world.master_port);
    }
    host = only_address(host, world.master_port);
  } else {
    std::string address;
    while ((address = listening_address(host, world.master_port)).empty()) {
      if (cancelled || CommClock::now() > deadline) {
        throw CommunicationError(
            "comm::create",
            "no store answers at " + store_address(world),
            "rank 0 to serve it",
            "start rank 0, and check MASTER_ADDR and MASTER_PORT");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    host = address;
  }
  StorePtr store;
  try {
    const QuietStore quiet; // it warns of addresses without a name
    std::optional<NoNameServers> no_names;
    if (is_address(host)) {
      no_names.emplace();
    }
    store = c10::make_intrusive<c10d::TCPStore>(host, options);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    throw CommunicationError(
        "comm::create",
        std::string(serve ? "cannot serve" : "cannot reach") +
            " the store at " + store_address(world) + " (" +
            text.substr(0, text.find('\n')) + ")",
        {},
        "check MASTER_ADDR and MASTER_PORT");
  }
  // A launcher's own store outlives a restart of its workers.
  if (world.agent_store) {
    const char* attempt = std::getenv("TORCHELASTIC_RESTART_COUNT");
    store = c10::make_intrusive<c10d::PrefixStore>(
        std::string("hasten/") + (attempt != nullptr ? attempt : "0") + "/" +
            std::to_string(generation),
        store);
  }
  return store;
}

StoreThread::StoreThread(Open open) : shared_(std::make_shared<Shared>()) {
  std::thread([shared = shared_, open = std::move(open)] {
    run(shared, open);
  }).detach();
}

StoreThread::~StoreThread() { stop(std::chrono::milliseconds(0)); }

void StoreThread::run(const std::shared_ptr<Shared>& shared, const Open& open) {
  const NoBrokenPipeSignal none; // also for the threads of store and groups
  try {
    shared->store = open(shared->cancelled);
  } catch (...) {
    shared->open_error = std::current_exception();
  }
  std::unique_lock<std::mutex> lock(shared->mutex);
  while (true) {
    shared->changed.wait(
        lock, [&] { return shared->stopping || !shared->queue.empty(); });
    if (shared->stopping) {
      break;
    }
    const std::function<void()> task = std::move(shared->queue.front());
    shared->queue.pop_front();
    lock.unlock();
    task();
    lock.lock();
  }
  // Promises broken, whoever still waits for one learns it.
  shared->queue.clear();
  StorePtr store = std::move(shared->store);
  lock.unlock();
  store.reset();
  lock.lock();
  shared->ended = true;
  shared->changed.notify_all();
}

void StoreThread::enqueue(Shared* shared, std::function<void()> task) {
  const std::lock_guard<std::mutex> lock(shared->mutex);
  if (!shared->stopping) { // else the promise breaks here
    shared->queue.push_back(std::move(task));
    shared->changed.notify_all();
  }
}

void StoreThread::cancel() { shared_->cancelled = true; }

void StoreThread::stop(std::chrono::milliseconds limit) {
  cancel();
  std::unique_lock<std::mutex> lock(shared_->mutex);
  shared_->stopping = true;
  shared_->changed.notify_all();
  shared_->changed.wait_for(lock, limit, [&] { return shared_->ended; });
}

void StorePause::operator()() {
  std::this_thread::sleep_for(next_);
  next_ = std::min(next_ * 2, std::chrono::microseconds(5000));
}

} // namespace hasten::detail
