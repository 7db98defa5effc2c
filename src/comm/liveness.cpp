#include "liveness.h"

#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <utility>

#include "hasten/base/json.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"
#include "thread_scopes.h"

namespace hasten::detail {

using std::chrono::milliseconds;

std::string seconds_text(CommClock::duration duration) {
  return format_fixed(std::chrono::duration<double>(duration).count(), 1) + " s";
}

std::string json_text(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FailureCause, found_by, operation, text, fix, lost, kind)

struct Liveness::Shared {
  // Set at construction.
  LivenessConfig config;
  int rank = 0;
  std::vector<bool> watched; // [rank] /proc shows whether it is alive
  std::vector<bool> beside; // [rank] watched, and loopback reaches it: needs no heartbeats

  // Guarded by mutex, except the atomic. Only the thread uses the connection to the store, which
  // is in the config.
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<BeatWatch> watch; // set in the constructor
  CommClock::time_point last_look = CommClock::now(); // last check of processes
  std::vector<Peer> peers; // [rank]
  std::vector<std::shared_ptr<GroupProgress>> groups;
  std::atomic<bool> failed{false};
  FailureCause cause;
  std::optional<FailureCause> report; // not yet written to the store
  uint64_t looks_wanted = 0;
  uint64_t looks_done = 0;
  uint64_t beats = 0;
  bool in_exchange = false;
  bool departing = false;
  bool leaving = false;
  bool ended = false;
  std::atomic<bool> stopping{false};
  uint64_t polled_beat = 0;
  CommClock::time_point last_poll = CommClock::now();
  CommClock::duration silent_for{};

