#include "hasten/base/store_channel.h"

#include <fcntl.h>
#include <linux/tcp.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sodium.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <thread>

#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"

namespace hasten::detail {

static_assert(std::endian::native == std::endian::little);
static_assert(std::tuple_size_v<StoreKey> == crypto_auth_hmacsha512256_BYTES);

constexpr const char* kStoreWhere = "comm::create";
constexpr std::string_view kStoreMagic = "hasten-store-1";
constexpr std::string_view kTcpSocket = "tcp:"; // Unix sockets' names go on with digits
constexpr size_t kStoreNonce = 32;
constexpr size_t kLeastSecret = 16; // bytes
constexpr auto kProofLimit = std::chrono::seconds(10);
constexpr auto kResolveLimit = std::chrono::seconds(10); // name servers may start late

std::string_view as_text(const StoreKey& key) {
  return {reinterpret_cast<const char*>(key.data()), key.size()};
}

StoreKey keyed_hash(const StoreKey& key, std::initializer_list<std::string_view> parts) {
  crypto_auth_hmacsha512256_state state;
  crypto_auth_hmacsha512256_init(&state, key.data(), key.size());
  for (const std::string_view part : parts) {
    crypto_auth_hmacsha512256_update(&state, reinterpret_cast<const unsigned char*>(part.data()),
                                     part.size());
  }
  StoreKey hash;
  crypto_auth_hmacsha512256_final(&state, hash.data());
  return hash;
}

bool equal_hash(const StoreKey& hash, std::string_view bytes) {
  return bytes.size() == hash.size() && sodium_memcmp(hash.data(), bytes.data(), hash.size()) == 0;
}

std::string random_bytes(size_t count) {
  static const int ready = sodium_init();
  (void)ready;
  std::string bytes(count, '\0');
  randombytes_buf(bytes.data(), count);
  return bytes;
}

std::string number_bytes(uint64_t value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

/// The bytes of the secret, without white space at the end.
std::string read_secret_file(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    throw InputError(
        "base::secret",
        "HASTEN_SECRET_FILE=" + path + " cannot be read (" + std::strerror(errno) + ")",
        "a file with the run's secret");
  }
  if ((status.st_mode & 0177) != 0 || status.st_uid != ::geteuid()) {
    throw InputError("base::secret",
                     "HASTEN_SECRET_FILE=" + path + " can be read or changed by other users",
                     "a file of this user with mode 0600", "chmod 600 " + path);
  }
  return read_file(path);
}

std::optional<StoreKey> store_key_from_environment() {
  std::string secret = environment_value("HASTEN_SECRET").value_or("");
  const auto file = secret.empty() ? environment_value("HASTEN_SECRET_FILE") : std::nullopt;
  if (file) {
    secret = read_secret_file(*file);
    secret.erase(secret.find_last_not_of(" \t\r\n") + 1);
  }
  if (secret.empty() && !file) {
    return std::nullopt;
  }
  if (secret.size() < kLeastSecret) {
    throw InputError("base::secret",
                     std::string(file ? "the secret in HASTEN_SECRET_FILE" : "HASTEN_SECRET") +
                         " has " + std::to_string(secret.size()) + " bytes",
                     std::to_string(kLeastSecret) + " or more",
                     "make one with: openssl rand -hex 32");
  }
  StoreKey key;
  crypto_generichash(key.data(), key.size(), reinterpret_cast<const unsigned char*>(secret.data()),
                     secret.size(), nullptr, 0);
  return key;
}

std::string StoreAddress::text() const {
  const bool digits = host.find(':') != std::string::npos; // IPv6
  return socket.empty() ? (digits ? "[" + host + "]" : host) + ":" + std::to_string(port)
                        : "Unix socket @" + socket;
}

StoreAddress parse_endpoint(std::string_view text) {
  const size_t colon = text.rfind(':');
  const bool bracketed = text.starts_with('[') && colon != 0 && text[colon - 1] == ']';
  const auto port =
      colon == std::string_view::npos ? std::nullopt : parse_number<int>(text.substr(colon + 1));
  if (!port || *port < 1 || *port > 65535 || colon == 0 ||
      (!bracketed && text.find(':') != colon)) {
    throw InputError("base::parse_endpoint", "endpoint=" + std::string(text),
                     "HOST:PORT, e.g. 10.0.0.1:29500 or [fe80::1%eth0]:29500");
  }
  const std::string_view host = text.substr(0, colon);
  return {.host = std::string(bracketed ? host.substr(1, host.size() - 2) : host), .port = *port};
}

std::string unique_socket_name(const std::string& start) {
  const std::string bits = random_bytes(16);
  char digits[33];
  sodium_bin2hex(digits, sizeof digits, reinterpret_cast<const unsigned char*>(bits.data()),
                 bits.size());
  return start + digits;
}

std::string launcher_socket_start(int master_port) {
  return "hasten1-" + std::to_string(master_port) + "-";
}

std::string launcher_socket_text(int master_port, const StoreAddress& store) {
  return store.socket.empty()
             ? launcher_socket_start(master_port) + std::string(kTcpSocket) + store.text()
             : store.socket;
}

std::optional<StoreAddress> launcher_store(const World& world) {
  const std::string name = environment_value("HASTEN_STORE_SOCKET").value_or("");
  const std::string start = launcher_socket_start(world.master_port);
  if (world.agent_store || !world.store_file.empty() || !name.starts_with(start)) {
    return std::nullopt;
  }
  const std::string_view rest = std::string_view(name).substr(start.size());
  if (!rest.starts_with(kTcpSocket)) {
    return StoreAddress{.socket = name};
  }
  const auto place = parse_endpoint(rest.substr(kTcpSocket.size()));
  return StoreAddress{.host = place.host,
                      .port = place.port,
                      .key = store_key_from_environment().value_or(StoreKey{})};
}

std::optional<unsigned> socket_peer_uid(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return std::nullopt;
  }
  return peer.uid;
}

