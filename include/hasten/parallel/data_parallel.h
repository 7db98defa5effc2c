// The interface that a gradient window uses to sum a model's gradients over batches and ranks while
// backward runs.
//
//   model.begin();                    // a new sum
//   model.start_backward(false);      // accumulate on this rank only
//   loss1.backward();
//   model.finish_backward();
//   model.start_backward(true);       // reduce during this backward
//   loss2.backward();
//   model.finish_backward();          // start the remaining reductions
//   model.finish(1.0 / samples);      // wait; every p.grad() is sum * factor
//
// Ddp implements it with the whole model on each rank. FullyShard keeps a shard of every parameter
// on each rank. gradients() holds the gradients of what this rank holds.
// Threading: one thread. Lifetime: no destructor communicates.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "hasten/core/stateful.h"
#include "hasten/flat/flat_gradients.h"
#include "hasten/parallel/comm_hook.h"

namespace torch::nn {
class Module;
}

namespace hasten {

/// How ranks make module buffers of every dtype (running statistics, counters) equal, so that they
/// evaluate and save the same. This happens at the end of each sum and in sync_buffers(), which the
/// Accelerator calls when a window begins. If all buffers are integer or boolean, they are sent
/// only after some rank has written one. During a batch, statistics are always those of the rank's
/// own samples.
enum class BroadcastBuffers {
  /// DDP's broadcast_buffers=True, but at the end of a sum and not before each forward: every rank
  /// takes the buffers of the first rank that had a batch.
  on,
  /// Floating-point buffers become the mean over the ranks that had a batch. Integers (counters)
  /// are taken from the first of them and never averaged.
  average,
  /// DDP's broadcast_buffers=False: each rank keeps its own.
  off
};

/// Options of the next backward.
struct DdpBackward {
  /// The loss. With find_unused_parameters its graph is searched for the parameters that get a
  /// gradient. Undefined: unused parameters are found when backward has ended.
  at::Tensor loss{};
  /// No bucket starts before finish_backward(). Set it for all but one of several models in one
  /// backward. Otherwise the order in which their buckets start would depend on the graph.
  bool hold = false;
  /// Returns the factor that finish() will multiply by. May block until peers have called
  /// start_backward(true). Hooks that compress need it: without it their gradients have another
  /// scale.
  std::function<double()> factor{};
};

/// The ranks whose losses are in a sum.
struct DdpRanks {
  /// The first of them; it provides the buffers.
  int first = 0;
  /// How many they are; 0: all ranks.
  int count = 0;
  /// Whether this rank is one of them.
  bool here = true;
};

/// Report of the last reduction.
struct ReductionReport {
  int64_t buckets = 0;
  /// Buckets whose reduction began before the backward had ended.
  int64_t overlapped = 0;
  /// Size of the buckets, padding included.
  int64_t bytes = 0;
  /// Time during which at least one bucket was in flight. Seconds.
  double communication_seconds = 0;
  /// The part of it that this rank waited for after backward. Seconds.
  double exposed_seconds = 0;
};

class DataParallel : public Stateful {
 public:
  /// Starts a sum. Gradients are undefined until a backward makes them. Gradients that are present
  /// and not zero are kept apart; finish() adds them, because torch would accumulate on top of
  /// them.
  /// With `in_place` they stay, and the sum is added to them. Use it for a sum that is not reduced
  /// and whose factor is 1. Until finish(), a backward without start_backward throws, because its
  /// loss would not be weighted. Local.
  /// Throws InputError for a parameter that was unfrozen, moved, reshaped or converted after
  /// construction.
  virtual void begin(bool in_place = false) = 0;

