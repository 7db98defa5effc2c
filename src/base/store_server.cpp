#include "hasten/base/store_server.h"

#include <linux/tcp.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <list>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "hasten/base/error.h"

namespace hasten::detail {

/// A connection to the store.
struct StoreClient {
  explicit StoreClient(int fd) : channel(FileDescriptor(fd)) {}

  StoreChannel channel;
  StoreClock::time_point since = StoreClock::now();
  std::list<int>::iterator stranger{}; // valid until it has proved the secret
  // A get or wait that is not answered yet. `keys` is empty if there is none.
  int64_t request = 0;
  bool values = false;
  std::vector<std::string> keys{};
  size_t next_key = 0; // index of the first missing key
};

/// A socket that listens at `address`. Sets the address's host and port. Returns none and sets errno
/// on failure.
FileDescriptor listen_at(StoreAddress& address) {
  constexpr int kType = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
  if (!address.socket.empty()) {
    const auto [name, size] = abstract_address(address.socket);
    FileDescriptor fd(::socket(AF_UNIX, kType, 0));
    const bool good = ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&name), size) == 0 &&
                      ::listen(fd.get(), 4096) == 0;
    return good ? std::move(fd) : FileDescriptor();
  }
  const bool everywhere = address.host.empty();
  // "::" also accepts IPv4 if the host has IPv6.
  const auto v6 = host_addresses(everywhere ? "::" : address.host, address.port);
  const auto v4 = everywhere ? host_addresses("0.0.0.0", address.port) : nullptr;
  for (const addrinfo* a : {v6.get(), v4.get()}) {
    if (a == nullptr) {
      continue;
    }
    FileDescriptor fd(::socket(a->ai_family, kType, 0));
    const int on = 1;
    const int off = 0;
    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    sockaddr_in6 bound{};
    socklen_t size = sizeof bound;
    if (::bind(fd.get(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(fd.get(), 4096) == 0 &&
        ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &size) == 0) {
      address.host = everywhere ? "127.0.0.1" : address.host;
      address.port = ntohs(bound.sin6_port); // at the same offset as IPv4's
      return fd;
    }
    if (errno == EADDRINUSE) {
      break; // listening only at IPv4 would hide that the port is in use
    }
  }
  return {};
}

