// The operations of one group that run on a device, and the thread that watches them. The host does
// not wait for such operations, so nobody else would notice one that cannot end.
#pragma once

#include <c10/core/Event.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "group_core.h"

namespace hasten::detail {

/// The connections of a group's device. Ends them when it goes.
class DeviceConnections {
 public:
  DeviceConnections(c10::intrusive_ptr<c10d::Backend> backend, at::Device of);
  DeviceConnections(const DeviceConnections&) = delete;
  DeviceConnections& operator=(const DeviceConnections&) = delete;
  ~DeviceConnections();

  const at::Device device;
  c10d::Backend& backend() { return *backend_; }
  /// Ends operations that run, on this rank. A host that waits for them comes free. Any thread.
  void abort() noexcept;

 private:
  const c10::intrusive_ptr<c10d::Backend> backend_;
};

/// An operation from its start until the device has done it.
class Flight {
 public:
  Flight(std::string name, uint64_t number, c10::intrusive_ptr<c10d::Work> work);
  const std::string operation;
  const uint64_t sequence;
  const CommClock::time_point started = CommClock::now();

  /// Null after landed().
  c10::intrusive_ptr<c10d::Work> work() const;
  /// From now on the operation is what the stream has to do: a stream waits for it.
  void landed(const c10::Stream& stream);
  /// Makes the stream wait for what has landed.
  void block(const c10::Stream& stream) const;
  bool done() noexcept;
  CommClock::time_point ended() noexcept;

 private:
  mutable std::mutex mutex_;
  c10::intrusive_ptr<c10d::Work> work_;
  std::optional<c10::Event> event_;
  CommClock::time_point ended_{}; // when somebody first saw its end
};

class DeviceWatch {
 public:
  /// Starts the thread, which keeps the object until stop(), a failure or the group's end.
  static std::shared_ptr<DeviceWatch> start(std::shared_ptr<GroupCore> core,
                                            const std::shared_ptr<DeviceConnections>& connections);
  DeviceWatch(std::shared_ptr<GroupCore> core,
              const std::shared_ptr<DeviceConnections>& connections);

  void add(std::shared_ptr<Flight> flight);
  /// Waits until all operations have ended, at most the heartbeat limit.
  void wait_idle() noexcept;
  void stop();

 private:
  void run(at::Device device);
  /// False once there is nothing more to watch.
  bool look();
  bool look_closely(DeviceConnections& connections);
  std::shared_ptr<Flight> oldest(CommClock::duration age);

  const std::shared_ptr<GroupCore> core_;
  const std::weak_ptr<DeviceConnections> connections_;
  std::mutex mutex_; // guards the members below
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Flight>> flights_; // in the order of their starts, which they end in
  CommClock::time_point last_end_{};
  bool stopping_ = false;
};

} // namespace hasten::detail
