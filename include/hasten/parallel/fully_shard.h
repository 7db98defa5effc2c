// Keeps one shard of every parameter, gradient and optimizer state on each rank, and unshards a
// block's parameters only while the block runs.
//
//   const auto sharded = hasten::fully_shard(module, communicator);
//   torch::optim::AdamW optimizer(module->parameters());   // these are shards from now on
//   sharded->begin();                                      // a new sum
//   {
//     auto forward = sharded->forward_scope();             // unshards the root's parameters
//     loss = cross_entropy(module->forward(x), y);         // each block unshards its own
//   }
//   sharded->start_backward(true);
//   loss.backward();
//   sharded->finish_backward();
//   sharded->finish(1.0 / samples);                        // every p.grad() is final
//   optimizer.step();
//
// A unit is a block that the model calls through hasten::call_block (or an entry of a
// torch::nn::Sequential). The root unit has the parameters outside all blocks. A parameter stays
// the same tensor object under the same name. At rest it holds this rank's shard: rows [rank * c,
// (rank + 1) * c) of dimension 0, c = ceil(rows / ranks). The last ranks have fewer rows or none. A
// 0-d parameter counts as one row. While its unit runs it is unsharded, in param_dtype. A block's
// forward: unshard, run, reshard. Its backward: unshard, run, reduce-scatter the gradients,
// reshard. The root is unsharded once per batch, from the start of forward to the end of backward.
//
// Every rank runs the same units in the same order, forward and backward. If a rank's loss does not
// use a unit, that rank contributes zero gradients for it. A rank without a batch runs a stand-in
// batch of weight 0.
// A block must return all its results as outputs: a view of a parameter has no memory after the
// block has ended.
// A shard that has the parameter's full shape (one rank holds all rows) can be used outside its
// unit's forward without an error in forward. A gradient that arrives at it throws.
// Threading: one thread. Lifetime: shares module and communicator; the destructor never
// communicates; parameters stay shards. "Collective" = every rank of the communicator and of the
// replicas' communicator, in the same order. Design: docs/design/fully_sharded.md
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hasten/comm/communicator.h"
#include "hasten/core/block_call.h"
#include "hasten/core/stateful.h"
#include "hasten/flat/grad_hooks.h"
#include "hasten/parallel/ddp.h"

