#include "group_core.h"

#include <c10/util/Synchronized.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <thread>
#include <utility>

#include "hasten/base/process.h"
#include "hasten/base/recorded_error.h"
#include "hasten/base/text.h"
#include "hasten/core/memory.h"

namespace hasten::detail {

using std::chrono::milliseconds;

// How many operations a group remembers. Fully sharded models have hundreds for each rank of the
// world. 40 bytes each.
constexpr size_t kKnownOperations = 1 << 20;

/// The fix for ranks that are in different operations.
constexpr const char* kSameOperations =
    "run the same operations in the same order, with the same shapes and dtypes, on all ranks";

CommunicatorOptions with_environment(CommunicatorOptions options) {
  const auto check = environment_value("HASTEN_COMM_CHECK");
  if (check && check != "0") {
    options.check_shapes = ShapeCheck::always;
  } else if (check && options.check_shapes == ShapeCheck::first) {
    options.check_shapes = ShapeCheck::never;
  }
  return options;
}

static std::vector<int> members_or_all(std::vector<int> members, int world_size) {
  if (members.empty()) {
    members.resize(static_cast<size_t>(world_size));
    std::iota(members.begin(), members.end(), 0);
  }
  return members;
}

GroupCore::GroupCore(std::shared_ptr<WorldLink> world_link, const CommunicatorOptions& group,
                     std::vector<int> of)
    : link(std::move(world_link)),
      options(with_environment(group)),
      members(members_or_all(std::move(of), link->world().world_size)),
      key(link->add_group(group.name, members)),
      rank(static_cast<int>(std::ranges::find(members, link->world().rank) - members.begin())),
      world_size(static_cast<int>(members.size())),
      all_(members_or_all({}, world_size)),
      progress_(link->liveness().add_group(key)) {}

uint64_t GroupCore::enter(const std::string& operation, const std::string& tensors) {
  check(operation);
  const std::lock_guard<std::mutex> lock(progress_->mutex);
  progress_->operation = operation;
  progress_->tensors = tensors;
  return ++progress_->sequence;
}

uint64_t GroupCore::enter_equal(const std::string& operation, const std::string& tensors) {
  const uint64_t sequence = enter(operation, tensors);
  bool compare = options.check_shapes == ShapeCheck::always;
  if (options.check_shapes == ShapeCheck::first) {
    // All ranks have done the same operations so far, so they agree on what is new.
    const std::string what = operation + " " + tensors;
    compare = known_.insert(XXH3_64bits(what.data(), what.size())).second;
    if (known_.size() > kKnownOperations) {
      known_.clear();
    }
  }
  if (compare) {
    check_equal(operation, sequence, tensors);
  }
  return sequence;
}

void GroupCore::check_equal(const std::string& operation, uint64_t sequence,
                            const std::string& tensors) {
  require_equal(operation,
                mapped(exchange(operation, sequence, tensors),
                       [](const auto& text) { return text.template get<std::string>(); }),
                all_);
}

void GroupCore::require_equal(const std::string& operation, const std::vector<std::string>& texts,
                              const std::vector<int>& among) {
  const auto other =
      std::ranges::find_if(texts, [&](const std::string& text) { return text != texts[0]; });
  if (other != texts.end()) {
    const auto has = [&](size_t i) {
      return "rank " + std::to_string(link->launch_rank(members[static_cast<size_t>(among[i])])) +
             " has " + texts[i];
    };
    fail(operation, has(static_cast<size_t>(other - texts.begin())) + ", " + has(0),
         kSameOperations);
  }
}

ValueExchange exchange_values(const std::string& prefix, int rank, int world_size,
                              StoreBytes value) {
  std::vector<std::string> keys; // of the others than the first
  for (int i = 1; i < world_size; ++i) {
    keys.push_back(prefix + "/" + std::to_string(i));
  }
  return [prefix, keys, rank, value = std::move(value), written = false](
             c10d::Store& store,
             const std::atomic<bool>& cancelled) mutable -> std::optional<std::vector<StoreBytes>> {
    if (!std::exchange(written, true) && rank > 0) {
      store.set(keys[static_cast<size_t>(rank - 1)], value);
    }
    if (keys.empty()) {
      return std::vector<StoreBytes>{value};
    }
    if (!store.check(rank > 0 ? std::vector<std::string>{prefix} : keys)) {
      return cancelled ? std::optional(std::vector<StoreBytes>()) : std::nullopt;
    }
    if (rank > 0) {
      const nlohmann::json all = nlohmann::json::from_cbor(store.get(prefix));
      if (store.add(prefix + "/read", 1) == std::ssize(keys)) {
        store.deleteKey(prefix);
        store.deleteKey(prefix + "/read");
      }
      return mapped(all, [](const auto& one) -> StoreBytes { return one.get_binary(); });
    }
    std::vector<StoreBytes> values = store.multiGet(keys);
    values.insert(values.begin(), std::move(value));
    store.set(prefix, nlohmann::json::to_cbor(mapped(values, [](const StoreBytes& one) {
                return nlohmann::json::binary(one);
              })));
    for (const std::string& key : keys) {
      store.deleteKey(key);
    }
    return values;
  };
}

std::vector<nlohmann::json> GroupCore::exchange(const std::string& operation, uint64_t sequence,
                                                const nlohmann::json& value) {
  const WaitTime time;
  {
    const std::lock_guard<std::mutex> lock(progress_->mutex);
    ++progress_->exchanges;
  }
  return exchange_by_hosts ? exchange_by_hosts(operation, sequence, value)
                           : exchange_in_store(operation, sequence, value, all_);
}

std::vector<nlohmann::json> GroupCore::exchange_in_store(const std::string& operation,
                                                         uint64_t sequence,
                                                         const nlohmann::json& value,
                                                         const std::vector<int>& among) {
  const auto own = static_cast<int>(std::ranges::find(among, rank) - among.begin());
  // CBOR, since JSON text has no NaN and no infinity. This thread alone counts exchanges.
  std::future<std::vector<StoreBytes>> future =
      link->store().post_until<std::vector<StoreBytes>>(exchange_values(
          "values/" + key + "/" + std::to_string(progress_->exchanges), own,
          static_cast<int>(among.size()), nlohmann::json::to_cbor({operation, sequence, value})));
  bool arrived = false;
  try {
    arrived = await_future(future, CommClock::now() + options.timeout,
                           [&] { poll_together(operation, sequence); });
  } catch (...) { // a failure or Ctrl-C: no rank will read the value
    link->store().cancel();
    throw;
  }
  if (!arrived) {
    link->store().cancel();
    diagnose(operation, sequence, {.kind = ErrorKind::timed_out});
  }
  std::vector<StoreBytes> all;
  try {
    all = future.get();
  } catch (const std::exception& error) {
    diagnose(operation, sequence, {error.what(), error_kind(error)});
  }
  if (all.empty()) { // cancelled: the world failed while this call waited
    diagnose(operation, sequence, {"cancelled"});
  }
  std::vector<nlohmann::json> values;
  std::vector<std::string> operations;
  std::vector<std::string> numbered; // several operations may have one name
  for (const StoreBytes& sent_bytes : all) {
    nlohmann::json sent = nlohmann::json::from_cbor(sent_bytes);
    operations.push_back(sent[0]);
    numbered.push_back(operations.back() + " as its operation " + sent[1].dump());
    values.push_back(std::move(sent[2]));
  }
  require_equal(operation, operations, among);
  require_equal(operation, numbered, among);
  return values;
}

void GroupCore::check(const std::string& operation) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_ && closed_) {
      throw CommunicationError("comm::" + operation.substr(0, operation.find(' ')),
                               operation + ": the group is closed: name=" + options.name);
    }
    if (!error_ && !link->liveness().failed()) {
      return;
    }
  }
  raise(operation);
}

