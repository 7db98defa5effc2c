// The key-value store in which the ranks of a world meet: served by one thread, for as
// long as the object lives. Who may use it, and how, says store_channel.h; the client is
// comm's SocketStore.
// A client that does not read is not read from; what it may make the server keep is a
// request and an answer, of at most StoreChannel::kMaxFrame each.
#pragma once

#include <memory>
#include <thread>

#include "hasten/base/store_channel.h"

namespace hasten::detail {

struct StoreLimits {
  /// Connections of this user, root and whoever knows the secret.
  size_t connections = 65'536;
  /// Connections that have not proved yet that they know it; one more ends the oldest.
  size_t strangers = 256;
  /// What a connection may take to prove it.
  std::chrono::milliseconds proof{10'000};
  /// Keys and values together. Bytes.
  size_t bytes = size_t{1} << 30;
};

/// Lets this process open `wanted` descriptors, or as many as it may.
void raise_descriptor_limit(size_t wanted);

class StoreServer {
 public:
  /// Listens at `address` and serves from now on. An empty host is every interface,
  /// port 0 one that the system chooses. Raises this process's limit of descriptors to
  /// what it may be. Throws InputError where the address cannot be listened at.
  explicit StoreServer(StoreAddress address, StoreLimits limits = {});
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  /// Where this process reaches it.
  const StoreAddress& address() const { return address_; }

 private:
  class Loop;

  StoreAddress address_;
  std::unique_ptr<Loop> loop_;
  std::thread thread_;
};

} // namespace hasten::detail
