// One connection to the store in which the ranks of a world meet, as both sides see it:
// frames over a socket, and who may be at the other end.
//
// On one host that socket is an abstract Unix one: each side asks the kernel for the
// other's user and goes on with its own and root's alone, before a byte is read; a kill
// leaves nothing behind. Over TCP both sides prove that they know the run's secret, by a
// keyed hash over a nonce of each; then every frame carries one of its direction, number
// and bytes, under a key of this connection. Nothing is encrypted.
//
// A frame is 8 bytes of length (little-endian), the bytes, and over TCP 32 bytes of hash.
// Until the other side is known it has at most 128 bytes. The proof is three frames:
//   client: magic, nonce   server: nonce, hash 's'   client: hash 'c'
// The server answers it by an empty frame.
// Threading: one thread at a time. Throws: nothing, unless it says so.
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

#include "hasten/base/world.h"

struct addrinfo;

namespace hasten::detail {

using StoreClock = std::chrono::steady_clock;
using StoreKey = std::array<unsigned char, 32>;

/// The key by HASTEN_SECRET, or by the file HASTEN_SECRET_FILE names; nothing where
/// neither is set. Throws InputError for a secret below 16 bytes, and for a file that
/// cannot be read or that others may read (its mode is not 0600 or 0400).
std::optional<StoreKey> store_key_from_environment();

/// crypto_auth of libsodium over all parts.
StoreKey keyed_hash(const StoreKey& key, std::initializer_list<std::string_view> parts);

/// Where a store listens.
struct StoreAddress {
  /// Name of an abstract Unix socket of this network namespace; empty: TCP.
  std::string socket{};
  std::string host{};
  int port = 0;
  /// Of the secret; zeros where the run has none, which admits everybody.
  StoreKey key{};

  /// "Unix socket @name", "host:port".
  std::string text() const;
};

/// A name that nobody else has: `start` and 128 random bits.
std::string unique_socket_name(const std::string& start);

/// What the name of the socket begins with at which hasten launch serves the world of
/// this MASTER_PORT, so that a world started inside one does not take it for its own.
std::string launcher_socket_start(int master_port);
/// That name where HASTEN_STORE_SOCKET is `world`'s; else empty.
std::string launcher_socket(const World& world);

std::pair<sockaddr_un, socklen_t> abstract_address(const std::string& name);

/// The user at the other end of a Unix socket; nothing where the kernel does not say.
std::optional<unsigned> socket_peer_uid(int fd);
/// True for this process's user and root.
bool own_or_root(std::optional<unsigned> uid);

/// What a host's name stands for, a list; null where it does not resolve.
std::shared_ptr<addrinfo> host_addresses(const std::string& host, int port);

// What a client asks. Requests: number, what, then keys and values; get and wait answer
// once every key is there, all others at once. Answers: the request's number, 0, and
// the result; or 1 and why it is refused.
enum class StoreOp : int64_t {
  set, // key, value, …
  get, // keys: values
  wait, // keys
  check, // keys: 1 where all are there
  add, // key, number: sum
  compare_set, // key, expected, desired: value
  append, // key, value
  remove, // key: 1 where it was there
  count // number of keys
};

/// Numbers and texts in a frame.
struct StoreWriter {
  std::string bytes{};
  void number(int64_t value);
  void text(std::string_view text);
};
struct StoreReader {
  std::string_view rest{};
  bool ok = true; // false once more was read than was there
  int64_t number();
  std::string_view text();
};

class StoreChannel {
 public:
  static constexpr size_t kMaxFrame = size_t{64} << 20;
  enum class Next { none, frame, broken };
  enum class Proof { right, wrong, none };

  /// Takes `fd` over, which does not block.
  explicit StoreChannel(int fd) : fd_(fd) {}
  ~StoreChannel();
  StoreChannel(const StoreChannel&) = delete;
  StoreChannel& operator=(const StoreChannel&) = delete;

  int fd() const { return fd_; }
  /// Reads what has come, some at a time; false where nothing more will.
  bool receive();
  /// Takes the next whole frame, valid until the next call of receive() or next().
  /// broken: it is too long, or not from whom it should be.
  Next next(std::string_view& frame);
  /// next(), after sending what is left and waiting until `deadline` for one.
  Next wait(std::string_view& frame, StoreClock::time_point deadline);
  /// Queues a frame and sends what goes at once; false where nobody is there any more.
  bool send(std::string_view frame);
  bool flush();
  /// True where something is left to send.
  bool blocked() const { return !out_.empty(); }

  /// The kernel has said who the other is: frames may be long, and need no hash.
  void trust() { limit_ = kMaxFrame; }
  bool trusted() const { return limit_ == kMaxFrame; }
  /// The server's side of the proof: takes a frame of it. False: not one of ours.
  bool admit(std::string_view frame, const StoreKey& key);
  /// The client's. wrong: the other has another secret; none: it did not answer.
  Proof prove(const StoreKey& key, StoreClock::time_point deadline);

 private:
  StoreKey frame_hash(std::string_view frame, char direction, uint64_t& number);

  int fd_ = -1;
  size_t limit_ = 128;
  std::string in_{};
  size_t taken_ = 0; // of in_
  std::string out_{};
  std::string nonces_{}; // client's, server's
  bool sealed_ = false;
  StoreKey session_{};
  char own_ = '<'; // direction of what this side sends
  uint64_t sent_ = 0; // frames
  uint64_t received_ = 0;
};

/// One attempt to connect; a descriptor that does not block, or -1. A second an address
/// of the host at most.
int try_connect(const StoreAddress& address);

/// Connects to `address` as soon as somebody listens there. Blocks until then, until
/// `deadline` or until `cancelled`. Throws CommunicationError where nobody listens,
/// InputError where the host's name has not resolved for 10 s.
int connect_to(const StoreAddress& address, StoreClock::time_point deadline,
               const std::atomic<bool>& cancelled);

/// connect_to(), and proves what is to be proved. Throws InputError where the
/// store is another user's or has another secret, too.
std::unique_ptr<StoreChannel> connect_store(const StoreAddress& address,
                                            StoreClock::time_point deadline,
                                            const std::atomic<bool>& cancelled);

} // namespace hasten::detail
