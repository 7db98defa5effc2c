// The c10d back end "shm": collectives of the ranks of one host, as transfers (transfer_queue.h).
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "hasten/base/text.h"
#include "shared_memory.h"
#include "shared_places.h"
#include "transfer_queue.h"

namespace hasten::detail {

using C10dWork = c10::intrusive_ptr<c10d::Work>;

/// The memory of all ranks of a group, and the transfers in it.
struct SharedRanks {
  SharedRanks(std::vector<std::unique_ptr<SharedMemory>> all, int rank,
              const std::vector<int>& names)
      : memory(std::move(all)),
        places(rank, static_cast<int>(names.size())),
        queue(rank, mapped(memory, [](const auto& one) { return one->data(); }), names, places) {}
  std::vector<std::unique_ptr<SharedMemory>> memory; // [rank]
  SharedPlaces places;
  TransferQueue queue;
};

/// Returns what all ranks gave. [rank]
using ExchangeJson = std::function<std::vector<nlohmann::json>(const nlohmann::json&)>;

/// Collective, by two exchanges. `names`: the ranks in messages. Throws Error with the reason, on all
/// ranks, if one cannot share its memory.
std::shared_ptr<SharedRanks> share_memory(int rank, const std::vector<int>& names,
                                          const ExchangeJson& exchange);

class SharedBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;

  SharedBackend(int rank, int size, std::shared_ptr<SharedRanks> ranks);
  /// Operations that have not ended fail.
  ~SharedBackend() override;

  /// What ranks compare and errors name in the next operation; without it a text of its tensors.
  void name_next(std::string text) { next_text_ = std::move(text); }
  /// Operations that have started end even if nobody waits.
  void progress_in_thread() { ranks_->queue.progress_in_thread(); }
  /// Replaces [rank] this rank's bytes by those of all.
  C10dWork exchange(std::shared_ptr<std::vector<std::string>> values);

  const std::string getBackendName() const override { return "shm"; }
  /// shared_zeros(), which collectives read in place.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return shared_zeros(size, options);
  }
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  C10dWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  C10dWork allreduce_coalesced(Tensors& tensors,
                               const c10d::AllreduceCoalescedOptions& options) override;
  C10dWork reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  C10dWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  C10dWork allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                     const c10d::AllgatherOptions& options) override;
  C10dWork _allgather_base(at::Tensor& output, at::Tensor& input,
                           const c10d::AllgatherOptions& options) override;
  C10dWork allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) override;
  C10dWork gather(std::vector<Tensors>& outputs, Tensors& inputs,
                  const c10d::GatherOptions& options) override;
  C10dWork scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                   const c10d::ScatterOptions& options) override;
  C10dWork reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                          const c10d::ReduceScatterOptions& options) override;
  C10dWork _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& options) override;
  C10dWork reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                           const c10d::ReduceScatterOptions& options) override;
  C10dWork alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                         std::vector<int64_t>& input_splits,
                         const c10d::AllToAllOptions& options) override;
  C10dWork alltoall(Tensors& outputs, Tensors& inputs,
                    const c10d::AllToAllOptions& options) override;
  C10dWork barrier(const c10d::BarrierOptions& options) override;
  void setSequenceNumberForGroup() override {}

 private:
  /// `kind`, `op` and `root` of `arguments` are set.
  C10dWork start(TransferArguments arguments, const Tensors& inputs, const Tensors& outputs,
                 std::chrono::milliseconds timeout);
  /// Of an operation of which this rank has one tensor on a side.
  TransferArguments arguments(TransferArguments::Kind kind, const Tensors& tensors,
                              int64_t root = 0,
                              const c10d::ReduceOp& op = c10d::ReduceOp::SUM) const;
  void find_places(TransferArguments& arguments) const;
  Tensors rows(const at::Tensor& all) const;

  const std::shared_ptr<SharedRanks> ranks_;
  std::string next_text_{};
};

/// An operation of SharedBackend.
class SharedWork final : public c10d::Work {
 public:
  using Tensors = SharedBackend::Tensors;

  /// Starts it.
  SharedWork(int rank, int size, std::shared_ptr<SharedRanks> ranks, TransferArguments arguments,
             Tensors inputs, Tensors outputs, std::chrono::milliseconds timeout);
  /// Moves it on in this thread, at most for `limit`, or until it has ended.
  void drive(std::chrono::milliseconds limit) { ranks_->queue.drive(*item_, limit); }
  /// Calls `f` once it has ended, in the thread that ends it.
  void on_end(std::function<void(std::exception_ptr)> f) { item_->on_end(std::move(f)); }

  bool isCompleted() override;
  bool isSuccess() const override { return item_->outcome() == std::exception_ptr(nullptr); }
  std::exception_ptr exception() const override { return item_->outcome().value_or(nullptr); }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::shared_ptr<SharedRanks> ranks_;
  const Tensors outputs_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<TransferQueue::Item> item_;
};

} // namespace hasten::detail
