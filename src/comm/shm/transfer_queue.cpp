#include "transfer_queue.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/base/world.h"

namespace hasten::detail {

using std::chrono::milliseconds;

constexpr milliseconds kSleep{50};
// About 20 microseconds. A peer that is later is worth a futex.
constexpr int kSpins = 1000;

void TransferQueue::Item::on_end(std::function<void(std::exception_ptr)> f) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!why) {
      then.push_back(std::move(f));
      return;
    }
  }
  f(*why);
}

std::optional<std::exception_ptr> TransferQueue::Item::outcome() const {
  const std::lock_guard<std::mutex> lock(mutex);
  return why;
}

TransferQueue::TransferQueue(int rank, const std::vector<char*>& memory, std::vector<int> names,
                             std::shared_ptr<void> owner)
    : owner_(std::move(owner)),
      rank_(rank),
      names_(std::move(names)),
      places_(rank, static_cast<int>(names_.size())),
      stages_(rank, memory),
      // Who spins takes a core, so there is one for each rank.
      spins_(allowed_cores() >= stages_.world_size() ? kSpins : 0),
      thread_([this] { run(); }) {}

TransferQueue::~TransferQueue() { stop(); }

void TransferQueue::stop() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  if (std::exchange(stopping_, true)) {
    return;
  }
  wanted_.notify_all();
  changed_.wait(lock, [&] { return !driven_; });
  driven_ = true; // for good: nobody moves anything any more
  lock.unlock();
  if (thread_.joinable()) {
    thread_.join();
  }
  error_ = std::make_exception_ptr(std::runtime_error("the group is closed"));
  progress(true);
}

std::shared_ptr<TransferQueue::Item> TransferQueue::start(TransferArguments arguments) {
  if (at_start != nullptr) {
    at_start();
  }
  auto item = std::make_shared<Item>(std::move(arguments), rank_, stages_.world_size(), places_);
  const bool small = item->transfer.is_small();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) {
      throw std::runtime_error("the group is closed");
    }
    new_.push_back(item);
    if (driven_) {
      return item; // the thread that drives will find the transfer
    }
    driven_ = true;
  }
  if (small) {
    progress(false);
  }
  stop_driving();
  return item;
}

void TransferQueue::drive(const Item& item, milliseconds limit) {
  const auto until = std::chrono::steady_clock::now() + limit;
  const auto time_left = [&] {
    return std::chrono::duration_cast<milliseconds>(until - std::chrono::steady_clock::now());
  };
  std::unique_lock<std::mutex> lock(mutex_);
  ++waiters_;
  while (!item.has_ended()) {
    if (driven_) {
      if (limit.count() == 0 ||
          !changed_.wait_until(lock, until, [&] { return item.has_ended() || !driven_; })) {
        break;
      }
      continue;
    }
    driven_ = true;
    lock.unlock();
    progress(limit.count() > 0);
    const Stages::Blocked blocked = blocked_;
    stop_driving();
    if (item.has_ended() || time_left().count() <= 0) {
      lock.lock();
      break;
    }
    stages_.sleep(blocked, spins_, std::min(kSleep, time_left()));
    lock.lock();
  }
  if (--waiters_ == 0 && needs_thread()) {
    wanted_.notify_one();
  }
}

void TransferQueue::progress_in_thread() {
  const std::lock_guard<std::mutex> lock(mutex_);
  progress_in_thread_ = true;
  wanted_.notify_one();
}

// A peer that has published as much as its memory holds waits until this rank has read some of it.
bool TransferQueue::peers_wait() const {
  size_t unread = 0; // bytes, at most, of any rank
  for (const auto& item : queue_) {
    if (!item->transfer.is_small() || item->published < item->transfer.stages()) {
      return true;
    }
    unread += item->transfer.most_bytes();
  }
  return unread > Stages::kRing - Stages::kMaximum; // a gap before the ring's end
}

bool TransferQueue::needs_thread() const {
  return unfinished_ || progress_in_thread_ || !new_.empty();
}

