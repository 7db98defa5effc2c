// A group whose tensors of the host go through the memory that the ranks share (transfer_queue.h) if
// all are on one host, through both memory and Gloo if they are several on each host (host_rails.h),
// else through Gloo. Each operation is checked on this rank, compared between ranks, in shared memory
// or if it is new to the group, and started.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend_call.h"
#include "tensor_checks.h"

namespace hasten::detail {

class HostRails;
class TransferQueue;

class HostGroup : public Communicator {
 public:
  /// Collective. Empty `members`: all ranks of the world. With options.backend "gloo" or "shm" it has
  /// that back end, else the one that is possible. Throws InputError if "shm" is not.
  HostGroup(std::shared_ptr<WorldLink> link, const CommunicatorOptions& options,
            std::vector<int> members = {});
  /// Closes without a message to the peers.
  ~HostGroup() override;

  int rank() const override { return core_->rank; }
  int world_size() const override { return core_->world_size; }
  const CommunicatorOptions& options() const override { return core_->options; }
  Work start(const Collective& what) override;
  at::Tensor allocate_tensor(int64_t numel, const at::TensorOptions& options) override;
  at::Tensor all_gather_rows(const at::Tensor& rows, std::string_view name) override;
  std::vector<nlohmann::json> exchange(std::string_view operation, std::string_view name,
                                       const nlohmann::json& value) override;
  void barrier(std::string_view name) override;
  void check(std::string_view name) override { core_->check(operation_label("check", name)); }
  void abort(std::string_view reason, ErrorKind kind) noexcept override {
    core_->abort(reason, kind);
  }
  void close() noexcept override;
  std::shared_ptr<Communicator> duplicate(const CommunicatorOptions& options) override;
  std::shared_ptr<Communicator> new_group(const std::vector<int>& ranks,
                                          const CommunicatorOptions& options) override;
  std::optional<Survivors> shrink() override;

 protected:
  std::vector<int> host_members() const override { return core_->link->beside(core_->members); }
  using Backend = c10::intrusive_ptr<c10d::Backend>;
  using Queue = std::shared_ptr<TransferQueue>;

  const std::shared_ptr<GroupCore>& core() const { return core_; }
  /// Makes the connections of core(). Collective.
  virtual void connect();
  /// A group of the same back ends.
  virtual std::shared_ptr<Communicator> like_this(const CommunicatorOptions& options,
                                                  std::vector<int> members);
  /// Runs `make` in the store's thread, with keys that begin with `prefix`. Collective.
  Backend make_connections(const std::string& name, const std::string& prefix,
                           std::function<Backend(StorePtr)> make);

 private:
  /// Enters an operation on `tensors` and starts it.
  Work submit(std::string operation, const std::string& tensors, Collective what);
  Work start_staged(const Collective& what);
  /// A queue if the group has one host, two if it has several. None if its tensors have to go through
  /// Gloo alone.
  std::vector<Queue> connect_shared(const Hosts& hosts);
  void connect_rails(const Hosts& hosts, const std::vector<Queue>& queues);
  /// As the `rank`-th of `size`.
  Backend connect_gloo(const std::string& prefix, int rank, int size);
  bool has_gloo_alone() const { return shared_.expired() && rails_.expired(); }
  /// Gathers values of those that have the queue. [rank in it]
  std::vector<nlohmann::json> share_values(const Queue& queue, const std::string& operation,
                                           uint64_t sequence, const nlohmann::json& value);

  std::shared_ptr<GroupCore> core_;
  const std::string wanted_; // options.backend
  // Has one of them, which the core keeps.
  std::weak_ptr<TransferQueue> shared_;
  std::weak_ptr<HostRails> rails_;
  std::weak_ptr<Backend> gloo_;
};

} // namespace hasten::detail