  void loop();
  std::string beat_text();
  void exchange(const std::string& beat);
  void merge(const std::vector<int>& ranks, const std::vector<std::vector<uint8_t>>& values);
  void find_stopped();
  void adopt(FailureCause new_cause);
  void store_lost(const std::string& why);
  StorePtr& store() { return config.store; }
  bool process_is(ProcessState state, int peer) const {
    return watched[static_cast<size_t>(peer)] &&
           process_state(pid(peer), config.peers[static_cast<size_t>(peer)].start_time) == state;
  }
  bool process_ended(int peer) const { return process_is(ProcessState::ended, peer); }
  int pid(int peer) const { return config.peers[static_cast<size_t>(peer)].pid; }
  /// A text that cannot be parsed becomes the message.
  FailureCause read_cause(const std::string& text) const {
    try {
      return try_parse_json(text).value.get<FailureCause>();
    } catch (const nlohmann::json::exception&) {
      return {own_name(), "", "a rank failed and wrote: " + text, ""};
    }
  }
  /// The rank's number in messages.
  int name(int peer) const { return config.peers[static_cast<size_t>(peer)].launch_rank; }
  int own_name() const { return name(rank); }
  /// `what` follows "rank r ".
  FailureCause loss(int peer, const std::string& what, std::string fix) const {
    return {
        own_name(), "", "rank " + std::to_string(name(peer)) + " " + what, std::move(fix), {peer}};
  }
  FailureCause death(int peer) const {
    return loss(peer, "died (process " + std::to_string(pid(peer)) + " ended)",
                "read the last messages of that rank, then restart from the last checkpoint");
  }
  /// The caller holds the mutex.
  void report_and_adopt(FailureCause found) {
    report = found;
    adopt(std::move(found));
  }
};

std::string Liveness::beat_key(int rank) { return "beat/" + std::to_string(rank); }

Liveness::Liveness(LivenessConfig config) : shared_(std::make_shared<Shared>()) {
  Shared& s = *shared_;
  s.config = std::move(config);
  s.rank = s.config.world.rank;
  s.watch.emplace(s.rank, s.config.world.world_size, s.config.heartbeat_timeout, CommClock::now());
  const Hello& own = s.config.peers[static_cast<size_t>(s.rank)];
  for (const Hello& peer : s.config.peers) {
    // A process that /proc hides from this user is monitored by its heartbeats.
    const bool visible = process_state(peer.pid, peer.start_time) != ProcessState::ended ||
                         (kill(peer.pid, 0) != 0 && errno == ESRCH);
    s.watched.push_back(peer.rank != s.rank && peer.process_host == own.process_host &&
                        own.start_time != 0 && visible);
    s.beside.push_back(s.watched.back() && peer.network_host == own.network_host);
  }
  s.peers.resize(s.config.peers.size());
  // A server on this host that does not answer is frozen. Its end would break the connection.
  const bool local_store =
      launcher_serves(s.config.world) ? !s.config.world.agent_store : s.rank == 0 || s.beside[0];
  s.store()->setTimeout(local_store ? std::chrono::hours(24) : s.config.heartbeat_timeout);
  std::thread([shared = shared_] { run(shared); }).detach();
}

Liveness::~Liveness() { stop(milliseconds(0)); }

void Liveness::run(const std::shared_ptr<Shared>& shared) {
  const NoBrokenPipeSignal none;
  shared->loop();
  shared->store().reset();
  const std::lock_guard<std::mutex> lock(shared->mutex);
  shared->ended = true;
  shared->changed.notify_all();
}

void Liveness::Shared::loop() {
  std::unique_lock<std::mutex> lock(mutex);
  const auto wanted = [this] { return stopping || leaving || report || looks_wanted > looks_done; };
  while (true) {
    const uint64_t look = looks_wanted;
    const bool last = leaving;
    // A rank that knows of the failure writes so, because the store's server waits for it. It
    // continues, because the remaining ranks may need to know about each other.
    const bool told = failed && !report;
    const std::string beat = beat_text();
    in_exchange = true;
    lock.unlock();
    exchange(beat);
    lock.lock();
    in_exchange = false;
    looks_done = look;
    changed.notify_all();
    if (stopping || last || !store()) {
      return;
    }
    if (!(failed && !told)) {
      changed.wait_for(lock, watch->interval(), wanted);
    }
    if (stopping) {
      return;
    }
  }
}

/// State, count, then {"group": [sequence, operation, tensors, exchanges]}. The caller holds the
/// mutex.
std::string Liveness::Shared::beat_text() {
  nlohmann::json operations = nlohmann::json::object();
  for (const std::shared_ptr<GroupProgress>& group : groups) {
    const std::lock_guard<std::mutex> lock(group->mutex);
    operations[group->group] = {group->sequence, group->operation, group->tensors,
                                group->exchanges};
  }
  const char* state = leaving ? "l " : failed ? "s " : "a ";
  return state + std::to_string(++beats) + " " + json_text(operations);
}

void Liveness::Shared::exchange(const std::string& beat) {
  const bool others_serve = !serves_store(config.world);
  if (others_serve && !launcher_serves(config.world) && process_ended(0)) {
    store_lost(""); // c10d would print a stack trace for each attempt
    return;
  }
  std::vector<int> ended_now;
  for (int peer = 0; peer < config.world.world_size; ++peer) {
    if (process_ended(peer)) {
      ended_now.push_back(peer);
    }
  }
  std::optional<FailureCause> post;
  std::vector<int> ranks;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    find_stopped();
    post = std::exchange(report, std::nullopt);
    ranks = watch->due(failed || looks_wanted > looks_done, CommClock::now());
  }
  std::vector<std::string> keys;
  for (const int peer : ranks) {
    keys.push_back(beat_key(peer));
  }
  keys.push_back(kFailureKey);
  std::vector<std::vector<uint8_t>> values;
  try {
    const QuietStore quiet;
    c10d::Store& s = *store();
    s.set(beat_key(rank), beat);
    if (post) {
      s.compareSet(kFailureKey, std::string(kNoFailure), json_text(*post));
    }
    values = s.multiGet(keys);
  } catch (const std::exception& error) {
    store_lost(error.what());
    return;
  }
  merge(ranks, values);
  const std::lock_guard<std::mutex> lock(mutex);
  for (const int peer : ended_now) {
    peers[static_cast<size_t>(peer)].ended = true;
    if (!peers[static_cast<size_t>(peer)].left && !departing && !failed) {
      report_and_adopt(death(peer));
    }
  }
}

void Liveness::Shared::merge(const std::vector<int>& ranks,
                             const std::vector<std::vector<uint8_t>>& values) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<std::string> beats;
  for (size_t i = 0; i < ranks.size(); ++i) {
    beats.emplace_back(values[i].begin(), values[i].end());
  }
  watch->merge(ranks, std::move(beats), CommClock::now());
  for (const int i : ranks) {
    Peer& peer = peers[static_cast<size_t>(i)];
    peer.left = watch->beat(i)[0] == 'l';
    peer.knows_failure = watch->beat(i)[0] == 's';
    peer.silent = !beside[static_cast<size_t>(i)] && watch->silence(i) > watch->limit();
  }
  const std::string failure(values.back().begin(), values.back().end());
  if (failure != kNoFailure) {
    adopt(read_cause(failure));
  }
  for (const int i : ranks) {
    const auto at = static_cast<size_t>(i);
    if (!failed && !departing && !beside[at] && !peers[at].left &&
        watch->silence(i) > watch->limit() * 4 / 5) {
      report_and_adopt(loss(
          i, "died or cannot be reached: no heartbeat for " + seconds_text(watch->silence(i)),
          "check that rank's host, then restart from the last checkpoint; to wait longer raise "
          "HASTEN_HEARTBEAT_TIMEOUT"));
    }
  }
}

