// One connection to the store in which the ranks of a world meet, for client and server: frames
// over a socket, and a check of who is at the other end.
//
// On one host the socket is an abstract Unix socket, which leaves no file. Before it reads a byte,
// each side asks the kernel for the other's user and accepts only its own user and root. Over TCP
// both sides prove that they know the run's secret: each sends a nonce, and a keyed hash of both.
// From then on every frame has a keyed hash of its direction, number and bytes, with a key of this
// connection. Nothing is encrypted.
//
// A frame is 8 bytes of length (little-endian), the bytes, and over TCP 32 bytes of hash.
// It has at most 128 bytes until the other side is known. The proof is three frames:
//   client: magic, nonce   server: nonce, hash 's'   client: hash 'c'
// The server replies to the third with an empty frame.
// Threading: one thread at a time. Throws nothing unless a function says so.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <sys/un.h>

#include "hasten/base/files.h"
#include "hasten/base/world.h"

struct addrinfo;

namespace hasten::detail {

using StoreClock = std::chrono::steady_clock;
using StoreKey = std::array<unsigned char, 32>;

/// The key from HASTEN_SECRET, or from the file that HASTEN_SECRET_FILE names. Empty if neither
/// is set. Throws InputError for a secret of less than 16 bytes, and for a file that cannot be
/// read, belongs to another user or has another mode than 0600 or 0400.
std::optional<StoreKey> store_key_from_environment();

/// crypto_auth of libsodium over all parts.
StoreKey keyed_hash(const StoreKey& key, std::initializer_list<std::string_view> parts);

/// The address at which a store listens.
struct StoreAddress {
  /// Name of an abstract Unix socket of this network namespace; empty: TCP.
  std::string socket{};
  std::string host{};
  int port = 0;
  /// Key derived from the secret. Zeros if the run has no secret: everybody is then admitted.
  StoreKey key{};

  /// "Unix socket @name", "host:port", "[fe80::1]:port".
  std::string text() const;
};

/// Reads "HOST:PORT"; an IPv6 address has brackets. Throws InputError for another form.
StoreAddress parse_endpoint(std::string_view text);

/// A unique name: `start` and 128 random bits.
std::string unique_socket_name(const std::string& start);

/// The start of what names, in HASTEN_STORE_SOCKET, the socket at which hasten launch serves the world
/// with this MASTER_PORT. By it a world that is started inside another one does not use the outer
/// one's store.
std::string launcher_socket_start(int master_port);
/// The value of HASTEN_STORE_SOCKET for ranks of a launcher whose store is at `store`.
std::string launcher_socket_text(int master_port, const StoreAddress& store);
/// The address that HASTEN_STORE_SOCKET names, if it is that of `world`: a Unix socket, or over
/// several hosts a TCP socket, with the key from the environment.
std::optional<StoreAddress> launcher_store(const World& world);

std::pair<sockaddr_un, socklen_t> abstract_address(const std::string& name);

/// The user at the other end of a Unix socket. Empty if the kernel does not report it.
std::optional<unsigned> socket_peer_uid(int fd);
/// True for this process's user and root.
bool own_or_root(std::optional<unsigned> uid);

/// The addresses of a host, as a list. Null if the name does not resolve.
std::shared_ptr<addrinfo> host_addresses(const std::string& host, int port);

// Requests of a client: number, operation, then keys and values. get and wait are answered when
// every key exists, all others immediately. An answer is the request's number, then 0 and the
// result, or 1 and the reason for refusing it.
enum class StoreOp : int64_t {
  set, // key, value, …
  get, // keys: values
  wait, // keys
  check, // keys: 1 if all exist
  add, // key, number: sum
  compare_set, // key, expected, desired: value
  append, // key, value
  remove, // key: 1 if it existed
  count // number of keys
};

/// Write and read numbers and texts of a frame.
struct StoreWriter {
  std::string bytes{};
  void number(int64_t value);
  void text(std::string_view text);
};
struct StoreReader {
  std::string_view rest{};
  bool ok = true; // false after reading more than there was
  int64_t number();
  std::string_view text();
};

class StoreChannel {
 public:
  static constexpr size_t kMaxFrame = size_t{64} << 20;
  enum class Next { none, frame, broken };
  enum class Proof { right, wrong, none };

  /// `fd` is non-blocking.
  explicit StoreChannel(FileDescriptor fd) : fd_(std::move(fd)) {}

  int fd() const { return fd_.get(); }
  /// Reads what has arrived, up to a limit. False if the connection has ended.
  bool receive();
  /// Takes the next complete frame. It is valid until the next call of receive() or next().
  /// broken: the frame is too long or has a wrong hash.
  Next next(std::string_view& frame);
  /// Sends what is queued, then waits for a frame until `deadline`.
  Next wait(std::string_view& frame, StoreClock::time_point deadline);
  /// Queues a frame and sends what the socket takes. False if the other side is gone.
  bool send(std::string_view frame);
  bool flush();
  /// True while something is queued.
  bool blocked() const { return !out_.empty(); }

  /// The kernel has named the other side's user: allow long frames, without hashes.
  void trust() { limit_ = kMaxFrame; }
  bool trusted() const { return limit_ == kMaxFrame; }
  /// The server's side of the proof: handles one of its frames. False if the client failed it.
  bool admit(std::string_view frame, const StoreKey& key);
  /// The client's side. wrong: the server has another secret. none: it did not answer.
  Proof prove(const StoreKey& key, StoreClock::time_point deadline);

 private:
  StoreKey frame_hash(std::string_view frame, char direction, uint64_t& number);

  FileDescriptor fd_;
  size_t limit_ = 128;
  std::string in_{};
  size_t taken_ = 0; // bytes of in_ that next() has returned
  std::string out_{};
  std::string nonces_{}; // the client's, then the server's
  bool sealed_ = false;
  StoreKey session_{};
  char own_ = '<'; // direction of the frames that this side sends
  uint64_t sent_ = 0; // frames
  uint64_t received_ = 0;
};

/// Tries once to connect, at most one second for each address of the host. Returns a
/// non-blocking descriptor, or none.
FileDescriptor try_connect(const StoreAddress& address);

/// Connects to `address` and blocks until a store listens there, until `deadline` or until
/// `cancelled`. Throws CommunicationError if no store answers, and InputError if the host's
/// name does not resolve for 10 s.
FileDescriptor connect_to(const StoreAddress& address, StoreClock::time_point deadline,
                          const std::atomic<bool>& cancelled);

/// Like connect_to(), then checks the other side. Also throws InputError if the store belongs
/// to another user or has another secret.
std::unique_ptr<StoreChannel> connect_store(const StoreAddress& address,
                                            StoreClock::time_point deadline,
                                            const std::atomic<bool>& cancelled);

} // namespace hasten::detail
