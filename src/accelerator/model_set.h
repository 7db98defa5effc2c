// The prepared models, their parameters, and what each rank holds of them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hasten/config/precision.h"
#include "hasten/optim/optimizer_state.h"
#include "hasten/parallel/data_parallel.h"
#include "hasten/parallel/fully_shard.h"
#include "hasten/parallel/sync_batch_norm.h"
#include "parts.h"
#include "state/state_contents.h"

namespace torch::optim {
class Optimizer;
}

namespace hasten::detail {

struct PreparedModel {
  std::shared_ptr<DataParallel> parallel;
  std::shared_ptr<FullyShard> sharded; // the same model; null: every rank has a replica
  SyncBatchNormConversion sync_norms;
  bool synced = false; // its forwards communicate
};

class ModelSet {
 public:
  explicit ModelSet(RunContext& run) : run_(run) {}

  /// Does nothing for a model that is prepared, unless a rank has frozen, unfrozen, replaced, moved or
  /// converted a parameter since. Then it calls `forget`, prepares as at first, and returns true. A sharded
  /// model is whole on every rank in between. `precision`: what forwards compute in. `rows_count`: whether
  /// this rank's samples count in a forward of model `i`. Collective. Throws InputError, on every rank, if
  /// ranks differ, or if a model that has changed has gradients.
  bool prepare(const std::shared_ptr<torch::nn::Module>& module, Precision precision,
               const std::function<bool(size_t i)>& rows_count,
               const std::function<void(size_t i)>& forget);

  size_t size() const { return models_.size(); }
  const PreparedModel& operator[](size_t i) const { return models_[i]; }
  auto begin() const { return models_.begin(); }
  auto end() const { return models_.end(); }

  /// Throws InputError for a model that was not prepared.
  size_t index(const torch::nn::Module* module, const char* where) const;
  std::vector<size_t> indices(const std::vector<torch::nn::Module*>& modules,
                              const char* where) const;
  /// Masks: bit i is model i.
  std::vector<size_t> in(uint64_t mask) const;
  uint64_t synced(uint64_t mask) const;
  /// The models whose parameters the loss depends on.
  uint64_t of_loss(const at::Tensor& loss) const;
  std::vector<SlotList> slots_of(const std::vector<at::Tensor>& parameters) const;
  bool owns(const at::Tensor& parameter) const;
  /// Throws InputError if a parameter of the model was replaced since prepare().
  void check_parameters(size_t model) const;
  ParameterNames parameter_names() const;
  /// The generators were loaded from a state, so dropout is not seeded any more.
  void generators_loaded() { seeded_ = true; }
  void close();

  // sharded_models.cpp
  /// The ranks of one replica, and those that hold the same shards; null without hsdp.
  const std::shared_ptr<Communicator>& shard_group() const { return shard_group_; }
  int ranks_per_replica() const;
  bool has_replicas(uint64_t mask) const;
  /// What a LocalSGD scope of the model averages over; null: all ranks hold one replica.
  std::shared_ptr<Communicator> replicas_of(size_t model) const;
  /// This rank holds a part of the model, not all of it.
  bool holds_parts(size_t model) const;
  /// Null if the model is not sharded, or not prepared.
  FullyShard* sharded(const torch::nn::Module* module) const;
  HeldRowsByName held_rows() const;
  NamedTensors shards() const;
  /// The tensors of a model that a state has.
  NamedTensors saved_tensors(size_t model) const;
  /// Reshards parameters that zero1 and zero2 keep unsharded between batches. Throws InputError
  /// inside a forward.
  void reshard(const char* where) const;
  void summon_full_params(const std::vector<size_t>& models, const std::function<void()>& use,
                          int on_rank = 0) const;
  void load_full_params(const std::vector<size_t>& models, const std::function<void()>& load) const;
  /// Throws InputError for an optimizer that needs whole parameters of sharded models.
  void check_optimizer(const torch::optim::Optimizer& optimizer,
                       const std::vector<SlotList>& lists) const;
  /// Shards the moments of an optimizer that has stepped before.
  void shard_optimizer_state(torch::optim::Optimizer& optimizer) const;

 private:
  bool changed(size_t model, const torch::nn::Module& module) const;
  void convert_batch_norms(const std::shared_ptr<torch::nn::Module>& module, PreparedModel& state,
                           BroadcastBuffers& broadcast_buffers, std::function<bool()> rows_count);
  /// Takes the model apart: its parameters are whole again.
  void give_back(PreparedModel& model) const;
  void prepare_whole(PreparedModel& state, std::shared_ptr<torch::nn::Module> module,
                     BroadcastBuffers broadcast_buffers);
  void prepare_sharded(PreparedModel& state, std::shared_ptr<torch::nn::Module> module,
                       BroadcastBuffers broadcast_buffers, Precision precision);
  void open_shard_groups();

  RunContext& run_;
  bool seeded_ = false;
  std::vector<PreparedModel> models_;
  std::unordered_map<const torch::nn::Module*, size_t> model_index_;
  std::unordered_map<const void*, std::pair<size_t, std::string>>
      parameter_owner_; // TensorImpl -> model, name
  std::shared_ptr<Communicator> sync_norms_; // for forwards; null: none needed
  std::shared_ptr<Communicator> shard_group_;
  std::shared_ptr<Communicator> replicas_;
};

/// Synchronises the buffers of these models. Collective.
void sync_buffers(const ModelSet& models, uint64_t mask = ~uint64_t{0});
/// The bits of each parameter that all ranks hold, as a number, by a name for people.
nlohmann::json parameter_bits(const ModelSet& models);

} // namespace hasten::detail
