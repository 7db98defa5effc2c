// The key-value store in which the ranks of a world meet. One thread serves it while the object
// lives. store_channel.h has the protocol and the access check. The client is comm's SocketStore.
// The server does not read from a client that does not read its answers. So one client can make
// it keep at most one request and one answer of StoreChannel::kMaxFrame bytes each.
#pragma once

#include <memory>
#include <thread>

#include "hasten/base/store_channel.h"

namespace hasten::detail {

struct StoreLimits {
  /// Maximum number of admitted connections: of this user and root, or with the secret.
  size_t connections = 65'536;
  /// Maximum number of connections that have not proved the secret. One more ends the oldest.
  size_t strangers = 256;
  /// Time in which a connection must prove the secret.
  std::chrono::milliseconds proof{10'000};
  /// Maximum size of keys and values together. Bytes.
  size_t bytes = size_t{1} << 30;
};

/// Raises this process's limit of open descriptors to `wanted`, as far as the system allows.
void raise_descriptor_limit(size_t wanted);

class StoreServer {
 public:
  /// Listens at `address` and starts serving. An empty host means every interface. With port 0
  /// the system chooses the port. Raises this process's limit of open descriptors. Throws
  /// InputError if it cannot listen at the address.
  explicit StoreServer(StoreAddress address, StoreLimits limits = {});
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  /// The address at which this process reaches the server.
  const StoreAddress& address() const { return address_; }

 private:
  class Loop;

  StoreAddress address_;
  std::unique_ptr<Loop> loop_;
  std::thread thread_;
};

} // namespace hasten::detail
