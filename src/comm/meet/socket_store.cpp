#include "socket_store.h"

#include <c10/util/Exception.h>

#include <utility>

namespace hasten::detail {

using std::chrono::milliseconds;
using StoreValue = std::vector<uint8_t>;

std::string_view text_of(const StoreValue& value) {
  return {reinterpret_cast<const char*>(value.data()), value.size()};
}

StoreValue value_of(std::string_view text) { return {text.begin(), text.end()}; }

std::vector<std::string_view> views_of(const std::vector<std::string>& texts) {
  return {texts.begin(), texts.end()};
}

SocketStore::SocketStore(StoreAddress address, StoreClock::time_point deadline,
                         const std::atomic<bool>& cancelled)
    : connection_(std::move(address), deadline, cancelled) {}

c10::intrusive_ptr<c10d::Store> SocketStore::clone() {
  static const std::atomic<bool> never{false};
  auto copy = c10::make_intrusive<SocketStore>(connection_.address(),
                                               StoreClock::now() + std::chrono::seconds(30), never);
  copy->setTimeout(timeout_);
  return copy;
}

std::string SocketStore::request(StoreOp op, const std::vector<std::string_view>& texts,
                                 std::optional<int64_t> number, std::optional<milliseconds> limit) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const milliseconds timeout = limit.value_or(timeout_);
  const auto deadline =
      timeout == kNoTimeout ? StoreClock::time_point::max() : StoreClock::now() + timeout;
  StoreReader answer;
  switch (connection_.request(op, texts, number, deadline, answer)) {
    case StoreConnection::Outcome::answered:
      return std::string(answer.rest);
    case StoreConnection::Outcome::late:
      C10_THROW_ERROR(DistStoreError, "the store at " + connection_.address().text() +
                                          " has not answered within " +
                                          std::to_string(timeout.count()) + " ms");
    case StoreConnection::Outcome::gone:
      break;
  }
  C10_THROW_ERROR(DistNetworkError, "the store at " + connection_.address().text() + " is gone");
}

int64_t SocketStore::ask(StoreOp op, const std::vector<std::string_view>& texts,
                         std::optional<int64_t> number) {
  const std::string answer = request(op, texts, number);
  return StoreReader{answer}.number();
}

void SocketStore::set(const std::string& key, const StoreValue& value) {
  request(StoreOp::set, {key, text_of(value)});
}

StoreValue SocketStore::compareSet(const std::string& key, const StoreValue& expected,
                                   const StoreValue& desired) {
  const std::string answer =
      request(StoreOp::compare_set, {key, text_of(expected), text_of(desired)});
  return value_of(StoreReader{answer}.text());
}

StoreValue SocketStore::get(const std::string& key) { return std::move(multiGet({key})[0]); }

int64_t SocketStore::add(const std::string& key, int64_t value) {
  return ask(StoreOp::add, {key}, value);
}

bool SocketStore::deleteKey(const std::string& key) { return ask(StoreOp::remove, {key}) != 0; }

bool SocketStore::check(const std::vector<std::string>& keys) {
  return keys.empty() || ask(StoreOp::check, views_of(keys)) != 0;
}

int64_t SocketStore::getNumKeys() { return ask(StoreOp::count, {""}); }

void SocketStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void SocketStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  request(StoreOp::wait, views_of(keys), {}, timeout);
}

void SocketStore::append(const std::string& key, const StoreValue& value) {
  request(StoreOp::append, {key, text_of(value)});
}

std::vector<StoreValue> SocketStore::multiGet(const std::vector<std::string>& keys) {
  const std::string answer = request(StoreOp::get, views_of(keys));
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
  std::vector<std::string_view> texts;
  for (size_t i = 0; i < keys.size(); ++i) {
    texts.insert(texts.end(), {keys[i], text_of(values[i])});
  }
  if (!keys.empty()) {
    request(StoreOp::set, texts);
  }
}

} // namespace hasten::detail