/// The caller holds the mutex.
void Liveness::Shared::find_stopped() {
  const CommClock::time_point now = CommClock::now();
  if (now - last_look < watch->interval() / 2) {
    return;
  }
  // If this process was paused, the states of the others say nothing.
  const bool slept = now - last_look > 2 * watch->interval() + milliseconds(500);
  last_look = now;
  for (int i = 0; i < config.world.world_size; ++i) {
    auto& since = peers[static_cast<size_t>(i)].stopped;
    if (!process_is(ProcessState::stopped, i)) {
      since = {};
    } else if (slept || since == CommClock::time_point{}) {
      since = now;
    } else if (!failed && !departing && now - since > config.heartbeat_timeout) {
      report_and_adopt(
          loss(i,
               "has been stopped by a signal for " + seconds_text(now - since) + " (process " +
                   std::to_string(pid(i)) + ")",
               "find out what stopped it (SIGSTOP), or raise HASTEN_HEARTBEAT_TIMEOUT"));
    }
  }
}

/// The caller holds the mutex.
void Liveness::Shared::adopt(FailureCause new_cause) {
  if (!failed) {
    cause = std::move(new_cause);
    for (int i = 0; i < rank; ++i) {
      const bool lost = std::count(cause.lost.begin(), cause.lost.end(), i) > 0;
      cause.said_by_peer |= !lost && process_is(ProcessState::running, i);
    }
    failed = true;
    config.on_failure();
    changed.notify_all();
  }
}

/// `why`: the error of the call to the store.
void Liveness::Shared::store_lost(const std::string& why) {
  const World& world = config.world;
  const bool rank_serves = !launcher_serves(world) && rank != 0;
  bool rank_ended = false;
  // The socket closes a moment before the process counts as ended.
  for (int i = 0; rank_serves && watched[0] && !rank_ended && i < 30; ++i) {
    rank_ended = process_ended(0);
    if (!rank_ended) {
      std::this_thread::sleep_for(milliseconds(10));
    }
  }
  const std::lock_guard<std::mutex> lock(mutex);
  store().reset();
  peers[0].silent = peers[0].silent || rank_serves;
  if (departing || leaving || stopping) {
    return;
  }
  const std::string what = "store at " + world.master_addr + ":" +
                           std::to_string(world.master_port) + " is gone" +
                           (why.empty() ? "" : " (" + why.substr(0, why.find('\n')) + ")");
  if (rank_ended) {
    adopt(death(0));
  } else if (rank_serves) {
    adopt(loss(0, "died or left: its " + what, "read rank 0's last messages"));
  } else if (!launcher_serves(world)) {
    adopt({own_name(), "", "this process's own " + what, ""});
  } else {
    adopt({own_name(), "", "the launcher's " + what, "read the launcher's last messages"});
  }
}

std::shared_ptr<GroupProgress> Liveness::add_group(const std::string& name) {
  auto progress = std::make_shared<GroupProgress>();
  progress->group = name;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  shared_->groups.push_back(progress);
  return progress;
}

bool Liveness::failed() const { return shared_->failed; }

FailureCause Liveness::cause() const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return shared_->cause;
}

void Liveness::fail(FailureCause cause, milliseconds limit) {
  Shared& s = *shared_;
  std::unique_lock<std::mutex> lock(s.mutex);
  if (s.failed) {
    return;
  }
  s.report = cause;
  s.changed.notify_all();
  s.changed.wait_for(lock, limit, [&] { return s.failed || s.ended; });
  s.adopt(std::move(cause));
}

void Liveness::poll_store() {
  Shared& s = *shared_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.find_stopped();
  if (s.rank == 0 || s.beside[0]) {
    return;
  }
  const CommClock::time_point now = CommClock::now();
  if (!s.in_exchange || s.polled_beat != s.beats) {
    s.silent_for = {};
    s.polled_beat = s.beats;
  } else {
    s.silent_for += std::min<CommClock::duration>(now - s.last_poll, milliseconds(100));
  }
  s.last_poll = now;
  if (s.silent_for > s.config.heartbeat_timeout) {
    s.adopt({s.own_name(),
             "",
             "rank 0 died or cannot be reached: its store has not answered for " +
                 seconds_text(s.silent_for),
             "check rank 0's host",
             {0}});
  }
}

bool Liveness::look(milliseconds limit) {
  Shared& s = *shared_;
  std::unique_lock<std::mutex> lock(s.mutex);
  // The check in progress may have read before this call.
  const uint64_t look = ++s.looks_wanted;
  s.changed.notify_all();
  s.changed.wait_for(lock, limit, [&] { return s.looks_done >= look || s.ended; });
  return s.looks_done >= look;
}

Liveness::Entered Liveness::entered(const std::string& beat, const std::string& group) {
  if (beat.empty()) { // not read yet
    return {};
  }
  const nlohmann::json groups =
      try_parse_json(std::string_view(beat).substr(beat.find(' ', 2) + 1)).value;
  if (!groups.is_object() || !groups.contains(group)) {
    return {};
  }
  const nlohmann::json& last = groups[group];
  return {last[0], last[1], last[2], last[3]};
}

