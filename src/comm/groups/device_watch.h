// The operations of a group that run on a device, and the thread that watches those of all groups.
// The host does not wait for such operations, so nobody else would notice one that cannot end.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "backend_call.h"

namespace hasten::detail {

/// Operations that have started as one, until the device has done them.
class Flight final : public Work::State {
 public:
  /// `calls` keep the tensors.
  Flight(std::shared_ptr<GroupCore> core, std::string name, uint64_t number,
         std::vector<BackendCall> calls, c10::intrusive_ptr<c10d::Work> work,
         const at::Device& device);
  const std::string operation;
  const uint64_t sequence;
  const CommClock::time_point started = CommClock::now();

  void wait() override;
  bool done() const noexcept override;
  CommClock::time_point ended() const noexcept override;
  bool has_ended() const noexcept { return ended() != CommClock::time_point{}; }
  /// The handle for the caller. Its end is that of State.
  static Work handle(std::shared_ptr<Flight> flight);

 private:
  void leave() noexcept;
  /// From now on the operation is what the stream has to do, and the back end's work goes.
  void land(const c10::Stream& stream);

  const std::shared_ptr<GroupCore> core_;
  const c10::Stream caller_; // the stream that was current at the start
  std::mutex waiting_; // of those who wait; guards the next member
  std::vector<BackendCall> calls_;
  mutable std::mutex mutex_; // guards the members below
  c10::intrusive_ptr<c10d::Work> work_; // null after land()
  std::optional<c10::Event> event_; // after land()
  mutable CommClock::time_point ended_{}; // when somebody first saw its end
};

/// The connections of a group's device, and its operations in flight. Ends them when it goes.
class DeviceConnections {
 public:
  DeviceConnections(const std::shared_ptr<GroupCore>& core,
                    c10::intrusive_ptr<c10d::Backend> backend, const at::Device& device);
  DeviceConnections(const DeviceConnections&) = delete;
  DeviceConnections& operator=(const DeviceConnections&) = delete;
  ~DeviceConnections();

  c10d::Backend& backend() { return *backend_; }
  void add(std::shared_ptr<Flight> flight);
  /// Waits until all operations have ended, at most the heartbeat limit.
  void wait_idle() noexcept;
  /// Fails the world for an operation that failed or is overdue. If the world has failed, ends the
  /// operations, so that a host which waits for them comes free, and returns false.
  bool look() noexcept;

 private:
  std::shared_ptr<Flight> oldest(CommClock::duration age);
  void abort() noexcept;

  const std::weak_ptr<GroupCore> core_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  const at::Device device_;
  std::mutex mutex_; // guards the members below
  std::deque<std::shared_ptr<Flight>> flights_; // in the order of their starts, which they end in
  CommClock::time_point last_end_{};
};

/// Looks at the connections 20 times a second until they go or the world fails. One thread does so
/// for all of the process, and ends with the last.
void watch_connections(const std::shared_ptr<DeviceConnections>& connections);

} // namespace hasten::detail
