#include "gloo_group.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "batch_threads.h"
#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "hasten/base/recorded_error.h"
#include "tensor_checks.h"

namespace hasten::detail {

using std::chrono::milliseconds;

/// A Gloo operation that has started. The future's callback, in Gloo's thread, completes it: c10d's
/// own timed wait throws whenever its time ends.
struct GlooOperation final : Work::State {
  std::shared_ptr<GroupCore> core;
  std::string operation;
  uint64_t sequence = 0;
  CommClock::time_point submitted = CommClock::now();

  mutable std::mutex mutex;
  std::condition_variable changed;
  bool completed = false;
  CommClock::time_point completed_at{};
  std::exception_ptr error;
  std::function<void()> finish; // empty once it has run

  void complete(std::exception_ptr failure) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      completed = true;
      completed_at = CommClock::now();
      error = std::move(failure);
      changed.notify_all();
    }
    const std::lock_guard<std::mutex> lock(core->mutex);
    core->last_completion = CommClock::now();
    if (--core->in_flight == 0) {
      core->idle.notify_all();
    }
  }

  bool done() const noexcept override {
    const std::lock_guard<std::mutex> lock(mutex);
    return completed || core->link->liveness().failed();
  }

  CommClock::time_point ended() const noexcept override {
    const std::lock_guard<std::mutex> lock(mutex);
    return completed_at;
  }

  void wait() override {
    std::unique_lock<std::mutex> lock(mutex);
    while (!changed.wait_for(lock, milliseconds(50), [&] { return completed; })) {
      lock.unlock();
      core->poll(operation);
      if (overdue()) {
        core->diagnose(operation, sequence, "", true);
      }
      lock.lock();
    }
    if (error) {
      const std::exception_ptr failure = error;
      lock.unlock();
      raise_from(failure);
    }
    if (finish) {
      finish();
      finish = nullptr;
    }
  }

 private:
  /// Gloo checks the timeout itself. This is for the case that it does not.
  bool overdue() const {
    const std::lock_guard<std::mutex> lock(core->mutex);
    const auto since = std::max(submitted, core->last_completion);
    return CommClock::now() - since > core->options.timeout + milliseconds(2000);
  }

  [[noreturn]] void raise_from(const std::exception_ptr& failure) {
    std::string text;
    try {
      std::rethrow_exception(failure);
    } catch (const std::exception& caught) {
      text = caught.what();
    } catch (...) {
      text = "unknown error";
    }
    core->diagnose(operation, sequence, text, text.find("Timed out") != std::string::npos);
  }
};

/// Groups of different ranks may have the same name.
std::string group_key(const std::string& name, const std::vector<int>& members, int world_size) {
  std::string key = name;
  if (std::ssize(members) < world_size) {
    for (const int member : members) {
      key += (key == name ? " of " : ",") + std::to_string(member);
    }
  }
  return key;
}

std::vector<int> members_or_all(std::vector<int> members, int world_size) {
  if (members.empty()) {
    members.resize(static_cast<size_t>(world_size));
    std::iota(members.begin(), members.end(), 0);
  }
  return members;
}

GroupCore::GroupCore(std::shared_ptr<WorldLink> world_link, const CommunicatorOptions& group,
                     std::vector<int> of)
    : link(std::move(world_link)),
      options(group),
      members(members_or_all(std::move(of), link->world().world_size)),
      key(group_key(group.name, members, link->world().world_size)),
      rank(static_cast<int>(std::find(members.begin(), members.end(), link->world().rank) -
                            members.begin())),
      world_size(static_cast<int>(members.size())),
      progress(link->liveness().add_group(key)) {}

uint64_t GroupCore::enter(const std::string& operation, const std::string& tensors) {
  check(operation);
  const std::lock_guard<std::mutex> lock(progress->mutex);
  progress->operation = operation;
  progress->tensors = tensors;
  return ++progress->sequence;
}

void GroupCore::check(const std::string& operation) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!error && closed) {
      throw CommunicationError("comm::" + operation.substr(0, operation.find(' ')),
                               operation + ": the group is closed: name=" + options.name);
    }
    if (!error && !link->liveness().failed()) {
      return;
    }
  }
  raise(operation);
}

void GroupCore::poll(const std::string& operation) {
  throw_if_interrupted();
  link->liveness().poll_store();
  if (link->liveness().failed()) {
    raise(operation);
  }
}

