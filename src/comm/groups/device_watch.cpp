#include "device_watch.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Synchronized.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "hasten/base/process.h"
#include "hasten/core/side_stream.h"
#include "meet/thread_scopes.h"

namespace hasten::detail {

using std::chrono::milliseconds;

Flight::Flight(std::shared_ptr<GroupCore> core, std::string name, uint64_t number,
               std::vector<BackendCall> calls, c10::intrusive_ptr<c10d::Work> work,
               const at::Device& device)
    : operation(std::move(name)),
      sequence(number),
      core_(std::move(core)),
      caller_(current_stream(device)),
      calls_(std::move(calls)),
      work_(std::move(work)) {}

Work Flight::handle(std::shared_ptr<Flight> flight) {
  Flight* const own = flight.get();
  return Work(
      std::shared_ptr<State>(own, [flight = std::move(flight)](State*) { flight->leave(); }));
}

void Flight::leave() noexcept {
  try {
    if (work_) {
      const c10::StreamGuard guard(caller_);
      work_->synchronize();
      land(caller_);
    }
  } catch (...) { // the device has failed
  }
  calls_.clear();
}

void Flight::land(const c10::Stream& stream) {
  c10::intrusive_ptr<c10d::Work> ended; // its tensors go without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  event_.emplace(stream.device_type());
  event_->record(stream);
  ended = std::move(work_);
}

void Flight::wait() {
  const std::lock_guard<std::mutex> lock(waiting_);
  core_->poll(operation);
  const c10::Stream stream = current_stream(caller_.device());
  if (!work_) {
    event_->block(stream);
    return;
  }
  try {
    work_->wait();
  } catch (...) {
    core_->diagnose(operation, sequence, current_failure());
  }
  core_->poll(operation); // after an abort there is no result
  for (const BackendCall& call : calls_) {
    if (call.finish) {
      call.finish();
    }
  }
  land(stream);
  if (stream != caller_) { // where the memory of copies goes back to
    event_->block(caller_);
  }
  calls_.clear();
}

bool Flight::done() const noexcept {
  const bool over = core_->link->liveness().failed() || has_ended();
  const std::lock_guard<std::mutex> lock(mutex_);
  return over || !work_;
}

CommClock::time_point Flight::ended() const noexcept {
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended_ == CommClock::time_point{} && (work_ ? work_->isCompleted() : event_->query())) {
      ended_ = CommClock::now();
    }
    return ended_;
  } catch (...) { // the device has failed: wait() says why
    return {};
  }
}

DeviceConnections::DeviceConnections(const std::shared_ptr<GroupCore>& core,
                                     c10::intrusive_ptr<c10d::Backend> backend,
                                     const at::Device& device)
    : core_(core), backend_(std::move(backend)), device_(device) {}

static thread_local bool watches = false; // in the thread that watches

// A back end's destructor may wait for its peers. The watch of the other groups must not.
DeviceConnections::~DeviceConnections() {
  abort();
  if (watches) {
    std::thread([backend = std::move(backend_)] { const NoBrokenPipeSignal no_signal; }).detach();
  }
}

void DeviceConnections::abort() noexcept {
  try {
    backend_->abort();
  } catch (...) { // it has ended, or ends with the process
  }
}

void DeviceConnections::add(std::shared_ptr<Flight> flight) {
  const std::lock_guard<std::mutex> lock(mutex_);
  flights_.push_back(std::move(flight));
}

void DeviceConnections::wait_idle() noexcept {
  const auto core = core_.lock();
  const CommClock::time_point until = CommClock::now() + core->options.heartbeat_timeout;
  while (oldest({}) && CommClock::now() < until && !core->link->liveness().failed() &&
         interrupt_signal() == 0) {
    std::this_thread::sleep_for(milliseconds(1));
  }
}

/// The first operation that has not ended, if it is older than `age`. Asks the device only about
/// those.
std::shared_ptr<Flight> DeviceConnections::oldest(CommClock::duration age) {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (!flights_.empty() && CommClock::now() - flights_.front()->started >= age) {
    if (!flights_.front()->has_ended()) {
      return flights_.front();
    }
    last_end_ = CommClock::now();
    flights_.pop_front();
  }
  return nullptr;
}

// A second is far below every timeout; events of younger operations are not asked for.
bool DeviceConnections::look() noexcept {
  const std::shared_ptr<GroupCore> core = core_.lock();
  if (!core) {
    return false;
  }
  const c10::DeviceGuard guard(device_); // a question makes a context on the current device
  try {
    core->link->liveness().poll_store(core->members);
    const CommClock::duration timeout = core->options.timeout;
    const auto flight = oldest(std::min<CommClock::duration>(milliseconds(1000), timeout));
    OperationFailure failure;
    if (flight && CommClock::now() - std::max(flight->started, last_end_) > timeout) {
      failure.kind = ErrorKind::timed_out;
    }
    try {
      if (backend_->getError() != c10d::ErrorType::SUCCESS) {
        failure.text = backend_->getBackendName() + " reports an error";
      }
    } catch (const std::exception&) { // a back end without this function
    }
    const bool bad = !failure.text.empty() || failure.kind == ErrorKind::timed_out;
    if (bad && !core->link->liveness().failed()) {
      core->diagnose(flight ? flight->operation : "operation", flight ? flight->sequence : 0,
                     failure);
    }
  } catch (...) { // the first error of the group, which the next call throws
  }
  if (core->link->liveness().failed()) {
    abort();
    return false;
  }
  return true;
}

using Watched = c10::Synchronized<std::vector<std::weak_ptr<DeviceConnections>>>;

static Watched& watched() {
  // Never destroyed, because the thread may outlive main.
  static Watched* const all = new Watched;
  return *all;
}

/// False once there is nothing more to watch. Looks without the lock: a diagnosis takes seconds.
static bool look_at_all() {
  auto over = watched().withLock([](const auto& all) { return all; });
  std::erase_if(over, [](const auto& one) {
    const auto connections = one.lock();
    return connections && connections->look();
  });
  return watched().withLock([&](auto& all) {
    std::erase_if(all, [&](const auto& one) {
      return std::ranges::any_of(over, [&](const auto& ended) {
        return !one.owner_before(ended) && !ended.owner_before(one);
      });
    });
    return !all.empty();
  });
}

void watch_connections(const std::shared_ptr<DeviceConnections>& connections) {
  watched().withLock([&](auto& all) {
    if (all.empty()) {
      std::thread([] {
        const NoBrokenPipeSignal no_signal; // abort() may write to peers
        watches = true;
        do {
          std::this_thread::sleep_for(milliseconds(50));
        } while (look_at_all());
      }).detach();
    }
    all.push_back(connections);
  });
}

} // namespace hasten::detail
