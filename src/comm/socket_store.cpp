#include "socket_store.h"

#include <c10/util/Exception.h>

#include <utility>

#include "hasten/base/error.h"

namespace hasten::detail {

using std::chrono::milliseconds;
using StoreValue = std::vector<uint8_t>;

std::string_view text_of(const StoreValue& value) {
  return {reinterpret_cast<const char*>(value.data()), value.size()};
}

StoreValue value_of(std::string_view text) { return {text.begin(), text.end()}; }

/// What follows a request's number.
struct SocketStore::Call {
  explicit Call(StoreOp op) { writer.number(static_cast<int64_t>(op)); }
  Call(StoreOp op, std::initializer_list<std::string_view> texts) : Call(op) {
    for (const std::string_view text : texts) {
      writer.text(text);
    }
  }
  Call(StoreOp op, const std::vector<std::string>& texts) : Call(op) {
    for (const std::string& text : texts) {
      writer.text(text);
    }
  }

  StoreWriter writer{};
};

SocketStore::SocketStore(StoreAddress address, StoreClock::time_point deadline,
                         const std::atomic<bool>& cancelled)
    : address_(std::move(address)), channel_(connect_store(address_, deadline, cancelled)) {}

c10::intrusive_ptr<c10d::Store> SocketStore::clone() {
  static const std::atomic<bool> never{false};
  auto copy = c10::make_intrusive<SocketStore>(address_,
                                               StoreClock::now() + std::chrono::seconds(30), never);
  copy->setTimeout(timeout_);
  return copy;
}

std::string SocketStore::request(const Call& call, milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(mutex_);
  StoreWriter frame;
  frame.number(++requests_);
  frame.bytes += call.writer.bytes;
  if (frame.bytes.size() > StoreChannel::kMaxFrame) {
    throw InputError("comm::store", "a message of " + std::to_string(frame.bytes.size()) + " bytes",
                     "at most " + std::to_string(StoreChannel::kMaxFrame),
                     "send data by a collective");
  }
  const auto deadline =
      timeout == kNoTimeout ? StoreClock::time_point::max() : StoreClock::now() + timeout;
  if (channel_ && !channel_->send(frame.bytes)) {
    channel_.reset();
  }
  std::string_view answer;
  while (channel_) {
    const StoreChannel::Next next = channel_->wait(answer, deadline);
    if (next == StoreChannel::Next::none) {
      C10_THROW_ERROR(DistStoreError, "no answer of the store at " + address_.text() + " within " +
                                          std::to_string(timeout.count()) + " ms");
    }
    if (next == StoreChannel::Next::broken) {
      channel_.reset();
      break;
    }
    StoreReader reader{answer};
    if (reader.number() != requests_) {
      continue; // of a call that has given up
    }
    if (reader.number() != 0) {
      throw Error("comm::store", reader.text());
    }
    return std::string(reader.rest);
  }
  C10_THROW_ERROR(DistNetworkError, "the store at " + address_.text() + " is gone");
}

void SocketStore::set(const std::string& key, const StoreValue& value) {
  request({StoreOp::set, {key, text_of(value)}}, timeout_);
}

StoreValue SocketStore::compareSet(const std::string& key, const StoreValue& expected,
                                   const StoreValue& desired) {
  const std::string answer =
      request({StoreOp::compare_set, {key, text_of(expected), text_of(desired)}}, timeout_);
  return value_of(StoreReader{answer}.text());
}

StoreValue SocketStore::get(const std::string& key) { return std::move(multiGet({key})[0]); }

int64_t SocketStore::add(const std::string& key, int64_t value) {
  Call call(StoreOp::add, {key});
  call.writer.number(value);
  const std::string answer = request(call, timeout_);
  return StoreReader{answer}.number();
}

bool SocketStore::deleteKey(const std::string& key) {
  const std::string answer = request({StoreOp::remove, {key}}, timeout_);
  return StoreReader{answer}.number() != 0;
}

bool SocketStore::check(const std::vector<std::string>& keys) {
  if (keys.empty()) {
    return true;
  }
  const std::string answer = request({StoreOp::check, keys}, timeout_);
  return StoreReader{answer}.number() != 0;
}

int64_t SocketStore::getNumKeys() {
  const std::string answer = request({StoreOp::count, {""}}, timeout_);
  return StoreReader{answer}.number();
}

void SocketStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void SocketStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  request({StoreOp::wait, keys}, timeout);
}

void SocketStore::append(const std::string& key, const StoreValue& value) {
  request({StoreOp::append, {key, text_of(value)}}, timeout_);
}

std::vector<StoreValue> SocketStore::multiGet(const std::vector<std::string>& keys) {
  const std::string answer = request({StoreOp::get, keys}, timeout_);
  StoreReader reader{answer};
  std::vector<StoreValue> values;
  for (size_t i = 0; i < keys.size(); ++i) {
    values.push_back(value_of(reader.text()));
  }
  return values;
}

void SocketStore::multiSet(const std::vector<std::string>& keys,
                           const std::vector<StoreValue>& values) {
  TORCH_CHECK_VALUE(keys.size() == values.size(), "multiSet: a value for each key");
  Call call(StoreOp::set);
  for (size_t i = 0; i < keys.size(); ++i) {
    call.writer.text(keys[i]);
    call.writer.text(text_of(values[i]));
  }
  if (!keys.empty()) {
    request(call, timeout_);
  }
}

} // namespace hasten::detail