bool own_or_root(std::optional<unsigned> uid) { return uid && (*uid == ::geteuid() || *uid == 0); }

std::pair<sockaddr_un, socklen_t> abstract_address(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t size = std::min(name.size(), sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, name.data(), size);
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size)};
}

void StoreWriter::number(int64_t value) { bytes += number_bytes(static_cast<uint64_t>(value)); }

void StoreWriter::text(std::string_view text) {
  number(static_cast<int64_t>(text.size()));
  bytes += text;
}

int64_t StoreReader::number() {
  int64_t value = 0;
  ok = ok && rest.size() >= sizeof value;
  if (ok) {
    std::memcpy(&value, rest.data(), sizeof value);
    rest.remove_prefix(sizeof value);
  }
  return value;
}

std::string_view StoreReader::text() {
  const auto size = static_cast<uint64_t>(number());
  ok = ok && size <= rest.size();
  const std::string_view text = rest.substr(0, ok ? size : 0);
  rest.remove_prefix(text.size());
  return text;
}

bool StoreChannel::receive() {
  in_.erase(0, std::exchange(taken_, 0));
  char block[65536];
  for (int i = 0; i < 16; ++i) { // then the other connections are read
    const ssize_t got = ::recv(fd(), block, sizeof block, MSG_DONTWAIT);
    if (got > 0) {
      in_.append(block, static_cast<size_t>(got));
    }
    if (got != static_cast<ssize_t>(sizeof block)) {
      return got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
    }
  }
  return true;
}

StoreKey StoreChannel::frame_hash(std::string_view frame, char direction, uint64_t& number) {
  return keyed_hash(session_, {{&direction, 1}, number_bytes(number++), frame});
}

