#include "device_watch.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "hasten/base/process.h"
#include "thread_scopes.h"

namespace hasten::detail {

using std::chrono::milliseconds;

DeviceConnections::DeviceConnections(c10::intrusive_ptr<c10d::Backend> backend, at::Device of)
    : device(of), backend_(std::move(backend)) {}

DeviceConnections::~DeviceConnections() { abort(); }

void DeviceConnections::abort() noexcept {
  try {
    backend_->abort();
  } catch (...) { // it has ended, or ends with the process
  }
}

Flight::Flight(std::string name, uint64_t number, c10::intrusive_ptr<c10d::Work> work)
    : operation(std::move(name)), sequence(number), work_(std::move(work)) {}

c10::intrusive_ptr<c10d::Work> Flight::work() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return work_;
}

void Flight::landed(const c10::Stream& stream) {
  c10::intrusive_ptr<c10d::Work> ended; // its tensors go without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  event_.emplace(stream.device_type());
  event_->record(stream);
  ended = std::move(work_);
}

void Flight::block(const c10::Stream& stream) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  event_->block(stream);
}

bool Flight::done() noexcept {
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended_ == CommClock::time_point{} && (work_ ? work_->isCompleted() : event_->query())) {
      ended_ = CommClock::now();
    }
    return ended_ != CommClock::time_point{};
  } catch (...) { // the device has failed: wait() says why
    return false;
  }
}

CommClock::time_point Flight::ended() noexcept {
  done();
  const std::lock_guard<std::mutex> lock(mutex_);
  return ended_;
}

DeviceWatch::DeviceWatch(std::shared_ptr<GroupCore> core,
                         const std::shared_ptr<DeviceConnections>& connections)
    : core_(std::move(core)), connections_(connections) {}

std::shared_ptr<DeviceWatch> DeviceWatch::start(
    std::shared_ptr<GroupCore> core, const std::shared_ptr<DeviceConnections>& connections) {
  auto watch = std::make_shared<DeviceWatch>(std::move(core), connections);
  std::thread([watch, device = connections->device] { watch->run(device); }).detach();
  return watch;
}

void DeviceWatch::add(std::shared_ptr<Flight> flight) {
  const std::lock_guard<std::mutex> lock(mutex_);
  flights_.push_back(std::move(flight));
  if (flights_.size() == 1) {
    changed_.notify_all();
  }
}

void DeviceWatch::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
}

void DeviceWatch::wait_idle() noexcept {
  const CommClock::time_point until = CommClock::now() + core_->options.heartbeat_timeout;
  while (oldest({}) && CommClock::now() < until && !core_->link->liveness().failed() &&
         interrupt_signal() == 0) {
    std::this_thread::sleep_for(milliseconds(1));
  }
}

/// The first operation that has not ended, if it is older than `age`. Asks the device only about
/// those.
std::shared_ptr<Flight> DeviceWatch::oldest(CommClock::duration age) {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (!flights_.empty() && CommClock::now() - flights_.front()->started >= age) {
    if (!flights_.front()->done()) {
      return flights_.front();
    }
    last_end_ = CommClock::now();
    flights_.pop_front();
  }
  return nullptr;
}

void DeviceWatch::run(at::Device device) {
  const NoBrokenPipeSignal no_signal; // abort() may write to peers
  const c10::DeviceGuard guard(device); // a question makes a context on the current device
  do {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return stopping_ || !flights_.empty(); });
    if (changed_.wait_for(lock, milliseconds(50), [this] { return stopping_; })) {
      return;
    }
  } while (look());
}

bool DeviceWatch::look() {
  const std::shared_ptr<DeviceConnections> connections = connections_.lock();
  if (!connections) {
    return false;
  }
  bool fine = false;
  try {
    core_->link->liveness().poll_store();
    fine = !core_->link->liveness().failed() && look_closely(*connections);
  } catch (...) { // the first error of the group, which the next call throws
  }
  if (!fine && core_->link->liveness().failed()) {
    connections->abort();
    return false;
  }
  return true;
}

/// Throws for an operation that failed or is overdue.
bool DeviceWatch::look_closely(DeviceConnections& connections) {
  // A second is far below every timeout; events of younger operations are not asked for.
  const auto late = std::min<CommClock::duration>(milliseconds(1000), core_->options.timeout);
  const std::shared_ptr<Flight> flight = oldest(late);
  bool error = false;
  try {
    error = connections.backend().getError() != c10d::ErrorType::SUCCESS;
  } catch (const std::exception&) { // a back end without this function
  }
  if (flight && CommClock::now() - std::max(flight->started, last_end_) > core_->options.timeout) {
    core_->diagnose(flight->operation, flight->sequence, {.kind = ErrorKind::timed_out});
  }
  if (error) {
    core_->diagnose(flight ? flight->operation : "operation", flight ? flight->sequence : 0,
                    {connections.backend().getBackendName() + " reports an error"});
  }
  return true;
}

} // namespace hasten::detail