namespace hasten {

namespace detail {
class ShardBuffers;
class ShardSchedule;
class ShardUnit;
struct ShardBlocks;
struct ShardTensor;
} // namespace detail

/// What is sharded. The figures are bytes per parameter in fp32 training with Adam on N ranks, and
/// the elements per parameter that each rank sends in an optimizer step of one batch.
enum class ShardingStrategy {
  /// Parameters, gradients and optimizer state: 16 / N; sends 3.
  fsdp,
  /// The same, but parameters stay unsharded from a window's first forward to its last backward.
  /// 4 + 16 / N; sends 2.
  zero2,
  /// Gradients also stay unsharded until the window's last backward: 8 + 16 / N; sends 2.
  zero1,
};

/// dtypes of a unit; as FSDP2's MixedPrecisionPolicy.
struct MixedPrecisionPolicy {
  /// dtype of unsharded parameters, in messages and in the block. Shards keep theirs, so the
  /// optimizer sees fp32. Empty: the shard's.
  std::optional<at::ScalarType> param_dtype{};
  /// dtype of gradients in messages. They are always summed in fp32 (fp64 for fp64 parameters).
  /// Empty: the dtype of the sum.
  std::optional<at::ScalarType> reduce_dtype{};
  /// dtype of a block's floating-point outputs. Empty: unchanged.
  std::optional<at::ScalarType> output_dtype{};
  /// Casts a block's floating-point inputs to param_dtype. The root's inputs are not cast, because
  /// forward_scope() does not see them.
  bool cast_forward_inputs = true;
};

struct FullyShardOptions {
  ShardingStrategy strategy = ShardingStrategy::fsdp;
  /// If false, blocks stay unsharded from forward to backward: one all-gather less, and all
  /// parameters in memory. The root and the block that a forward calls last always stay. Empty: the
  /// strategy decides.
  std::optional<bool> reshard_after_forward{};
  /// When gradients are summed over ranks in a window of several batches; Accelerate's
  /// sync_each_batch. True: in each backward. Memory stays constant; k batches send gradients k
  /// times. False: in the last backward, as with FSDP2's set_requires_gradient_sync(False) (DDP's
  /// require_backward_grad_sync = False) before the others. Until then every rank keeps unsharded
  /// gradients in fp32: ShardReport::unsharded_gradient_bytes. Empty: the strategy decides (zero1:
  /// false).
  std::optional<bool> sync_each_batch{};
  /// Blocks gathered ahead, in the order of the previous forward: 0 or 1. 1 takes the memory of one
  /// more block.
  int prefetch = 1;
  MixedPrecisionPolicy precision{};
  /// Replaces `precision` for units by name ("encoder.layer.3"; the root is "").
  std::map<std::string, MixedPrecisionPolicy> unit_precision{};
  /// How running statistics are synchronised at the end of a sum, as with Ddp.
  BroadcastBuffers broadcast_buffers = BroadcastBuffers::on;
  /// The ranks that hold the same shard as this one (HSDP). Gradients are summed over them once per
  /// window, after the sum in the shard group. Null: none.
  std::shared_ptr<Communicator> replicas{};
  /// With replicas: all ranks of all replicas. They synchronise running statistics together, and
  /// DdpRanks counts them. Null: the shard group synchronises first, then the replicas.
  std::shared_ptr<Communicator> everyone{};
  /// Where the shards will be. Parameters and buffers elsewhere move there, unit by unit. Empty: all
  /// are there.
  std::optional<at::Device> device{};
};

/// One parameter and this rank's shard of it.
struct ShardedParameter {
  std::string name{};
  at::Tensor parameter{};
  /// Sizes of the unsharded parameter.
  std::vector<int64_t> sizes{};
  /// Rows of dimension 0 that this rank holds: [first_row, first_row + rows).
  int64_t first_row = 0;
  int64_t rows = 0;
  /// Index into ShardReport::units.
  size_t unit = 0;
};

/// What was sent since construction or reset_report().
struct ShardUnitReport {
  std::string name{};
  int64_t gathers = 0;
  int64_t reductions = 0;
  /// Size of the unsharded parameters and gradients in the messages, padding included.
  int64_t gathered_bytes = 0;
  int64_t reduced_bytes = 0;
  /// Time that the calling thread waited. Seconds.
  double exposed_seconds = 0;
};
struct ShardReport {
  /// Bytes of unsharded parameters at this moment; 0 between finish() and the next forward.
  int64_t unsharded_parameter_bytes = 0;
  /// Bytes of recycled buffers, in use or not: the size of a few units. They are kept between
  /// steps, because fresh memory is slow.
  int64_t buffer_bytes = 0;
  /// Bytes of unsharded gradients that each rank keeps if sync_each_batch is false.
  int64_t unsharded_gradient_bytes = 0;
  /// The blocks in the order given; the root is last.
  std::vector<ShardUnitReport> units{};
  ShardUnitReport total{};
};

/// While it lives, the root's parameters are unsharded for a forward.
class [[nodiscard]] ForwardScope {
 public:
  explicit ForwardScope(const std::shared_ptr<detail::ShardSchedule>& schedule);
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;
  /// Ends the forward, unless start_backward() has ended it. If an exception is in flight, abandons
  /// the forward, and the next one starts from the beginning.
  ~ForwardScope();

