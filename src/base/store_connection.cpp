#include "hasten/base/store_connection.h"

#include <utility>

#include "hasten/base/error.h"

namespace hasten::detail {

StoreConnection::StoreConnection(StoreAddress address, StoreClock::time_point deadline,
                                 const std::atomic<bool>& cancelled)
    : address_(std::move(address)), channel_(connect_store(address_, deadline, cancelled)) {}

StoreConnection::Outcome StoreConnection::request(StoreOp op,
                                                  const std::vector<std::string_view>& texts,
                                                  std::optional<int64_t> number,
                                                  StoreClock::time_point deadline,
                                                  StoreReader& answer) {
  StoreWriter frame;
  frame.number(++requests_);
  frame.number(static_cast<int64_t>(op));
  for (const std::string_view text : texts) {
    frame.text(text);
  }
  if (number) {
    frame.number(*number);
  }
  if (frame.bytes.size() > StoreChannel::kMaxFrame) {
    throw InputError("comm::store", "a message of " + std::to_string(frame.bytes.size()) + " bytes",
                     "at most " + std::to_string(StoreChannel::kMaxFrame),
                     "send data by a collective");
  }
  if (channel_ && !channel_->send(frame.bytes)) {
    channel_.reset();
  }
  std::string_view bytes;
  while (channel_) {
    const StoreChannel::Next next = channel_->wait(bytes, deadline);
    if (next == StoreChannel::Next::none) {
      return Outcome::late;
    }
    if (next == StoreChannel::Next::broken) {
      channel_.reset();
      break;
    }
    answer = {bytes};
    if (answer.number() != requests_) {
      continue; // the answer to a request that was late
    }
    if (answer.number() != 0) {
      throw Error("comm::store", std::string(answer.text()));
    }
    return Outcome::answered;
  }
  return Outcome::gone;
}

} // namespace hasten::detail
