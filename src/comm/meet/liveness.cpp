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

constexpr const char* kCheckHost =
    "check that rank's host and the network, then restart from the last checkpoint; to wait longer "
    "raise HASTEN_HEARTBEAT_TIMEOUT";

std::string seconds_text(CommClock::duration duration) {
  return format_fixed(std::chrono::duration<double>(duration).count(), 1) + " s";
}

std::string json_text(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FailureCause, found_by, operation, text, fix, lost, kind)

std::string Liveness::beat_key(int rank) { return "beat/" + std::to_string(rank); }

Liveness::Liveness(LivenessConfig config)
    : config_(std::move(config)), rank_(config_.world.rank), peers_(config_.peers.size()) {
  const Hello& own = config_.peers[static_cast<size_t>(rank_)];
  for (const Hello& peer : config_.peers) {
    // A process that /proc hides from this user is monitored by its heartbeats.
    const bool visible = process_state(peer.pid, peer.start_time) != ProcessState::ended ||
                         (kill(peer.pid, 0) != 0 && errno == ESRCH);
    watched_.push_back(peer.rank != rank_ && peer.process_host == own.process_host &&
                       own.start_time != 0 && visible);
    beside_.push_back(watched_.back() && peer.network_host == own.network_host);
  }
  watch_.emplace(rank_, config_.world.world_size, neighbours(), config_.heartbeat_timeout,
                 CommClock::now());
  // A server on this host that does not answer is frozen. Its end would break the connection.
  const bool local_store =
      launcher_serves(config_.world) ? !config_.world.agent_store : rank_ == 0 || beside_[0];
  store()->setTimeout(local_store ? std::chrono::hours(24) : config_.heartbeat_timeout);
}