void GroupCore::poll(const std::string& operation) {
  throw_if_interrupted();
  link->liveness().poll_store(members);
  if (link->liveness().failed()) {
    raise(operation);
  }
}

void GroupCore::poll_together(const std::string& operation, uint64_t sequence) {
  poll(operation);
  const CommClock::time_point now = CommClock::now();
  // The peers' heartbeats are read a few times a second.
  if (sequence == compared_at_ && now - compared_ < milliseconds(100)) {
    return;
  }
  compared_ = now;
  compared_at_ = sequence;
  const std::string other = link->liveness().describe_other(*progress_, members);
  if (other.empty() || sequence != apart_at_) {
    apart_at_ = sequence;
    together_ = now;
  }
  // If both ranks are in exchanges, require_equal() finds the difference on all ranks soon.
  if (!other.empty() && now - together_ > milliseconds(1000)) {
    fail(operation, other, kSameOperations);
  }
}

void GroupCore::raise(const std::string& operation) {
  FailureCause first;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) {
      error_ = link->liveness().cause();
      if (!error_->operation.empty() && error_->operation != operation) {
        error_->text = "rank " + std::to_string(error_->found_by) + " gave up on " +
                       error_->operation + ": " + error_->text;
      }
      error_->operation = operation;
    }
    first = *error_;
  }
  set_said_by_peer(first.said_by_peer);
  throw CommunicationError("comm::" + first.operation.substr(0, first.operation.find(' ')),
                           first.operation + ": " + first.text, {}, first.fix, first.kind);
}