void GroupCore::poll_together(const std::string& operation, uint64_t sequence) {
  poll(operation);
  const CommClock::time_point now = CommClock::now();
  // The peers' heartbeats are read a few times a second.
  if (sequence == compared_at && now - compared < milliseconds(100)) {
    return;
  }
  compared = now;
  compared_at = sequence;
  const std::string other = link->liveness().describe_other(*progress, members);
  if (other.empty() || sequence != apart_at) {
    apart_at = sequence;
    together = now;
  }
  // If both ranks are in exchanges, require_equal() finds the difference on all ranks soon.
  if (!other.empty() && now - together > milliseconds(1000)) {
    fail(operation, other, kSameOperations);
  }
}

void GroupCore::raise(const std::string& operation) {
  FailureCause first;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!error) {
      error = link->liveness().cause();
      if (!error->operation.empty() && error->operation != operation) {
        error->text = "rank " + std::to_string(error->found_by) + " gave up on " +
                      error->operation + ": " + error->text;
      }
      error->operation = operation;
    }
    first = *error;
  }
  set_said_by_peer(first.said_by_peer);
  throw CommunicationError("comm::" + first.operation.substr(0, first.operation.find(' ')),
                           first.operation + ": " + first.text, {}, first.fix);
}

void GroupCore::fail(const std::string& operation, std::string text, std::string fix) {
  link->liveness().fail({link->launch_rank(), operation, std::move(text), std::move(fix)},
                        milliseconds(500));
  raise(operation);
}

void GroupCore::diagnose(const std::string& operation, uint64_t sequence, const std::string& text,
                         bool timed_out) {
  Liveness& liveness = link->liveness();
  const CommClock::time_point until = CommClock::now() + options.heartbeat_timeout;
  // The rank that broke the connection need not be the cause: it may have lost a third rank, or
  // have given up, and reports that soon.
  while (!timed_out && !liveness.failed() && CommClock::now() < until) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (closed) {
        break;
      }
    }
    throw_if_interrupted();
    liveness.look(milliseconds(200));
    const std::vector<int> left = liveness.left_ranks();
    if (!liveness.failed() && !left.empty()) {
      fail(operation, "rank " + std::to_string(link->launch_rank(left[0])) + " has left the world",
           "let every rank do the same operations before close()");
    }
    std::this_thread::sleep_for(milliseconds(10));
  }
  if (timed_out && !liveness.failed()) {
    liveness.look(milliseconds(1000));
    char limit[32];
    std::snprintf(limit, sizeof limit, "%.1f s", double(options.timeout.count()) / 1000);
    fail(operation,
         std::string("timed out after ") + limit + ": " +
             liveness.describe_missing(key, members, sequence, operation),
         "find out what that rank is doing, or raise the timeout");
  }
  check(operation); // throws for a failed world and for a closed group
  fail(operation, "the connection to a peer broke (" + text.substr(0, text.find('\n')) + ")", "");
}

GlooGroup::GlooGroup(std::shared_ptr<WorldLink> link, CommunicatorOptions options,
                     std::vector<int> members) {
  const char* check = std::getenv("HASTEN_COMM_CHECK");
  if (check != nullptr && std::string_view(check) == "0") {
    if (options.check_shapes == ShapeCheck::first) {
      options.check_shapes = ShapeCheck::never;
    }
  } else if (check != nullptr && *check != '\0') {
    options.check_shapes = ShapeCheck::always;
  }
  members = members_or_all(std::move(members), link->world().world_size);
  link->add_group(group_key(options.name, members, link->world().world_size));
  core_ = std::make_shared<GroupCore>(std::move(link), options, std::move(members));
  try {
    connect();
  } catch (...) {
    leave(false);
    throw;
  }
}

GlooGroup::~GlooGroup() { release(); }

void GlooGroup::connect() {
  const std::string operation = operation_label("create", core_->options.name);
  const uint64_t sequence = core_->enter(operation);
  raise_descriptor_limit(4 * static_cast<size_t>(world_size()) + 256); // connections to each rank
  const auto gloo_options = c10d::ProcessGroupGloo::Options::create(core_->options.timeout);
  gloo_options->devices.push_back(core_->link->device(core_->options.interface_address));
  std::future<Gloo> future = core_->link->store().post<Gloo>(
      [gloo_options, rank = rank(), size = world_size(), prefix = "group/" + core_->key](
          c10d::Store& store, const std::atomic<bool>&) {
        const BatchThreads batch;
        return c10::make_intrusive<c10d::ProcessGroupGloo>(
            c10::make_intrusive<c10d::PrefixStore>(prefix, StorePtr::reclaim_copy(&store)), rank,
            size, gloo_options);
      });
  const bool connected = await_future(future, CommClock::now() + core_->options.timeout,
                                      [&] { core_->poll(operation); });
  if (!connected) {
    core_->diagnose(operation, sequence, "", true);
  }
  try {
    gloo_ = future.get();
  } catch (const std::exception& error) {
    core_->diagnose(operation, sequence, error.what(), false);
  }
  if (const auto uid = core_->link->stranger()) {
    core_->fail(operation,
                "a process of another user (uid " + std::to_string(*uid) +
                    ") is connected to rank " + std::to_string(core_->link->launch_rank()),
                "find out what that user runs on this host, then start again");
  }
}

