// Adapts FullyShard to the interface that a gradient window uses.
#pragma once

#include <memory>
#include <vector>

#include "hasten/parallel/data_parallel.h"
#include "hasten/parallel/fully_shard.h"

namespace hasten::detail {

// Every rank has the batches of a window, at least stand-ins: a rank without one would miss the
// messages in forward.
class ShardedModel final : public DataParallel {
 public:
  ShardedModel(std::shared_ptr<Communicator> communicator,
               std::shared_ptr<torch::nn::Module> module,
               const std::vector<std::shared_ptr<torch::nn::Module>>& units,
               FullyShardOptions options);

  FullyShard& shards() { return sharded_; }
  const FullyShard& shards() const { return sharded_; }

  void begin(bool in_place) override;
  void start_backward(bool reduce, DdpBackward backward) override;
  void finish_backward() override { sharded_.finish_backward(); }
  void finish(double factor, const DdpRanks& ranks, bool defer) override;
  void wait() override { sharded_.wait(); }
  void cancel() noexcept override { sharded_.cancel(); }
  double pending_factor() const override { return 1; }
  void set_pending_factor(double factor) override;
  void apply_pending_factor() override {}
  bool has_aside() const override { return false; }
  bool has_foreign_gradients() override { return false; } // an error at once
  bool sharded() const override { return true; }
  void reduce_norms(std::vector<double>& norms, double norm_type) const override {
    sharded_.reduce_norms(norms, norm_type);
  }
  void register_comm_hook(std::shared_ptr<CommHook> hook) override;
  const std::shared_ptr<CommHook>& comm_hook() const override { return no_hook_; }
  void sync_buffers(const DdpRanks& ranks) override { sharded_.sync_buffers(ranks); }
  bool evens_out_buffers(bool any_dtype) const override {
    return sharded_.evens_out_buffers(any_dtype);
  }
  void set_local(bool local) override { sharded_.set_local(local); }
  FlatGradients& gradients() override { return gradients_; }
  const FlatGradients& gradients() const override { return gradients_; }
  const std::shared_ptr<torch::nn::Module>& module() const override { return sharded_.module(); }
  const FlatLayout::NamedParameters& parameters() const override { return parameters_; }
  const ReductionReport& reduction() const override { return report_; }
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  FullyShard sharded_;
  FlatLayout::NamedParameters parameters_; // shards
  FlatGradients gradients_; // only inspected; its memory is never used
  std::shared_ptr<CommHook> no_hook_;
  ReductionReport report_;
};

} // namespace hasten::detail
