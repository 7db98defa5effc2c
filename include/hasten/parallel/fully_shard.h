// Keeps a part of every parameter, gradient and optimizer state per rank, and puts
// the whole parameters of a block together only while the block runs.
//
//   hasten::FullyShard sharded(communicator, module, hasten::repeated_blocks(*module));
//   torch::optim::AdamW optimizer(module->parameters());   // sees shards, for ever
//   sharded.begin();                                       // a new sum
//   {
//     auto forward = sharded.forward_scope();              // the root's parameters
//     loss = cross_entropy(module->forward(x), y);         // blocks: their own
//   }
//   sharded.start_backward(true);
//   loss.backward();
//   sharded.finish_backward();
//   sharded.finish(1.0 / rows);                            // every p.grad() is final
//   optimizer.step();
//
// A unit is a block that the model calls through hasten::call_block (or an entry of a
// torch::nn::Sequential); what belongs to no block is the root unit. A parameter is
// one tensor for ever, under its name. Idle it holds this rank's shard: rows
// [rank * c, (rank + 1) * c) of dim 0, c = ceil(rows / ranks), the last ranks' fewer
// or none (a 0-d parameter counts as one row). While its unit runs it is whole, in
// param_dtype. A block, forward and backward: gather, run, let go; gather, run, sum
// gradients and scatter them. The root is gathered once a batch, from the forward's
// begin to the backward's end.
//
// Every rank runs the same units in the same order, forward and backward; a unit that
// one rank's loss does not reach is made up for. A rank without a batch runs a stand-in of
// weight 0.
// Everything that a block computes leaves by its outputs; a view of a parameter that
// outlives the block has no memory.
// A shard is used as if it were whole where shapes allow it (ranks that hold all
// rows): only gradients that reach an idle parameter are found, and are an error.
// Threading: one thread. Lifetime: shares module and communicator; the destructor
// never communicates; parameters stay shards. "Collective" = every rank of the
// communicator (and of the replicas' one), in the same order.
// Design: docs/design/fully_sharded.md
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
struct ShardFlat;
struct ShardTensor;
} // namespace detail

/// What is divided over the ranks. Bytes a parameter of fp32 training with Adam on N
/// ranks; elements sent a step, of one batch, by each rank.
enum class ShardingStrategy {
  /// Parameters, gradients, optimizer state: 16 / N; sends 3 of each element.
  fsdp,
  /// Parameters stay whole from a window's first forward to its last backward:
  /// 4 + 16 / N; sends 2.
  zero2,
  /// Gradients, too, until the window's last backward: 8 + 16 / N; sends 2.
  zero1,
};

/// When gradients are summed over ranks, in a window of several batches.
enum class GradientSync {
  /// In each backward: memory stays constant, k batches send k times.
  each,
  /// In the last: every rank keeps whole gradients until then, in fp32:
  /// FullyShard::unsharded_gradient_bytes().
  last,
};

/// Number types of a unit.
struct MixedPrecisionPolicy {
  /// Of parameters while they are whole: on the wire and in the block. Shards stay
  /// as they are, so the optimizer's are fp32. Empty: the shard's.
  std::optional<at::ScalarType> param_dtype{};
  /// Of gradients on the wire; they are summed in fp32 (fp64 of fp64 parameters)
  /// whatever it is. Empty: the type they are summed in.
  std::optional<at::ScalarType> reduce_dtype{};
  /// Of a block's floating-point outputs. Empty: as they come.
  std::optional<at::ScalarType> output_dtype{};
  /// A block's floating-point inputs are cast to param_dtype. The root's are not:
  /// nobody sees them.
  bool cast_forward_inputs = true;
};

struct FullyShardOptions {
  ShardingStrategy strategy = ShardingStrategy::fsdp;
  /// False: blocks stay whole from forward to backward, one gather less, all
  /// parameters in memory. Empty: as the strategy says.
  std::optional<bool> reshard_after_forward{};
  /// Empty: as the strategy says (zero1: last).
  std::optional<GradientSync> sync{};
  /// Blocks gathered ahead, in the order of the forward before: 0 or 1. 1 takes the
  /// memory of one more block.
  int prefetch = 1;
  MixedPrecisionPolicy precision{};
  /// Of units by name ("encoder.layer.3"; the root is ""), instead.
  std::map<std::string, MixedPrecisionPolicy> unit_precision{};
  /// Running statistics at the end of a sum, as with Ddp.
  BufferPolicy buffers = BufferPolicy::broadcast;
  /// Ranks that hold the same shard as this one: gradients are summed over them
  /// once a window, after the ranks of a shard group have. Null: none.
  std::shared_ptr<Communicator> replicas{};
  /// With replicas: all ranks of all of them, who even out running statistics together
  /// and are those that DdpRanks counts. Null: a shard group does, then replicas.
  std::shared_ptr<Communicator> everyone{};
};