 private:
  std::weak_ptr<detail::ShardSchedule> schedule_;
  int64_t forward_ = 0;
  int exceptions_ = 0;
};

/// The children with parameters of a module's outermost ModuleLists and Sequentials, in order.
std::vector<std::shared_ptr<torch::nn::Module>> repeated_blocks(const torch::nn::Module& module);

class FullyShard : public Stateful {
 public:
  /// Verifies that every rank has the same parameters and blocks, broadcasts rank 0's values unit
  /// by unit, and shards each parameter. Optimizers that exist already keep working, but their
  /// state is not sharded. `blocks` are modules of `module`. They are called through call_block or
  /// are children of a Sequential, whose entries are wrapped during this object's lifetime (call
  /// gradient_checkpointing_enable afterwards). For a model of deferred_init, rank 0 computes the
  /// values here, when their unit is sharded. Collective, blocking. Memory: the shards and the
  /// model as passed. Where that has no memory, one unsharded unit at a time.
  /// Throws InputError, on every rank, naming the first difference between ranks; for a block that
  /// is not in the module, for a (tied) parameter of two units, and for options out of range.
  FullyShard(std::shared_ptr<Communicator> communicator, std::shared_ptr<torch::nn::Module> module,
             const std::vector<std::shared_ptr<torch::nn::Module>>& blocks,
             FullyShardOptions options = {});
  FullyShard(const FullyShard&) = delete;
  FullyShard& operator=(const FullyShard&) = delete;
  ~FullyShard() override;

  /// Put it around the model's forward. Collective. With gradients disabled, parameters are
  /// resharded when it ends.
  /// Throws InputError inside another forward scope.
  ForwardScope forward_scope() { return ForwardScope(schedule_); }

  /// Starts a sum. Present gradients are kept apart; finish() adds them, because torch would
  /// accumulate on top of them. Local.
  /// Throws InputError for a parameter that was moved, converted or unfrozen since.
  void begin();
  /// Call before a backward. `reduce`: this is the last backward of the sum. Ends an open forward
  /// scope. After finish() it starts a further sum, which is added. Collective.
  void start_backward(bool reduce);
  /// See DataParallel. The place returns to the buffers after the reduction. Undefined outside a
  /// backward, on one rank, on devices other than the CPU, for a small parameter, for one whose rows the
  /// ranks do not divide, where gradients have another dtype in messages, and where there is a part of
  /// the sum.
  at::Tensor reserve_gradient_place(const at::Tensor& parameter);
  /// Call after a backward. Gathers and reduces units that this rank's forward ran but its loss did
  /// not use.
  /// Collective.
  void finish_backward();
  /// Only waits for the reductions. Collective.
  /// Throws CommunicationError if ranks ran different units.
  void wait();
  /// Calls wait(), multiplies the sum by `factor`, and adds the gradients that were kept apart.
  /// Then every grad() is final and has its shard's shape. It is undefined if no rank used the
  /// parameter. Also synchronises buffers. Collective.
  /// Throws InputError, on every rank, if the module has another tensor in place of a parameter.
  void finish(double factor, const DdpRanks& ranks = {});
  /// See DataParallel.
  void sync_buffers(const DdpRanks& ranks = {});
  bool evens_out_buffers(bool any_dtype = false) const;
  /// FSDPModule.unshard() for every unit: all-gathers all parameters, for callers that read whole
  /// parameters. They stay unsharded until reshard() or begin(), or until a backward reshards them.
  /// Call reshard() before an optimizer steps. Returns false, and does nothing, inside a forward
  /// scope or a backward. Memory: all parameters in param_dtype. Collective, blocking.
  bool unshard();
  /// FSDPModule.reshard() for every unit, also for callers that read shards inside a window. The
  /// next forward gathers again what zero1, zero2 and reshard_after_forward = false keep unsharded
  /// between batches. Returns false, and does nothing, inside a forward scope or a backward. Call
  /// it on all ranks or on none. Local.
  bool reshard();
  /// While true, gradients and running statistics are summed in this shard group only, as if there
  /// were no replicas. Call it between sums. Local.
  /// Throws InputError during a sum.
  void set_local(bool local);
  /// Abandons the sum after a forward or backward that threw. Parameters are resharded, gradients
  /// are undefined. Operations in flight continue, so the group stays usable only if all ranks
  /// cancel at the same point. Local.
  void cancel() noexcept;

  /// The norm of the whole model's final gradient, after finish(). norm_type: 1, 2, or infinity.
  /// NaN and infinity are kept. One small collective.
  double grad_norm(double norm_type = 2);
  /// Replaces p-norms of this rank's gradients (tensor_norms) by those of the unsharded ones, in
  /// place. Every rank passes the same number of norms. One small collective.
  void reduce_norms(std::vector<double>& norms, double norm_type) const;
  /// The same for one norm, [1] fp64, on any device, which it does not wait for.
  at::Tensor reduce_norm(const at::Tensor& norm, double norm_type) const;