void TransferQueue::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    wanted_.wait(lock, [&] { return stopping_ || (needs_thread() && !driven_ && waiters_ == 0); });
    if (stopping_) {
      return;
    }
    driven_ = true;
    lock.unlock();
    progress(true);
    const Stages::Blocked blocked = blocked_;
    const bool empty = queue_.empty();
    stop_driving();
    if (!empty) {
      stages_.sleep(blocked, 0, kSleep);
    }
    lock.lock();
  }
}

void TransferQueue::stop_driving() {
  std::unique_lock<std::mutex> lock(mutex_);
  // Small transfers that came meanwhile are published now.
  while (!new_.empty() && new_.front()->transfer.is_small()) {
    lock.unlock();
    progress(false);
    lock.lock();
  }
  driven_ = false;
  progress_in_thread_ = progress_in_thread_ && !(queue_.empty() && new_.empty());
  unfinished_ = peers_wait();
  if (waiters_ > 0 || stopping_) {
    changed_.notify_all();
  } else if (needs_thread()) {
    wanted_.notify_one();
  }
}

void TransferQueue::progress(bool all) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::ranges::move(new_, std::back_inserter(queue_));
    new_.clear();
  }
  blocked_ = {};
  while (!queue_.empty()) {
    bool moved = false;
    try {
      moved = !error_ && advance_all(all);
    } catch (...) { // the ranks differ
      error_ = std::current_exception();
    }
    const Item& first = *queue_.front();
    if (error_ || first.transfer.ends_at(first.consumed)) {
      end_first();
    } else if (!moved) {
      return;
    }
  }
}

bool TransferQueue::advance_all(bool all) {
  bool moved = false;
  Stages::Blocked first_blocked;
  for (size_t i = 0; i < queue_.size(); ++i) {
    Item& item = *queue_[i];
    if (!all && !item.transfer.is_small()) {
      break;
    }
    while (advance(item, i == 0)) {
      moved = true;
    }
    if (i == 0) { // the others wait for it
      first_blocked = blocked_;
    }
    if (!item.transfer.ends_at(item.published)) {
      break; // the next transfer's stages come after all of its stages
    }
  }
  blocked_ = first_blocked;
  return moved;
}

bool TransferQueue::advance(Item& item, bool first) {
  const bool published = publish_stage(item);
  return (first && consume_stage(item)) || published;
}

bool TransferQueue::publish_stage(Item& item) {
  const Transfer& transfer = item.transfer;
  const uint32_t stage = item.published;
  if (stage >= transfer.stages() || (transfer.closes(stage) && item.consumed != stage)) {
    return false;
  }
  if (stage == 0) {
    item.first = stages_.published();
  }
  const bool follows = transfer.follows(stage);
  if (follows && !stages_.arrived(item.first + stage - 1)) {
    blocked_ = stages_.blocked();
    return false;
  }
  if (follows && stage == 1) { // its first stage's bytes are read here
    require_equal(item);
  }
  char* const to = stages_.reserve(transfer.bytes(stage));
  if (to == nullptr) {
    blocked_ = stages_.blocked();
    return false;
  }
  item.transfer.publish(stage, to,
                        follows ? payloads(item.first + stage - 1) : Transfer::Payloads());
  stages_.publish(transfer.text(), transfer.text_hash(), places_.take_freed());
  ++item.published;
  return true;
}

bool TransferQueue::consume_stage(Item& item) {
  const uint32_t stage = item.consumed;
  const bool precedes = item.transfer.precedes(stage);
  if (stage + (precedes ? 1 : 0) >= item.published) {
    return false;
  }
  if (!stages_.arrived(item.first + stage)) {
    blocked_ = stages_.blocked();
    return false;
  }
  if (stage == 0) {
    require_equal(item);
  }
  item.transfer.consume(stage, payloads(item.first + stage));
  for (int i = 0; i < stages_.world_size(); ++i) {
    places_.forget(i, stages_.entry(i, item.first + stage).freed);
  }
  stages_.consume();
  ++item.consumed;
  return true;
}