/// The ranks whose heartbeats it always reads.
std::vector<int> Liveness::neighbours() const {
  const auto names = mapped(config_.peers, &Hello::process_host);
  std::vector<int> ranks = in_place_on_next_hosts(rank_, ranks_by_host(names));
  for (int rank = 0; std::cmp_less(rank, names.size()); ++rank) {
    const auto at = static_cast<size_t>(rank);
    if (rank != rank_ && names[at] == names[static_cast<size_t>(rank_)] && !beside_[at]) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

std::shared_ptr<Liveness> Liveness::start(LivenessConfig config) {
  auto running = std::make_shared<Liveness>(std::move(config));
  std::thread([running] { running->run(); }).detach();
  return {running.get(), [running](Liveness* liveness) { liveness->stop(milliseconds(0)); }};
}

void Liveness::run() {
  const NoBrokenPipeSignal none;
  loop();
  store().reset();
  const std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

FailureCause Liveness::read_cause(const std::string& text) const {
  try {
    return try_parse_json(text).value.get<FailureCause>();
  } catch (const nlohmann::json::exception&) {
    return {own_name(), "", "a rank failed and wrote: " + text, ""};
  }
}

FailureCause Liveness::loss(int peer, const std::string& what, std::string fix) const {
  return {
      own_name(), "", "rank " + std::to_string(name(peer)) + " " + what, std::move(fix), {peer}};
}

FailureCause Liveness::death(int peer) const {
  return loss(peer, "died (process " + std::to_string(pid(peer)) + " ended)",
              "read the last messages of that rank, then restart from the last checkpoint");
}

bool Liveness::process_is(ProcessState state, int peer) const {
  return watched_[static_cast<size_t>(peer)] &&
         process_state(pid(peer), config_.peers[static_cast<size_t>(peer)].start_time) == state;
}

void Liveness::report_and_adopt(FailureCause found) {
  report_ = found;
  adopt(std::move(found));
}

void Liveness::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto wanted = [this] {
    return stopping_ || leaving_ || report_ || looks_wanted_ > looks_done_;
  };
  while (true) {
    const uint64_t look = looks_wanted_;
    const bool last = leaving_;
    // A rank that knows of the failure writes so, because the store's server waits for it. It
    // continues, because the remaining ranks may need to know about each other.
    const bool reported = failed_ && !report_;
    const std::string beat = beat_text();
    in_exchange_ = true;
    lock.unlock();
    exchange(beat);
    lock.lock();
    in_exchange_ = false;
    looks_done_ = look;
    changed_.notify_all();
    if (last || !store()) {
      return;
    }
    if (!stopping_ && (!failed_ || reported)) {
      changed_.wait_for(lock, watch_->interval(), wanted);
    }
    // The peers wait for the report of a rank that leaves after a failure.
    if (stopping_ && !report_) {
      return;
    }
  }
}

/// State, count, then {"group": [sequence, operation, tensors, exchanges]}. The caller holds the
/// mutex.
std::string Liveness::beat_text() {
  nlohmann::json operations = nlohmann::json::object();
  for (const std::shared_ptr<GroupProgress>& group : groups_) {
    const std::lock_guard<std::mutex> lock(group->mutex);
    operations[group->group] = {group->sequence, group->operation, group->tensors,
                                group->exchanges};
  }
  const char* state = leaving_ ? "l " : failed_ ? "s " : "a ";
  return state + std::to_string(++beats_) + " " + json_text(operations);
}

void Liveness::exchange(const std::string& beat) {
  const bool others_serve = !serves_store(config_.world);
  if (others_serve && !launcher_serves(config_.world) && process_ended(0)) {
    store_lost(""); // c10d would print a stack trace for each attempt
    return;
  }
  std::vector<int> ended_now;
  for (int peer = 0; peer < config_.world.world_size; ++peer) {
    if (process_ended(peer)) {
      ended_now.push_back(peer);
    }
  }
  std::optional<FailureCause> post;
  std::vector<int> ranks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    find_stopped();
    post = std::exchange(report_, std::nullopt);
    for (const int peer : ended_now) { // it may have left before
      watch_->wants(peer);
    }
    ranks = watch_->due(failed_ || looks_wanted_ > looks_done_, CommClock::now());
  }
  std::vector<std::string> keys = mapped(ranks, beat_key);
  keys.push_back(kFailureKey);
  std::vector<std::vector<uint8_t>> values;
  try {
    const QuietStore quiet;
    c10d::Store& s = *store();
    s.set(beat_key(rank_), beat);
    if (post) {
      s.compareSet(kFailureKey, std::string(kNoFailure), json_text(*post));
    }
    values = s.multiGet(keys);
  } catch (const std::exception& error) {
    store_lost(error.what());
    return;
  }
  merge(ranks, values);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const int peer : ended_now) {
    peers_[static_cast<size_t>(peer)].ended = true;
    if (!peers_[static_cast<size_t>(peer)].left && !leaving_ && !failed_) {
      report_and_adopt(death(peer));
    }
  }
}

void Liveness::merge(const std::vector<int>& ranks,
                     const std::vector<std::vector<uint8_t>>& values) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> beats;
  for (size_t i = 0; i < ranks.size(); ++i) {
    beats.emplace_back(values[i].begin(), values[i].end());
  }
  watch_->merge(ranks, std::move(beats), CommClock::now());
  for (const int i : ranks) {
    Peer& peer = peers_[static_cast<size_t>(i)];
    peer.left = watch_->beat(i)[0] == 'l';
    peer.knows_failure = watch_->beat(i)[0] == 's';
    peer.silent = !beside_[static_cast<size_t>(i)] && watch_->silence(i) > watch_->limit();
  }
  const std::string failure(values.back().begin(), values.back().end());
  if (failure != kNoFailure) {
    adopt(read_cause(failure));
  }
  for (const int i : ranks) {
    const auto at = static_cast<size_t>(i);
    if (!failed_ && !leaving_ && !beside_[at] && !peers_[at].left &&
        watch_->silence(i) > watch_->limit() * 4 / 5) {
      report_and_adopt(
          loss(i, "died or cannot be reached: no heartbeat for " + seconds_text(watch_->silence(i)),
               kCheckHost));
    }
  }
}