Work GlooGroup::submit(std::string operation, uint64_t sequence, const Start& start,
                       std::function<void()> finish) {
  Gloo gloo;
  {
    const std::lock_guard<std::mutex> lock(gloo_mutex_);
    gloo = gloo_;
  }
  auto state = std::make_shared<GlooOperation>();
  state->core = core_;
  state->operation = std::move(operation);
  state->sequence = sequence;
  state->finish = std::move(finish);
  {
    const std::lock_guard<std::mutex> lock(core_->mutex);
    ++core_->in_flight;
  }
  try {
    start(*gloo)->getFuture()->addCallback([state](c10::ivalue::Future& f) {
      state->complete(f.hasError() ? f.exception_ptr() : nullptr);
    });
  } catch (...) {
    state->complete(std::current_exception());
  }
  return Work(std::move(state));
}

void GlooGroup::abort(std::string_view reason) noexcept {
  try {
    Liveness& liveness = core_->link->liveness();
    const WorldLink& link = *core_->link;
    const bool first = !liveness.failed();
    liveness.fail({link.launch_rank(),
                   "",
                   "rank " + std::to_string(link.launch_rank()) + " failed: " + std::string(reason),
                   "read that rank's messages",
                   {link.world().rank}},
                  milliseconds(500));
    // The store ends with rank 0: let the others read the failure first.
    const CommClock::time_point until = CommClock::now() + milliseconds(1000);
    while (first && serves_store(core_->link->world()) && !liveness.everybody_knows() &&
           CommClock::now() < until) {
      liveness.look(milliseconds(100));
      std::this_thread::sleep_for(milliseconds(10));
    }
  } catch (...) { // out of memory, at the end of the run
  }
}

bool GlooGroup::wait_idle(CommClock::time_point until) {
  std::unique_lock<std::mutex> lock(core_->mutex);
  while (core_->in_flight > 0 && CommClock::now() < until && !core_->link->liveness().failed() &&
         interrupt_signal() == 0) {
    core_->idle.wait_for(lock, milliseconds(50));
  }
  return core_->in_flight == 0;
}

void GlooGroup::close() noexcept {
  {
    const std::lock_guard<std::mutex> lock(core_->mutex);
    if (std::exchange(core_->closed, true)) {
      return;
    }
  }
  leave(!core_->link->liveness().failed() &&
        wait_idle(CommClock::now() + core_->options.heartbeat_timeout));
}

void GlooGroup::leave(bool orderly) noexcept {
  try {
    Gloo gloo;
    {
      const std::lock_guard<std::mutex> lock(gloo_mutex_);
      gloo = std::move(gloo_);
    }
    core_->link->remove_group(std::move(gloo), orderly);
  } catch (...) { // out of memory or threads: the process is about to end
  }
}

void GlooGroup::release() noexcept {
  {
    const std::lock_guard<std::mutex> lock(core_->mutex);
    if (std::exchange(core_->closed, true)) {
      return;
    }
  }
  leave(false);
}

std::shared_ptr<Communicator> GlooGroup::duplicate(const CommunicatorOptions& options) {
  core_->check(operation_label("create", options.name));
  auto group = std::make_shared<GlooGroup>(core_->link, options, core_->members);
  register_group(group);
  return group;
}

std::shared_ptr<Communicator> GlooGroup::new_group(const std::vector<int>& ranks,
                                                   const CommunicatorOptions& options) {
  check_members(ranks, rank(), world_size());
  core_->check(operation_label("create", options.name));
  if (ranks.size() == 1) {
    return make_local_group(options);
  }
  std::vector<int> members;
  for (const int rank : ranks) {
    members.push_back(core_->members[static_cast<size_t>(rank)]);
  }
  auto group = std::make_shared<GlooGroup>(core_->link, options, std::move(members));
  register_group(group);
  return group;
}

} // namespace hasten::detail
