// A group over c10d's Gloo back end.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "group_core.h"

namespace hasten::detail {

class GlooGroup final : public Communicator {
 public:
  /// Collective. Empty `members`: all ranks of the world.
  GlooGroup(std::shared_ptr<WorldLink> link, const CommunicatorOptions& options,
            std::vector<int> members = {});
  /// Closes without telling the peers.
  ~GlooGroup() override;

  int rank() const override { return core_->rank; }
  int world_size() const override { return core_->world_size; }
  const CommunicatorOptions& options() const override { return core_->options; }
  Work start(const Collective& what) override;
  at::Tensor all_gather_rows(const at::Tensor& rows, std::string_view name) override;
  std::vector<nlohmann::json> exchange(std::string_view operation, std::string_view name,
                                       const nlohmann::json& value) override;
  void barrier(std::string_view name) override;
  void abort(std::string_view reason, ErrorKind kind) noexcept override {
    core_->abort(reason, kind);
  }
  void close() noexcept override { core_->close(true); }
  std::shared_ptr<Communicator> duplicate(const CommunicatorOptions& options) override;
  std::shared_ptr<Communicator> new_group(const std::vector<int>& ranks,
                                          const CommunicatorOptions& options) override;
  std::optional<Survivors> shrink() override;

  /// Shared with a group that sends the operations of a device elsewhere.
  const std::shared_ptr<GroupCore>& core() const { return core_; }

 private:
  using Start = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>;

  void connect();
  /// Enters an operation on `tensors` and starts it. `finish` runs once, in the first wait that
  /// completes it.
  Work submit(std::string operation, const std::string& tensors, const Start& start,
              std::function<void()> finish = nullptr);
  Work start_staged(const Collective& what);

  std::shared_ptr<GroupCore> core_;
};

} // namespace hasten::detail