std::string Liveness::describe_other(const GroupProgress& own,
                                     const std::vector<int>& members) const {
  Shared& s = *shared_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  const std::lock_guard<std::mutex> own_lock(own.mutex);
  const auto with = [](const std::string& name, const std::string& of) {
    return of.empty() ? name : name + " with " + of;
  };
  for (const int member : members) {
    const Entered last = entered(s.watch->beat(member), own.group);
    const bool other = last.sequence == own.sequence &&
                       (last.operation != own.operation || last.tensors != own.tensors);
    // A peer with as many exchanges has read this rank's value, or will.
    const bool gone_on = last.sequence > own.sequence && last.exchanges < own.exchanges;
    if (member != s.rank && (other || gone_on)) {
      return "rank " + std::to_string(s.name(member)) + (other ? " has " : " has moved on to ") +
             with(last.operation, last.tensors) + ", rank " + std::to_string(s.own_name()) +
             " has " + with(own.operation, own.tensors);
    }
  }
  return {};
}

std::string Liveness::describe_missing(const std::string& group, const std::vector<int>& members,
                                       uint64_t sequence, const std::string& operation) const {
  Shared& s = *shared_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  std::vector<std::string> missing;
  for (const int member : members) {
    const auto i = static_cast<size_t>(member);
    if (member == s.rank) {
      continue;
    }
    const Peer& peer = s.peers[i];
    std::vector<std::string> about;
    const Entered last = entered(s.watch->beat(member), group);
    const CommClock::duration silence = s.watch->silence(member);
    if (peer.left) {
      about.push_back("has left the world");
    } else if (last.sequence < sequence) {
      about.push_back("has not entered it" +
                      (last.operation.empty() ? "" : " (its last is " + last.operation + ")"));
    } else if (last.sequence == sequence && last.operation != operation) {
      about.push_back("is in " + last.operation + " instead");
    }
    if (s.process_is(ProcessState::stopped, member)) {
      about.push_back("is stopped (process " + std::to_string(s.pid(member)) + ")");
    } else if (silence > std::max(milliseconds(1000), 4 * s.watch->interval())) {
      about.push_back("has sent no heartbeat for " + seconds_text(silence));
    }
    if (!about.empty()) {
      missing.push_back("rank " + std::to_string(s.name(member)) + " " + joined(about, " and "));
    }
  }
  return missing.empty() ? "every rank has entered it" : joined(missing, "; ");
}

std::optional<int> Liveness::left_rank() const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  for (int i = 0; i < shared_->config.world.world_size; ++i) {
    if (i != shared_->rank && shared_->peers[static_cast<size_t>(i)].left) {
      return i;
    }
  }
  return std::nullopt;
}

std::vector<bool> Liveness::lost() const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  const CommClock::time_point now = CommClock::now();
  std::vector<bool> lost;
  for (size_t i = 0; i < shared_->peers.size(); ++i) {
    const Peer& peer = shared_->peers[i];
    const auto& named = shared_->cause.lost;
    const int rank = static_cast<int>(i);
    const bool frozen = peer.stopped != CommClock::time_point{} &&
                        now - peer.stopped > shared_->config.heartbeat_timeout;
    lost.push_back(peer.left || peer.ended || peer.silent || frozen ||
                   shared_->process_ended(rank) ||
                   std::find(named.begin(), named.end(), rank) != named.end());
  }
  return lost;
}

void Liveness::wait_until_known() {
  Shared& s = *shared_;
  const auto known = [&s] {
    const std::lock_guard<std::mutex> lock(s.mutex);
    return std::all_of(s.peers.begin(), s.peers.end(), [&s](const Peer& peer) {
      return &peer == &s.peers[static_cast<size_t>(s.rank)] || peer.left || peer.knows_failure ||
             peer.ended;
    });
  };
  const CommClock::time_point until = CommClock::now() + milliseconds(1000);
  while (!known() && CommClock::now() < until) {
    look(milliseconds(100));
    std::this_thread::sleep_for(milliseconds(10));
  }
}

void Liveness::leave(milliseconds limit) {
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->departing = true;
    shared_->leaving = true;
  }
  wait_for_end(limit);
  stop(milliseconds(0));
}

void Liveness::stop(milliseconds limit) {
  shared_->stopping = true;
  wait_for_end(limit);
}

void Liveness::wait_for_end(milliseconds limit) {
  Shared& s = *shared_;
  std::unique_lock<std::mutex> lock(s.mutex);
  s.changed.notify_all();
  s.changed.wait_for(lock, limit, [&s] { return s.ended; });
}

} // namespace hasten::detail