void Liveness::find_stopped() {
  const CommClock::time_point now = CommClock::now();
  if (now - last_look_ < watch_->interval() / 2) {
    return;
  }
  // If this process was paused, the states of the others say nothing.
  const bool slept = now - last_look_ > 2 * watch_->interval() + milliseconds(500);
  last_look_ = now;
  for (int i = 0; i < config_.world.world_size; ++i) {
    auto& since = peers_[static_cast<size_t>(i)].stopped;
    if (!process_is(ProcessState::stopped, i)) {
      since = {};
    } else if (slept || since == CommClock::time_point{}) {
      since = now;
    } else if (!failed_ && !leaving_ && now - since > config_.heartbeat_timeout) {
      report_and_adopt(
          loss(i,
               "has been stopped by a signal for " + seconds_text(now - since) + " (process " +
                   std::to_string(pid(i)) + ")",
               "find out what stopped it (SIGSTOP), or raise HASTEN_HEARTBEAT_TIMEOUT"));
    }
  }
}

void Liveness::adopt(FailureCause new_cause) {
  if (!failed_) {
    cause_ = std::move(new_cause);
    for (int i = 0; i < rank_; ++i) {
      const bool lost = std::count(cause_.lost.begin(), cause_.lost.end(), i) > 0;
      cause_.said_by_peer |= !lost && process_is(ProcessState::running, i);
    }
    failed_ = true;
    config_.on_failure();
    changed_.notify_all();
  }
}

/// `why`: the error of the call to the store.
void Liveness::store_lost(const std::string& why) {
  const World& world = config_.world;
  const bool rank_serves = !launcher_serves(world) && rank_ != 0;
  bool rank_ended = false;
  // The socket closes a moment before the process counts as ended.
  for (int i = 0; rank_serves && watched_[0] && !rank_ended && i < 30; ++i) {
    rank_ended = process_ended(0);
    if (!rank_ended) {
      std::this_thread::sleep_for(milliseconds(10));
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  store().reset();
  peers_[0].silent = peers_[0].silent || rank_serves;
  if (leaving_ || stopping_) {
    return;
  }
  const std::string what = "store at " + world.master_addr + ":" +
                           std::to_string(world.master_port) + " is gone" +
                           (why.empty() ? "" : " (" + why.substr(0, why.find('\n')) + ")");
  if (rank_ended) {
    adopt(death(0));
  } else if (rank_serves && why.find("has not answered") != std::string::npos) {
    adopt(loss(0, "died or cannot be reached: " + why.substr(0, why.find('\n')), kCheckHost));
  } else if (rank_serves) {
    adopt(loss(0, "died or left: its " + what,
               "read rank 0's last messages, then restart from the last checkpoint"));
  } else if (!launcher_serves(world)) {
    adopt({own_name(), "", "this process's own " + what, ""});
  } else {
    adopt({own_name(), "", "the launcher's " + what,
           "read the launcher's last messages, then restart from the last checkpoint"});
  }
}

std::shared_ptr<GroupProgress> Liveness::add_group(const std::string& name) {
  auto progress = std::make_shared<GroupProgress>();
  progress->group = name;
  const std::lock_guard<std::mutex> lock(mutex_);
  groups_.push_back(progress);
  return progress;
}

void Liveness::remove_group(const std::shared_ptr<GroupProgress>& group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase(groups_, group);
}

FailureCause Liveness::cause() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return cause_;
}

void Liveness::fail(FailureCause cause, milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (failed_) {
    return;
  }
  report_ = cause;
  changed_.notify_all();
  changed_.wait_for(lock, limit, [&] { return failed_ || ended_; });
  adopt(std::move(cause));
}

void Liveness::poll_store(const std::vector<int>& group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  watch_->waits_for(group);
  find_stopped();
  if (rank_ == 0 || beside_[0]) {
    return;
  }
  const CommClock::time_point now = CommClock::now();
  if (!in_exchange_ || polled_beat_ != beats_) {
    silent_for_ = {};
    polled_beat_ = beats_;
  } else {
    silent_for_ += std::min<CommClock::duration>(now - last_poll_, milliseconds(100));
  }
  last_poll_ = now;
  if (silent_for_ > config_.heartbeat_timeout) {
    adopt({own_name(),
           "",
           "rank 0 died or cannot be reached: its store has not answered for " +
               seconds_text(silent_for_),
           kCheckHost,
           {0}});
  }
}

bool Liveness::look(milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  // The check in progress may have read before this call.
  const uint64_t look = ++looks_wanted_;
  changed_.notify_all();
  changed_.wait_for(lock, limit, [&] { return looks_done_ >= look || ended_; });
  return looks_done_ >= look;
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
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::lock_guard<std::mutex> own_lock(own.mutex);
  const auto with = [](const std::string& name, const std::string& of) {
    return of.empty() ? name : name + " with " + of;
  };
  for (const int member : members) {
    const Entered last = entered(watch_->beat(member), own.group);
    const bool other = last.sequence == own.sequence &&
                       (last.operation != own.operation || last.tensors != own.tensors);
    // A peer with as many exchanges has read this rank's value, or will.
    const bool gone_on = last.sequence > own.sequence && last.exchanges < own.exchanges;
    if (member != rank_ && (other || gone_on)) {
      return "rank " + std::to_string(name(member)) + (other ? " has " : " has moved on to ") +
             with(last.operation, last.tensors) + ", rank " + std::to_string(own_name()) + " has " +
             with(own.operation, own.tensors);
    }
  }
  return {};
}

std::string Liveness::describe_missing(const std::string& group, const std::vector<int>& members,
                                       uint64_t sequence, const std::string& operation) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> missing;
  for (const int member : members) {
    const auto i = static_cast<size_t>(member);
    if (member == rank_) {
      continue;
    }
    const Peer& peer = peers_[i];
    std::vector<std::string> about;
    const Entered last = entered(watch_->beat(member), group);
    const CommClock::duration silence = watch_->silence(member);
    if (peer.left) {
      about.push_back("has left the world");
    } else if (last.sequence < sequence) {
      about.push_back("has not entered it" +
                      (last.operation.empty() ? "" : " (its last is " + last.operation + ")"));
    } else if (last.sequence == sequence && last.operation != operation) {
      about.push_back("is in " + last.operation + " instead");
    }
    if (process_is(ProcessState::stopped, member)) {
      about.push_back("is stopped (process " + std::to_string(pid(member)) + ")");
    } else if (silence > std::max(milliseconds(1000), 4 * watch_->interval())) {
      about.push_back("has sent no heartbeat for " + seconds_text(silence));
    }
    if (!about.empty()) {
      missing.push_back("rank " + std::to_string(name(member)) + " " + joined(about, " and "));
    }
  }
  return missing.empty() ? "every rank has entered it" : joined(missing, "; ");
}