void GroupCore::fail(const std::string& operation, std::string text, std::string fix,
                     ErrorKind kind) {
  link->liveness().fail({link->launch_rank(), operation, std::move(text), std::move(fix), {}, kind},
                        milliseconds(500));
  raise(operation);
}

void GroupCore::diagnose(const std::string& operation, uint64_t sequence,
                         const OperationFailure& failure) {
  const bool timed_out = failure.kind == ErrorKind::timed_out;
  Liveness& liveness = link->liveness();
  const CommClock::time_point until = CommClock::now() + options.heartbeat_timeout;
  // The rank that broke the connection need not be the cause: it may have lost a third rank, or
  // have given up, and reports that soon.
  while (!timed_out && !liveness.failed() && CommClock::now() < until) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (closed_) {
        break;
      }
    }
    throw_if_interrupted();
    liveness.look(milliseconds(200));
    const std::optional<int> left = liveness.left_rank();
    if (!liveness.failed() && left) {
      fail(operation, "rank " + std::to_string(link->launch_rank(*left)) + " has left the world",
           "let every rank do the same operations before close()");
    }
    std::this_thread::sleep_for(milliseconds(10));
  }
  if (timed_out && !liveness.failed()) {
    liveness.look(milliseconds(1000));
    fail(operation,
         "timed out after " + format_fixed(double(options.timeout.count()) / 1000, 1) +
             " s: " + liveness.describe_missing(key, members, sequence, operation),
         "find out what that rank is doing, or raise the timeout", failure.kind);
  }
  check(operation); // throws for a failed world and for a closed group
  fail(operation,
       "the connection to a peer broke (" + failure.text.substr(0, failure.text.find('\n')) + ")",
       "", failure.kind);
}

using OpenGroups = c10::Synchronized<std::vector<std::weak_ptr<GroupCore>>>;

static OpenGroups& open_groups() {
  // Never destroyed, because static destructors may close groups.
  static OpenGroups* const open = new OpenGroups;
  return *open;
}

/// Runs before the destructors of objects that existed when the first group was kept, for example
/// libtorch's static objects.
static void close_groups_at_exit() {
  const auto all = open_groups().withLock([](auto& groups) { return std::exchange(groups, {}); });
  for (auto group = all.rbegin(); group != all.rend(); ++group) {
    if (const auto alive = group->lock()) {
      alive->close(false);
    }
  }
}

void GroupCore::keep(std::shared_ptr<void> connections) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    connections_.push_back(std::move(connections));
  }
  [[maybe_unused]] static const int installed = std::atexit(close_groups_at_exit);
  open_groups().withLock([&](auto& groups) {
    std::erase_if(groups, [](const auto& group) { return group.expired(); });
    groups.push_back(weak_from_this());
  });
}