StoreChannel::Next StoreChannel::next(std::string_view& frame) {
  const std::string_view have = std::string_view(in_).substr(taken_);
  uint64_t size = 0;
  if (have.size() < sizeof size) {
    return Next::none;
  }
  std::memcpy(&size, have.data(), sizeof size);
  if (size > limit_) {
    return Next::broken;
  }
  const size_t sealed = sizeof size + size;
  const size_t whole = sealed + (sealed_ ? session_.size() : 0);
  if (have.size() < whole) {
    return Next::none;
  }
  const char other = own_ == '<' ? '>' : '<';
  if (sealed_ && !equal_hash(frame_hash(have.substr(0, sealed), other, received_),
                             have.substr(sealed, whole - sealed))) {
    return Next::broken;
  }
  taken_ += whole;
  frame = have.substr(sizeof size, size);
  return Next::frame;
}

bool StoreChannel::send(std::string_view frame) {
  const size_t start = out_.size();
  out_ += number_bytes(frame.size());
  out_ += frame;
  if (sealed_) {
    out_ += as_text(frame_hash(std::string_view(out_).substr(start), own_, sent_));
  }
  return flush();
}

bool StoreChannel::flush() {
  size_t done = 0;
  while (done < out_.size()) {
    const ssize_t sent =
        ::send(fd(), out_.data() + done, out_.size() - done, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) {
      continue;
    }
    if (sent < 0) {
      out_.erase(0, done);
      return errno == EAGAIN;
    }
    done += static_cast<size_t>(sent);
  }
  out_.clear();
  return true;
}

StoreChannel::Next StoreChannel::wait(std::string_view& frame, StoreClock::time_point deadline) {
  while (true) {
    if (!flush()) {
      return Next::broken;
    }
    if (const Next found = next(frame); found != Next::none) {
      return found;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - StoreClock::now());
    const auto events = static_cast<short>(blocked() ? POLLIN | POLLOUT : POLLIN);
    pollfd ready{fd(), events, 0};
    const int count =
        ::poll(&ready, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000)));
    if (count == 0 && left.count() <= 0) {
      return Next::none;
    }
    if (count > 0 && (ready.revents & ~POLLOUT) != 0 && !receive()) {
      return next(frame) == Next::frame ? Next::frame : Next::broken;
    }
  }
}

bool StoreChannel::admit(std::string_view frame, const StoreKey& key) {
  if (nonces_.empty()) {
    if (!frame.starts_with(kStoreMagic) || frame.size() != kStoreMagic.size() + kStoreNonce) {
      return false;
    }
    const std::string own = random_bytes(kStoreNonce);
    nonces_ = std::string(frame.substr(kStoreMagic.size())) + own;
    return send(own + std::string(as_text(keyed_hash(key, {"s", nonces_}))));
  }
  if (!equal_hash(keyed_hash(key, {"c", nonces_}), frame)) {
    return false;
  }
  session_ = keyed_hash(key, {"k", nonces_});
  sealed_ = true;
  own_ = '>';
  trust();
  return send({}); // confirms the proof to the client
}

StoreChannel::Proof StoreChannel::prove(const StoreKey& key, StoreClock::time_point deadline) {
  nonces_ = random_bytes(kStoreNonce);
  std::string_view answer;
  if (!send(std::string(kStoreMagic) + nonces_) || wait(answer, deadline) != Next::frame ||
      answer.size() < kStoreNonce) {
    return Proof::none;
  }
  nonces_ += answer.substr(0, kStoreNonce);
  if (!equal_hash(keyed_hash(key, {"s", nonces_}), answer.substr(kStoreNonce))) {
    return Proof::wrong;
  }
  if (!send(as_text(keyed_hash(key, {"c", nonces_})))) {
    return Proof::none;
  }
  session_ = keyed_hash(key, {"k", nonces_});
  sealed_ = true;
  // A server with too many unproved connections may end this one before it has the proof.
  if (wait(answer, deadline) != Next::frame) {
    return Proof::none;
  }
  trust();
  return Proof::right;
}