std::optional<int> Liveness::left_rank() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto left = std::ranges::find_if(peers_, &Peer::left);
  return left == peers_.end() ? std::nullopt
                              : std::optional(static_cast<int>(left - peers_.begin()));
}

std::vector<bool> Liveness::lost() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const CommClock::time_point now = CommClock::now();
  std::vector<bool> lost;
  for (size_t i = 0; i < peers_.size(); ++i) {
    const Peer& peer = peers_[i];
    const auto& named = cause_.lost;
    const int rank = static_cast<int>(i);
    const bool frozen =
        peer.stopped != CommClock::time_point{} && now - peer.stopped > config_.heartbeat_timeout;
    lost.push_back(peer.left || peer.ended || peer.silent || frozen || process_ended(rank) ||
                   std::find(named.begin(), named.end(), rank) != named.end());
  }
  return lost;
}

void Liveness::wait_until_known() {
  const auto known = [this] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::all_of(peers_.begin(), peers_.end(), [this](const Peer& peer) {
      const auto rank = static_cast<int>(&peer - peers_.data());
      return rank == rank_ || peer.left || peer.knows_failure || peer.ended ||
             std::ranges::count(cause_.lost, rank) > 0;
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
    const std::lock_guard<std::mutex> lock(mutex_);
    leaving_ = true;
  }
  wait_for_end(limit);
  stop(milliseconds(0));
}

void Liveness::stop(milliseconds limit) {
  stopping_ = true;
  wait_for_end(limit);
}

void Liveness::wait_for_end(milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.notify_all();
  changed_.wait_for(lock, limit, [this] { return ended_; });
}

} // namespace hasten::detail