  /// In order of registration, one entry per tensor.
  const std::vector<ShardedParameter>& parameters() const { return parameters_; }
  /// This rank's part of `whole`, a tensor of the unsharded parameter's shape; a view. Local.
  at::Tensor own_slice(size_t parameter, const at::Tensor& whole) const;
  /// Gathers a tensor that is sharded like the parameter: the parameter itself or an optimizer's
  /// moment. Memory: twice the unsharded tensor. Collective.
  at::Tensor gather_like(size_t parameter, const at::Tensor& shard);
  /// Gathers a parameter in its shard's dtype. Call it between a backward and a forward.
  /// Collective.
  /// Throws InputError for an unknown name.
  at::Tensor gather_parameter(const std::string& name);
  /// Calls `function` with each unsharded parameter, one after the other. Collective.
  void for_each_full_parameter(
      const std::function<void(const std::string& name, const at::Tensor& whole)>& function);
  /// Copies this rank's part of `whole` into the shard. Throws InputError for another shape. Local.
  void load_parameter(const std::string& name, const at::Tensor& whole);

  /// Frees the buffers that are not in use. Local.
  void release_buffers();

  /// Closes the groups that this object made, before the communicator's close().
  void close() noexcept;

  ShardReport report() const;
  void reset_report();

  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  const FullyShardOptions& options() const { return options_; }

  /// This rank's state, between backwards: the progress of the sum, and "grad.<name>", "sum.<name>"
  /// (unsharded, without sync_each_batch), "aside.<name>".
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// Throws InputError naming a tensor that is not this model's. Local.
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  using Units = std::vector<std::unique_ptr<detail::ShardUnit>>;
  Units make_units(const detail::ShardBlocks& blocks);
  void shard_units(Units units);
  void attach(const detail::ShardBlocks& blocks);
  void check_parameters() const;
  void gradient_ready(size_t parameter);
  detail::ShardTensor& tensor_of(size_t parameter) const { return *places_[parameter]; }
  void open_sum();
  Communicator* replicas() const { return local_ ? nullptr : options_.replicas.get(); }
  void start_agreement();
  void settle_agreement();

  // Set at construction.
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<torch::nn::Module> module_;
  FullyShardOptions options_;
  std::shared_ptr<Communicator> reductions_; // has its own order of operations
  std::shared_ptr<detail::ShardBuffers> buffers_;
  std::vector<ShardedParameter> parameters_;
  FlatLayout::NamedParameters module_buffers_;
  std::vector<uint32_t> buffer_versions_; // at the last synchronisation
  bool buffers_changed_ = false; // on any rank
  std::vector<detail::ShardTensor*> places_; // [parameter]
  std::unordered_map<const c10::TensorImpl*, size_t> index_; // of a parameter
  std::shared_ptr<detail::ShardSchedule> schedule_;
  std::vector<BlockAttachment> attachments_;
  std::vector<std::function<void()>> unwrap_; // Sequentials' entries
  std::vector<GradHook> hooks_;

  // One sum.
  bool begun_ = false;
  bool final_ = false;
  bool local_ = false; // see set_local()
  Work agreed_;
  at::Tensor agreement_; // Note [Agreement of shards]
};

/// As torch.distributed.fsdp.fully_shard: a FullyShard whose units are repeated_blocks(*module) and
/// the root. Parameters of the module become shards. Collective, blocking. Throws as the
/// constructor, which also takes other blocks.
std::shared_ptr<FullyShard> fully_shard(const std::shared_ptr<torch::nn::Module>& module,
                                        std::shared_ptr<Communicator> communicator,
                                        FullyShardOptions options = {});

/// The same for a ModuleHolder.
template <typename Holder>
  requires requires(const Holder& holder) { holder.ptr(); }
std::shared_ptr<FullyShard> fully_shard(const Holder& module,
                                        std::shared_ptr<Communicator> communicator,
                                        FullyShardOptions options = {}) {
  return fully_shard(std::shared_ptr<torch::nn::Module>(module.ptr()), std::move(communicator),
                     std::move(options));
}

} // namespace hasten