std::shared_ptr<addrinfo> host_addresses(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* first = nullptr;
  const bool found = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &first) == 0;
  return found ? std::shared_ptr<addrinfo>(first, ::freeaddrinfo) : nullptr;
}

FileDescriptor try_connect(const StoreAddress& address) {
  constexpr int kType = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
  if (!address.socket.empty()) {
    const auto [name, size] = abstract_address(address.socket);
    FileDescriptor fd(::socket(AF_UNIX, kType, 0));
    const bool good = ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&name), size) == 0;
    return good ? std::move(fd) : FileDescriptor();
  }
  const auto addresses = host_addresses(address.host, address.port);
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    FileDescriptor fd(::socket(a->ai_family, kType, 0));
    bool connected = ::connect(fd.get(), a->ai_addr, a->ai_addrlen) == 0;
    if (!connected && errno == EINPROGRESS) {
      pollfd wait{fd.get(), POLLOUT, 0};
      int error = 1;
      socklen_t size = sizeof error;
      connected = ::poll(&wait, 1, 1000) == 1 &&
                  ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
    }
    if (connected) {
      const int on = 1;
      ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      return fd;
    }
  }
  return {};
}

/// Null if the connection broke meanwhile.
std::unique_ptr<StoreChannel> proved_channel(FileDescriptor fd, const StoreAddress& address,
                                             StoreClock::time_point deadline) {
  auto channel = std::make_unique<StoreChannel>(std::move(fd));
  if (!address.socket.empty()) {
    const auto uid = socket_peer_uid(channel->fd());
    if (!own_or_root(uid)) {
      throw InputError(
          kStoreWhere,
          "another user (uid " + std::to_string(uid.value_or(0)) + ") listens at " + address.text(),
          "this run's store", "choose another MASTER_PORT, or start with hasten launch");
    }
    channel->trust();
    return channel;
  }
  const StoreChannel::Proof proof =
      channel->prove(address.key, std::min(deadline, StoreClock::now() + kProofLimit));
  if (proof == StoreChannel::Proof::wrong) {
    throw InputError(kStoreWhere,
                     "the store at " + address.text() + " has another secret than this rank",
                     "one HASTEN_SECRET on all hosts, or none on any",
                     "check HASTEN_SECRET, HASTEN_SECRET_FILE and MASTER_PORT");
  }
  return proof == StoreChannel::Proof::right ? std::move(channel) : nullptr;
}

FileDescriptor connect_to(const StoreAddress& address, StoreClock::time_point deadline,
                          const std::atomic<bool>& cancelled) {
  const auto resolved_by = std::min(deadline, StoreClock::now() + kResolveLimit);
  bool resolved = !address.socket.empty();
  while (!cancelled && StoreClock::now() < deadline) {
    if (FileDescriptor fd = try_connect(address)) {
      return fd;
    }
    resolved = resolved || host_addresses(address.host, address.port) != nullptr;
    if (!resolved && StoreClock::now() > resolved_by) {
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  if (!resolved && !cancelled) {
    throw InputError(kStoreWhere, "MASTER_ADDR=" + address.host + " does not resolve",
                     "a name or an address of rank 0's host that every host knows",
                     "check MASTER_ADDR");
  }
  throw CommunicationError(kStoreWhere, "no store answers at " + address.text(),
                           "rank 0, or the launcher, to serve it",
                           "start rank 0, and check MASTER_ADDR and MASTER_PORT");
}

std::unique_ptr<StoreChannel> connect_store(const StoreAddress& address,
                                            StoreClock::time_point deadline,
                                            const std::atomic<bool>& cancelled) {
  while (true) {
    FileDescriptor fd = connect_to(address, deadline, cancelled);
    if (auto channel = proved_channel(std::move(fd), address, deadline)) {
      return channel;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

} // namespace hasten::detail