/// One parameter and this rank's part of it.
struct ShardedParameter {
  std::string name{};
  at::Tensor parameter{};
  /// Of the whole.
  std::vector<int64_t> sizes{};
  /// Rows of dim 0 that this rank holds: [first_row, first_row + rows).
  int64_t first_row = 0;
  int64_t rows = 0;
  /// Index into ShardReport::units.
  size_t unit = 0;
};

/// What was sent, since construction or reset_report().
struct ShardUnitReport {
  std::string name{};
  int64_t gathers = 0;
  int64_t reductions = 0;
  /// Of the whole parameters and gradients as they were sent, padding included.
  int64_t gathered_bytes = 0;
  int64_t reduced_bytes = 0;
  /// Time in which the calling thread waited. Seconds.
  double exposed_seconds = 0;
};
struct ShardReport {
  /// Blocks in the order given, the root last.
  std::vector<ShardUnitReport> units{};
  ShardUnitReport total{};
};

/// While it lives a forward runs: the root's parameters are whole.
class [[nodiscard]] ForwardScope {
 public:
  explicit ForwardScope(const std::shared_ptr<detail::ShardSchedule>& schedule);
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;
  /// Ends the forward, unless start_backward() has. In an exception's wake: gives it
  /// up, so that the next forward starts afresh.
  ~ForwardScope();

 private:
  std::weak_ptr<detail::ShardSchedule> schedule_;
  int64_t forward_ = 0;
  int exceptions_ = 0;
};

/// The children of a module's ModuleLists and Sequentials that have parameters, the
/// outermost ones, in order.
std::vector<std::shared_ptr<torch::nn::Module>> repeated_blocks(const torch::nn::Module& module);

class FullyShard : public Stateful {
 public:
  /// Verifies that every rank has the same parameters and blocks, copies rank 0's
  /// values to all, unit by unit, and leaves each parameter its shard. Parameters and
  /// buffers are on their device; optimizers made before keep working but for their
  /// state, which is not cut. `blocks` are modules of `module`, called through
  /// call_block or children of a Sequential, whose entries are wrapped while this
  /// lives (see gradient_checkpointing_enable; enable that afterwards).
  /// A model of deferred_init gets its values here, on rank 0, where its unit is cut.
  /// Collective, blocking. Memory: the shards, and the model as it was given; of a
  /// deferred one, one whole unit at a time.
  /// Throws InputError, on every rank, naming the first difference between ranks; for
  /// a block that is none of the module's, a parameter of two units (tied), options
  /// out of range.
  FullyShard(std::shared_ptr<Communicator> communicator, std::shared_ptr<torch::nn::Module> module,
             const std::vector<std::shared_ptr<torch::nn::Module>>& blocks,
             FullyShardOptions options = {});
  FullyShard(const FullyShard&) = delete;
  FullyShard& operator=(const FullyShard&) = delete;
  ~FullyShard() override;

  /// Around the model's forward. Collective. With gradients disabled parameters are
  /// shards again at its end.
  /// Throws InputError inside another.
  ForwardScope forward_scope() { return ForwardScope(schedule_); }

  /// Start of a sum. What is in grad() is set aside and added back by finish(), as
  /// torch would accumulate on top of it. Local.
  /// Throws InputError for a parameter that was moved, converted or unfrozen since.
  void begin();
  /// Before a backward. `reduce`: the last of the sum. Ends an open forward scope.
  /// After finish() it starts a further sum, which is added. Collective.
  void start_backward(bool reduce);
  /// After a backward: gathers and reduces what this rank's loss did not reach.
  /// Collective.
  void finish_backward();
  /// Waits for the reductions and no more. Collective.
  /// Throws CommunicationError where ranks ran different units.
  void wait();
  /// wait(), multiplies the sum by `factor`, adds what was set aside. Then every
  /// grad() is final and of its shard's shape; undefined where no rank used the
  /// parameter. Evens out buffers. Collective.
  /// Throws InputError, on every rank, where the module has another tensor in a
  /// parameter's place.
  void finish(double factor, const DdpRanks& ranks = {});
  /// As Ddp's.
  void sync_buffers(const DdpRanks& ranks = {});
  bool evens_out_buffers(bool any_dtype = false) const;
  /// Makes every parameter its shard, for who looks at them inside a window: what
  /// zero1, zero2 and reshard_after_forward = false keep whole between its batches is
  /// gathered again by the next forward. False inside a forward scope or a backward,
  /// where it does nothing. On all ranks or none; local.
  bool reshard();
  /// While true, sums stay this shard group's and running statistics too, as if there
  /// were no replicas: each goes its own way. Between sums. Local.
  /// Throws InputError in a sum.
  void set_local(bool local);
  /// Gives up, after a forward or backward that threw: parameters are shards,
  /// gradients undefined. What is under way goes on, so all ranks must cancel at the
  /// same point for the group to stay usable. Local.
  void cancel() noexcept;

