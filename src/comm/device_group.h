// A group of two halves: the operations of a device go through a back end of c10d that moves its
// memory (NCCL), everything else through Gloo. The halves share one GroupCore, and so the order of
// operations, the checks and the first error.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "device_watch.h"
#include "gloo_group.h"

namespace hasten::detail {

class DeviceGroup final : public Communicator {
 public:
  DeviceGroup(std::shared_ptr<GlooGroup> host, DeviceBackendFactory factory, at::Device device);
  ~DeviceGroup() override;

  int rank() const override { return host_->rank(); }
  int world_size() const override { return host_->world_size(); }
  const CommunicatorOptions& options() const override { return host_->options(); }
  Work start(const Collective& what) override { return start_together({what}); }
  Work start_together(const std::vector<Collective>& what) override;
  at::Tensor all_gather_rows(const at::Tensor& rows, std::string_view name) override;
  std::vector<nlohmann::json> exchange(std::string_view operation, std::string_view name,
                                       const nlohmann::json& value) override {
    return host_->exchange(operation, name, value);
  }
  void barrier(std::string_view name) override { host_->barrier(name); }
  void abort(std::string_view reason, ErrorKind kind) noexcept override {
    host_->abort(reason, kind);
  }
  void close() noexcept override;
  std::shared_ptr<Communicator> duplicate(const CommunicatorOptions& options) override {
    return of_this_device(host_->duplicate(options));
  }
  std::shared_ptr<Communicator> new_group(const std::vector<int>& ranks,
                                          const CommunicatorOptions& options) override {
    return of_this_device(host_->new_group(ranks, options));
  }
  std::optional<Survivors> shrink() override;

  /// Makes the device's connections, which the first operation there does otherwise. Collective.
  void connect();

 private:
  std::shared_ptr<Communicator> of_this_device(std::shared_ptr<Communicator> host);
  bool on_device(const Collective& what) const;
  bool is_native(const Collective& what) const;
  Work start_on_device(const std::vector<Collective>& what);

  const std::shared_ptr<GlooGroup> host_;
  const DeviceBackendFactory factory_;
  const at::Device device_;
  std::shared_ptr<DeviceWatch> watch_; // null before connect()
  std::weak_ptr<DeviceConnections> connections_; // GroupCore keeps them
  uint64_t operations_ = 0; // those that it has started on the device
};

/// What a back end's text about connections that it cannot make means, and what helps. Empty: as
/// it says.
struct ConnectionAdvice {
  std::string what{};
  std::string fix{};
};
ConnectionAdvice connection_advice(const std::string& text);

} // namespace hasten::detail