  /// Call before a backward. With `reduce`, gradients are reduced while it runs. If a sum is
  /// already final, only this backward's gradients are reduced, and finish() adds the two. Ddp:
  /// local, but it starts buckets that wait for no gradient.
  virtual void start_backward(bool reduce, DdpBackward backward = {}) = 0;
  /// Call after a backward. Starts the remaining reductions, also of parameters without a gradient.
  /// Collective if it reduces; does not block.
  virtual void finish_backward() = 0;
  /// Waits for the reduction, multiplies the sum by `factor`, adds the gradients that were kept
  /// apart, and synchronises buffers. Then every grad() is final. If no rank used the parameter,
  /// its grad() is what it was before. Collective.
  /// With `defer` the multiplication may be left to the next reader of the gradients: see
  /// pending_factor().
  virtual void finish(double factor, const DdpRanks& ranks = {}, bool defer = false) = 0;
  /// Only waits for the reduction. Collective.
  virtual void wait() = 0;
  /// Abandons the sum after a backward that threw. Gradients become undefined, and those kept apart
  /// are dropped. Reductions in flight are abandoned, which makes the group unusable. Local.
  virtual void cancel() noexcept = 0;

  /// The factor by which every gradient is still to be multiplied; 1: none. The next sum, a further
  /// backward or apply_pending_factor() applies it.
  virtual double pending_factor() const = 0;
  /// Replaces the factor, for a caller that has multiplied itself or multiplies by more later.
  virtual void set_pending_factor(double factor) = 0;
  /// Multiplies the gradients by the factor in one pass; no pass if it is 1. Local.
  virtual void apply_pending_factor() = 0;

  /// True if begin() or a further backward keeps gradients other than zero apart, which are still
  /// to be added.
  virtual bool has_earlier_gradients() const = 0;

  /// True if a backward outside begin() … finish() left gradients of this rank alone that have not
  /// been zeroed since. Reads the gradients only if there was such a backward.
  virtual bool has_foreign_gradients() = 0;

  /// True if each rank holds a shard of every parameter and of its gradient.
  virtual bool sharded() const = 0;
  /// Replaces p-norms of this rank's gradients by those of the whole model, in place. Every rank
  /// passes the same number of norms. Does nothing if each rank holds all gradients. Otherwise
  /// collective, one small sum.
  virtual void reduce_norms(std::vector<double>& norms, double norm_type) const = 0;
  /// The same for one norm, [1] fp64, on the device of the gradients. Does not wait for the device.
  virtual at::Tensor reduce_norm(const at::Tensor& norm, double) const { return norm; }

  /// Uses this hook from the next sum on; null: a plain all-reduce. No effect with one rank.
  /// Collective.
  /// Throws InputError on every rank if ranks pass different hooks or the model supports none.
  virtual void register_comm_hook(std::shared_ptr<CommHook> hook) = 0;
  virtual const std::shared_ptr<CommHook>& comm_hook() const = 0;

  /// Synchronises the module's buffers now, by broadcast_buffers, for an evaluation or a save in
  /// the middle of a sum. One message per dtype. Collective, blocking.
  virtual void sync_buffers(const DdpRanks& ranks = {}) = 0;
  /// True if there are several ranks, broadcast_buffers is not `off`, and the model has
  /// floating-point buffers, which torch writes in a forward; with `any_dtype`, buffers of any
  /// dtype. Local, equal on all ranks.
  virtual bool evens_out_buffers(bool any_dtype = false) const = 0;

  /// While true, sums stay on this rank and buffers are not synchronised, as in a world of one
  /// rank. Call it between sums. Local.
  /// Throws InputError during a sum, or if the model cannot be used on one rank alone.
  virtual void set_local(bool local) = 0;

  /// The place of a parameter's gradient for a backward that makes it there: contiguous, of the
  /// parameter's shape and dtype, with any values. It is reduced there, without a copy. Undefined if
  /// the gradient is better made elsewhere. Local.
  virtual at::Tensor reserve_gradient_place(const at::Tensor& parameter) {
    return gradients().reserve_gradient_place(parameter);
  }
  /// Gradients of this rank's part of each parameter.
  virtual FlatGradients& gradients() = 0;
  virtual const FlatGradients& gradients() const = 0;
  virtual const std::shared_ptr<torch::nn::Module>& module() const = 0;
  /// Trainable and frozen parameters, each tensor once, in order of registration.
  virtual const FlatLayout::NamedParameters& parameters() const = 0;
  virtual const ReductionReport& reduction() const = 0;
};

} // namespace hasten