  /// The norm of the whole gradient: 1, 2, or infinity; NaN and infinity stay. Of
  /// final gradients, after finish(). One small collective.
  double grad_norm(double norm_type = 2);
  /// Makes p-norms of this rank's gradients (tensor_norms) those of whole ones, in
  /// place; equally many on every rank. One small collective.
  void reduce_norms(std::vector<double>& norms, double norm_type) const;

  /// In order of registration, one entry a tensor.
  const std::vector<ShardedParameter>& parameters() const { return parameters_; }
  /// This rank's rows of a tensor of the whole parameter's shape; a view. Local.
  at::Tensor own_slice(size_t parameter, const at::Tensor& whole) const;
  /// The whole of which each rank holds a shard like the parameter's: the parameter
  /// itself, an optimizer's moment. Memory: one whole tensor, twice. Collective.
  at::Tensor gather_like(size_t parameter, const at::Tensor& shard);
  /// The whole parameter, in its shard's dtype. Between a backward and a forward.
  /// Throws InputError for an unknown name. Collective.
  at::Tensor gather_parameter(const std::string& name);
  /// The whole of one parameter after the other. Collective.
  void for_each_full_parameter(
      const std::function<void(const std::string& name, const at::Tensor& whole)>& function);
  /// Takes this rank's slice. Throws InputError for another shape. Local.
  void load_parameter(const std::string& name, const at::Tensor& whole);

  /// What GradientSync::last keeps per rank. Bytes.
  int64_t unsharded_gradient_bytes() const;
  /// Of whole parameters, now. Bytes; 0 between finish() and the next forward.
  int64_t gathered_bytes() const;
  /// Of recycled memory, in use or not: a few units' worth, which stays between steps
  /// because fresh memory is slow. Bytes.
  int64_t buffer_bytes() const;
  /// Frees those that are not in use. Local.
  void release_buffers();

  /// Lets go of the groups that were made here, before the communicator's close().
  void close() noexcept;

  ShardReport report() const;
  void reset_report();

  const std::shared_ptr<Communicator>& shard_communicator() const { return communicator_; }
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  const FullyShardOptions& options() const { return options_; }

  /// This rank's part of a state, between backwards: where the sum stands, and
  /// "grad.<name>", "sum.<name>" (whole, of GradientSync::last), "aside.<name>".
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// Throws InputError naming the tensor that is not this model's. Local.
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  void check_options() const;
  void make_units(const std::vector<std::shared_ptr<torch::nn::Module>>& blocks);
  void assign_parameters(const std::unordered_map<const torch::nn::Module*, size_t>& blocks);
  void verify() const;
  void broadcast_start(const FlatLayout::NamedParameters& tensors);
  void shard_units();
  void attach(const std::vector<std::shared_ptr<torch::nn::Module>>& blocks);
  void check_parameters() const;
  void check_unused() const;
  void gradient_ready(size_t parameter);
  detail::ShardFlat& flat_of(size_t parameter) const;
  detail::ShardTensor& tensor_of(size_t parameter) const;
  size_t find(const std::string& name) const;
  void set_aside();
  Communicator* replicas() const { return local_ ? nullptr : options_.replicas.get(); }
  void start_agreement();
  void settle_agreement();

  // Set at construction.
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<torch::nn::Module> module_;
  FullyShardOptions options_;
  std::shared_ptr<Communicator> reductions_; // an order of its own
  std::shared_ptr<detail::ShardBuffers> buffers_;
  std::vector<ShardedParameter> parameters_;
  FlatLayout::NamedParameters module_buffers_;
  std::vector<uint32_t> buffer_versions_; // when they were evened out last
  bool buffers_changed_ = false; // on any rank
  std::vector<std::pair<size_t, size_t>> places_; // [parameter] flat, index
  std::vector<std::unique_ptr<detail::ShardUnit>> units_; // until the schedule's
  std::shared_ptr<detail::ShardSchedule> schedule_;
  std::vector<BlockAttachment> attachments_;
  std::vector<std::function<void()>> unwrap_; // Sequentials' entries
  std::vector<GradHook> hooks_;

  // One sum.
  bool begun_ = false;
  bool final_ = false;
  bool local_ = false; // replicas are left alone
  Work agreed_;
  at::Tensor agreement_; // Note [Agreement of shards]
};

} // namespace hasten