void GroupCore::abort(std::string_view reason, ErrorKind kind) noexcept {
  try {
    Liveness& liveness = link->liveness();
    const bool first = !liveness.failed();
    liveness.fail(
        {link->launch_rank(),
         "",
         "rank " + std::to_string(link->launch_rank()) + " failed: " + std::string(reason),
         "read that rank's messages",
         {link->world().rank},
         kind},
        milliseconds(500));
    // The store ends with rank 0: let the others read the failure first.
    if (first && serves_store(link->world())) {
      liveness.wait_until_known();
    }
  } catch (...) { // out of memory, at the end of the run
  }
}

bool GroupCore::wait_idle() {
  const CommClock::time_point until = CommClock::now() + options.heartbeat_timeout;
  std::unique_lock<std::mutex> lock(mutex_);
  while (in_flight_ > 0 && CommClock::now() < until && !link->liveness().failed() &&
         interrupt_signal() == 0) {
    idle_.wait_for(lock, milliseconds(50));
  }
  return in_flight_ == 0;
}

void GroupCore::close(bool orderly) noexcept {
  try {
    std::unique_lock<std::mutex> lock(mutex_);
    if (std::exchange(closed_, true)) {
      return;
    }
    lock.unlock();
    orderly = orderly && !link->liveness().failed() && wait_idle();
    lock.lock();
    auto connections = std::exchange(connections_, {});
    lock.unlock();
    link->remove_group({progress_, world_size, std::move(connections)}, orderly);
  } catch (...) { // out of memory or threads: the process is about to end
  }
}

GroupCore::Started::Started(std::shared_ptr<GroupCore> core, std::string operation,
                            uint64_t sequence)
    : core_(std::move(core)), operation_(std::move(operation)), sequence_(sequence) {
  const std::lock_guard<std::mutex> lock(core_->mutex_);
  ++core_->in_flight_;
}

void GroupCore::Started::complete(std::optional<OperationFailure> failure) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    completed_ = true;
    completed_at_ = CommClock::now();
    failure_ = std::move(failure);
    changed_.notify_all();
  }
  const std::lock_guard<std::mutex> lock(core_->mutex_);
  core_->last_completion_ = CommClock::now();
  if (--core_->in_flight_ == 0) {
    core_->idle_.notify_all();
  }
}

bool GroupCore::Started::done() const noexcept {
  if (drive) {
    drive(milliseconds(0));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return completed_ || core_->link->liveness().failed();
}

CommClock::time_point GroupCore::Started::ended() const noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  return completed_at_;
}

bool GroupCore::Started::wait_for(milliseconds limit) {
  if (drive) {
    drive(limit);
    limit = milliseconds(0);
  }
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, limit, [&] { return completed_; });
}

void GroupCore::Started::wait() {
  bool left = false;
  while (!wait_for(milliseconds(50))) {
    core_->poll(operation_);
    // Who drives may have no connection, which would break when a rank leaves. What it sent before is
    // still there, so look once more.
    if (drive && std::exchange(left, core_->link->liveness().left_rank().has_value())) {
      core_->diagnose(operation_, sequence_, {"a rank has left"});
    }
    if (overdue()) {
      core_->diagnose(operation_, sequence_, {.kind = ErrorKind::timed_out});
    }
  }
  if (failure_ && failure_->ranks_differ) { // it does not change any more
    core_->fail(operation_, failure_->text, kSameOperations);
  }
  if (failure_) {
    core_->diagnose(operation_, sequence_, *failure_);
  }
}

/// Back ends with threads check the timeout themselves. For them this is for the case that they do
/// not.
bool GroupCore::Started::overdue() const {
  const std::lock_guard<std::mutex> lock(core_->mutex_);
  const auto since = std::max(submitted_, core_->last_completion_);
  return CommClock::now() - since > core_->options.timeout + milliseconds(drive ? 0 : 2000);
}

} // namespace hasten::detail