void raise_descriptor_limit(size_t wanted) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < wanted) {
    limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, std::max<size_t>(wanted, 65'536));
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
}

class StoreServer::Loop {
 public:
  Loop(StoreAddress& address, const StoreLimits& limits)
      : key_(address.key), local_(!address.socket.empty()), limits_(limits) {
    const std::string asked = address.text();
    listen_fd_ = listen_at(address);
    if (listen_fd_.get() < 0) {
      throw InputError("comm::create",
                       "cannot listen at " + asked + " (" + std::strerror(errno) + ")",
                       "a free port", "choose another MASTER_PORT, or start with hasten launch");
    }
    raise_descriptor_limit(limits_.connections);
    epoll_fd_ = FileDescriptor(::epoll_create1(EPOLL_CLOEXEC));
    stop_fd_ = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    watch(listen_fd_.get(), EPOLLIN, EPOLL_CTL_ADD);
    watch(stop_fd_.get(), EPOLLIN, EPOLL_CTL_ADD);
  }

  void run() {
    epoll_event ready[64];
    while (true) {
      const bool timed = !strangers_.empty() || !listening_;
      const int count = ::epoll_wait(epoll_fd_.get(), ready, 64, timed ? 100 : -1);
      for (int i = 0; i < count; ++i) {
        const int fd = ready[i].data.fd;
        if (fd == stop_fd_.get()) {
          return;
        }
        if (fd == listen_fd_.get()) {
          accept_some();
          continue;
        }
        const auto client = clients_.find(fd);
        if (client != clients_.end() && !serve(client->second, ready[i].events)) {
          drop(fd);
        }
      }
      drop_late_strangers();
      if (!listening_) {
        listening_ = true;
        watch(listen_fd_.get(), EPOLLIN, EPOLL_CTL_ADD);
      }
    }
  }
  void stop() const { ::eventfd_write(stop_fd_.get(), 1); }

 private:
  void watch(int fd, uint32_t events, int operation) const {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    ::epoll_ctl(epoll_fd_.get(), operation, fd, &event);
  }

  void accept_some() {
    // Only a few at a time, so that earlier connections can prove the secret in between.
    const size_t most = local_ ? 64 : std::clamp<size_t>(limits_.strangers / 4, 1, 64);
    for (size_t i = 0; i < most; ++i) {
      const int fd = ::accept4(listen_fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd >= 0) {
        admit(fd);
      } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
        // Without descriptors the event would be reported endlessly.
        watch(listen_fd_.get(), 0, EPOLL_CTL_DEL);
        listening_ = false;
        return;
      } else if (errno == EAGAIN) {
        return;
      }
    }
  }

  void admit(int fd) {
    if ((local_ && !own_or_root(socket_peer_uid(fd))) ||
        clients_.size() >= limits_.connections + limits_.strangers) {
      ::close(fd);
      return;
    }
    StoreClient& client = clients_.try_emplace(fd, fd).first->second;
    if (local_) {
      client.channel.trust();
    } else {
      const int on = 1;
      ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      client.stranger = strangers_.insert(strangers_.end(), fd);
      if (strangers_.size() > limits_.strangers) {
        drop(strangers_.front());
      }
    }
    watch(fd, EPOLLIN, EPOLL_CTL_ADD);
  }

  void drop(int fd) {
    const auto client = clients_.find(fd);
    if (!client->second.channel.trusted()) {
      strangers_.erase(client->second.stranger);
    }
    unpark(client->second);
    clients_.erase(client);
  }

  void drop_late_strangers() {
    const auto oldest = StoreClock::now() - limits_.proof;
    while (!strangers_.empty() && clients_.at(strangers_.front()).since < oldest) {
      drop(strangers_.front());
    }
  }

  /// False if the client must be dropped.
  bool serve(StoreClient& client, uint32_t events) {
    StoreChannel& channel = client.channel;
    const bool was_blocked = channel.blocked();
    if (was_blocked ? !channel.flush() || (events & (EPOLLHUP | EPOLLERR)) != 0
                    : !channel.receive()) {
      return false;
    }
    std::string_view frame;
    while (!channel.blocked()) {
      const StoreChannel::Next next = channel.next(frame);
      if (next == StoreChannel::Next::none) {
        break;
      }
      if (next == StoreChannel::Next::broken || !handle(client, frame)) {
        return false;
      }
    }
    if (channel.blocked() != was_blocked) { // do not read from a client that does not read
      watch(channel.fd(), channel.blocked() ? EPOLLOUT : EPOLLIN, EPOLL_CTL_MOD);
    }
    return true;
  }

  bool handle(StoreClient& client, std::string_view frame) {
    if (!client.channel.trusted()) {
      const bool admitted = client.channel.admit(frame, key_);
      if (client.channel.trusted()) {
        strangers_.erase(client.stranger);
      }
      return admitted;
    }
    unpark(client); // a new request ends its waiting
    StoreReader in{frame};
    const int64_t request = in.number();
    const auto op = static_cast<StoreOp>(in.number());
    if (op == StoreOp::get || op == StoreOp::wait) {
      client.request = request;
      client.values = op == StoreOp::get;
      client.next_key = 0;
      while (in.ok && !in.rest.empty()) {
        client.keys.emplace_back(in.text());
      }
      if (!in.ok) {
        client.keys.clear();
      }
      return in.ok && answer_or_park(client);
    }
    StoreWriter result;
    std::string why;
    try {
      answer(op, in, result);
    } catch (const std::exception& error) {
      why = error.what();
    }
    const bool served = in.ok && reply(client, request, result.bytes, why);
    for (const std::string& key : std::exchange(new_keys_, {})) {
      if (auto waiting = waiting_.extract(key)) {
        for (const int fd : waiting.mapped()) {
          StoreClient& other = clients_.at(fd);
          if (!answer_or_park(other)) {
            ::shutdown(fd, SHUT_RDWR); // it is dropped when epoll reports this
          } else if (other.channel.blocked()) {
            watch(fd, EPOLLOUT, EPOLL_CTL_MOD);
          }
        }
      }
    }
    return served;
  }

  /// Sends `result`, or why there is none.
  static bool reply(StoreClient& client, int64_t request, std::string_view result,
                    std::string_view why = {}) {
    StoreWriter out;
    out.number(request);
    if (out.bytes.size() + 8 + result.size() > StoreChannel::kMaxFrame) {
      why = "the values are larger than a message may be";
    }
    out.number(!why.empty());
    if (why.empty()) {
      out.bytes += result;
    } else {
      out.text(why);
    }
    return client.channel.send(out.bytes);
  }

  void put(std::string_view key, std::string value) {
    const auto [entry, is_new] = data_.try_emplace(std::string(key));
    const size_t before = is_new ? 0 : key.size() + entry->second.size();
    const size_t after = bytes_ - before + key.size() + value.size();
    if (after > limits_.bytes) {
      if (is_new) {
        data_.erase(entry);
      }
      throw std::runtime_error("the store is full: " + std::to_string(limits_.bytes) + " bytes");
    }
    bytes_ = after;
    entry->second = std::move(value);
    if (is_new) {
      new_keys_.emplace_back(key);
    }
  }

  void answer(StoreOp op, StoreReader& in, StoreWriter& out) {
    const std::string key(in.text());
    const auto entry = data_.find(key);
    const bool there = entry != data_.end();
    switch (op) {
      case StoreOp::set:
        put(key, std::string(in.text()));
        while (in.ok && !in.rest.empty()) {
          const std::string_view next = in.text();
          put(next, std::string(in.text()));
        }
        break;
      case StoreOp::check: {
        bool all = there;
        while (in.ok && !in.rest.empty()) {
          all = data_.contains(std::string(in.text())) && all;
        }
        out.number(all);
        break;
      }
      case StoreOp::add: {
        int64_t sum = 0;
        if (there) {
          const char* const end = entry->second.data() + entry->second.size();
          if (std::from_chars(entry->second.data(), end, sum).ptr != end) {
            throw std::runtime_error("the value of " + key + " is not a number");
          }
        }
        sum += in.number();
        put(key, std::to_string(sum));
        out.number(sum);
        break;
      }
      case StoreOp::compare_set: {
        const std::string_view expected = in.text();
        const std::string desired(in.text());
        if (there ? entry->second == expected : expected.empty()) {
          put(key, desired);
          out.text(desired);
        } else {
          out.text(there ? std::string_view(entry->second) : expected);
        }
        break;
      }
      case StoreOp::append:
        put(key, (there ? entry->second : "") + std::string(in.text()));
        break;
      case StoreOp::remove:
        if (there) {
          bytes_ -= key.size() + entry->second.size();
          data_.erase(entry);
        }
        out.number(there);
        break;
      case StoreOp::count:
        out.number(std::ssize(data_));
        break;
      default:
        throw std::runtime_error("no such request");
    }
  }

  bool answer_or_park(StoreClient& client) {
    // Checks from the first missing key on, then all keys: one may have been removed.
    for (bool all = client.next_key == 0;; all = true, client.next_key = 0) {
      for (; client.next_key < client.keys.size(); ++client.next_key) {
        const std::string& key = client.keys[client.next_key];
        if (!data_.contains(key)) {
          waiting_[key].push_back(client.channel.fd());
          return true;
        }
      }
      if (all) {
        break;
      }
    }
    StoreWriter out;
    for (const std::string& key : client.keys) {
      if (client.values) {
        out.text(data_.at(key));
      }
    }
    client.keys.clear();
    return reply(client, client.request, out.bytes);
  }

  void unpark(StoreClient& client) {
    if (!client.keys.empty()) {
      const auto waiting = waiting_.find(client.keys[client.next_key]);
      std::erase(waiting->second, client.channel.fd());
      if (waiting->second.empty()) {
        waiting_.erase(waiting);
      }
      client.keys.clear();
    }
  }

  const StoreKey key_;
  const bool local_;
  const StoreLimits limits_;
  FileDescriptor listen_fd_{};
  FileDescriptor epoll_fd_{};
  FileDescriptor stop_fd_{};
  bool listening_ = true; // false while there is no descriptor for new connections
  std::unordered_map<int, StoreClient> clients_; // by descriptor
  std::list<int> strangers_; // not yet proved; oldest first
  std::unordered_map<std::string, std::string> data_;
  size_t bytes_ = 0;
  std::unordered_map<std::string, std::vector<int>> waiting_; // descriptors, by missing key
  std::vector<std::string> new_keys_; // of the current request
};

StoreServer::StoreServer(StoreAddress address, StoreLimits limits)
    : address_(std::move(address)), loop_(std::make_unique<Loop>(address_, limits)) {
  sigset_t all;
  sigset_t old;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &old); // other threads handle signals
  thread_ = std::thread([this] { loop_->run(); });
  ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

StoreServer::~StoreServer() {
  loop_->stop();
  thread_.join();
}

} // namespace hasten::detail
