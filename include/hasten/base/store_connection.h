// The client of a StoreServer: a connection that sends requests and waits for their answers.
// Threading: one thread at a time.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hasten/base/store_channel.h"

namespace hasten::detail {

class StoreConnection {
 public:
  /// late: the answer had not come at the deadline; later requests work. gone: the server is gone.
  enum class Outcome { answered, late, gone };

  /// Connects like connect_store().
  StoreConnection(StoreAddress address, StoreClock::time_point deadline,
                  const std::atomic<bool>& cancelled);

  const StoreAddress& address() const { return address_; }
  /// Blocks until the answer is there. `answer`: without its head; valid until the next request.
  /// Throws Error if the server refuses, and InputError for a request that is too long.
  Outcome request(StoreOp op, const std::vector<std::string_view>& texts,
                  std::optional<int64_t> number, StoreClock::time_point deadline,
                  StoreReader& answer);

 private:
  const StoreAddress address_;
  std::unique_ptr<StoreChannel> channel_; // null once the connection broke
  int64_t requests_ = 0;
};

} // namespace hasten::detail