Transfer::Payloads TransferQueue::payloads(uint32_t stage) const {
  Transfer::Payloads all;
  for (int i = 0; i < stages_.world_size(); ++i) {
    all.push_back(stages_.bytes(i, stage));
  }
  return all;
}

/// "operation\ntensors": only what differs, or both.
static std::string difference(std::string_view text, std::string_view other) {
  const size_t end = text.find('\n');
  if (end == std::string_view::npos) {
    return std::string(text);
  }
  const std::string_view operation = text.substr(0, end);
  const std::string_view tensors = text.substr(end + 1);
  if (operation == other.substr(0, other.find('\n'))) {
    return std::string(tensors);
  }
  return std::string(operation) + (tensors.empty() ? "" : " with ") + std::string(tensors);
}

void TransferQueue::require_equal(const Item& item) const {
  const auto text = [&](int rank) {
    const StageMemory::Entry& entry = stages_.entry(rank, item.first);
    return std::string_view(entry.text, std::min<size_t>(entry.text_bytes, sizeof(entry.text)));
  };
  for (int i = 1; i < stages_.world_size(); ++i) {
    if (stages_.entry(i, item.first).text_hash != stages_.entry(0, item.first).text_hash) {
      const auto has = [&](int rank, int other) {
        return "rank " + std::to_string(names_[static_cast<size_t>(rank)]) + " has " +
               difference(text(rank), text(other));
      };
      throw RanksDiffer(has(i, 0) + ", " + has(0, i));
    }
  }
}

void TransferQueue::end_first() {
  const std::shared_ptr<Item> item = std::move(queue_.front());
  queue_.pop_front();
  item->transfer.release();
  std::vector<std::function<void(std::exception_ptr)>> then; // called without the mutex
  {
    const std::lock_guard<std::mutex> lock(item->mutex);
    item->why = error_;
    then.swap(item->then);
  }
  for (const auto& f : then) {
    f(error_);
  }
  then.clear(); // and what they keep
  const std::lock_guard<std::mutex> lock(mutex_);
  item->ended.store(true, std::memory_order_release);
  if (waiters_ > 0) {
    changed_.notify_all();
  }
}

/// Throws the reason of the first rank that has one.
static void throw_reason(const std::vector<nlohmann::json>& all, const std::vector<int>& names) {
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].is_string()) {
      throw Error("comm::share_memory",
                  "rank " + std::to_string(names[i]) + ": " + all[i].get<std::string>());
    }
  }
}

/// What `make` returns, or the text of its exception.
template <typename Make>
nlohmann::json or_reason(const Make& make) {
  try {
    return make();
  } catch (const Error& error) {
    return std::string(error.text());
  } catch (const c10::Error& error) { // over a MemoryLimit
    return std::string(error.what_without_backtrace());
  }
}

std::vector<std::shared_ptr<TransferQueue>> share_memory(int rank, const std::vector<int>& names,
                                                         const ExchangeJson& exchange,
                                                         size_t queues) {
  std::unique_ptr<SharedMemory> own;
  const std::vector<nlohmann::json> addresses = exchange(or_reason([&]() -> nlohmann::json {
    own = std::make_unique<SharedMemory>(Stages::kBytes * queues);
    return own->address();
  }));
  throw_reason(addresses, names);
  const auto kept = std::make_shared<std::vector<std::unique_ptr<SharedMemory>>>();
  auto& all = *kept;
  throw_reason(
      exchange(or_reason([&]() -> nlohmann::json {
        for (const nlohmann::json& address : addresses) {
          all.push_back(std::cmp_equal(all.size(), rank)
                            ? std::move(own)
                            : std::make_unique<SharedMemory>(address.get<SharedMemoryAddress>()));
        }
        return true;
      })),
      names);
  all[static_cast<size_t>(rank)]->hide();
  std::vector<std::shared_ptr<TransferQueue>> made;
  for (size_t i = 0; i < queues; ++i) {
    made.push_back(std::make_shared<TransferQueue>(
        rank, mapped(all, [i](const auto& one) { return one->data() + i * Stages::kBytes; }), names,
        kept));
  }
  return made;
}

} // namespace hasten::detail
