// The client of a StoreServer (base/store_server.h), as a c10d store. Gloo and exchanges between
// ranks use it.
// Threading: any thread. One call runs at a time, even while it waits.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <mutex>
#include <optional>

#include "hasten/base/store_connection.h"

namespace hasten::detail {

/// Behaves like c10d's stores. Each call ends within the store's timeout (0: none). It throws
/// DistStoreError if a key or the server's answer has not arrived by then (later calls still
/// work), DistNetworkError if the server is gone, and Error if the server refuses. Does not have
/// queues and listKeys().
class SocketStore final : public c10d::Store {
 public:
  using Store::compareSet;
  using Store::set;

  /// Connects like connect_store().
  SocketStore(StoreAddress address, StoreClock::time_point deadline,
              const std::atomic<bool>& cancelled);

  c10::intrusive_ptr<Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }

 private:
  /// Returns the answer without its head. `limit` replaces the store's timeout.
  std::string request(StoreOp op, const std::vector<std::string_view>& texts,
                      std::optional<int64_t> number = {},
                      std::optional<std::chrono::milliseconds> limit = {});
  /// Like request(), for an answer that is a number.
  int64_t ask(StoreOp op, const std::vector<std::string_view>& texts,
              std::optional<int64_t> number = {});

  std::mutex mutex_; // guards the connection
  StoreConnection connection_;
};

} // namespace hasten::detail
