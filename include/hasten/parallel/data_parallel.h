// What a gradient window needs of a model whose training is spread over ranks: sums
// of gradients over batches and ranks, made while backward runs.
//
//   model.begin();                    // a new sum
//   model.start_backward(false);      // accumulate here only
//   loss1.backward();
//   model.finish_backward();
//   model.start_backward(true);       // reduce while this one runs
//   loss2.backward();
//   model.finish_backward();          // what is left to reduce
//   model.finish(1.0 / rows);         // wait; every p.grad() is sum * factor
//
// Two kinds: Ddp, where every rank has the whole model, and FullyShard, where each
// has a part of every parameter. gradients() are those of what the rank holds.
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

/// What happens to buffers of every dtype (running statistics, counters) at the end
/// of a sum, so that ranks are equal in evaluation and when they save; and whenever
/// sync_buffers() is called, which the Accelerator does as a window opens. Where all
/// are integer or boolean they are sent only after one was written on some rank.
/// Statistics of a batch stay those of the rank's own rows in any case.
enum class BufferPolicy {
  /// Every rank takes those of the first rank that had a batch.
  broadcast,
  /// Floating-point ones become the mean over the ranks that had a batch.
  /// Integers (counters) are taken from the first, never averaged.
  average,
  /// Each rank keeps its own.
  leave
};

/// What a backward to come is like.
struct DdpBackward {
  /// The loss; with find_unused_parameters its graph says which gradients will
  /// come. Undefined: unused ones are found when backward has ended.
  at::Tensor loss{};
  /// This rank has no batch and adds zeros.
  bool joined = false;
  /// No bucket starts before finish_backward(): for all but one of several models
  /// in one backward, whose buckets would otherwise start in an order that
  /// depends on the graph.
  bool hold = false;
  /// What finish() will multiply by, once it is known; may block on peers that
  /// have come to their start_backward(true). For hooks that compress: without
  /// it they see gradients of another scale.
  std::function<double()> factor{};
};

/// Ranks whose losses are in a sum.
struct DdpRanks {
  /// The first, whose buffers are taken.
  int first = 0;
  /// Their number; 0: all.
  int count = 0;
  /// Whether this rank is one of them.
  bool here = true;
};

/// About the last reduction.
struct ReductionReport {
  int64_t buckets = 0;
  /// Buckets whose reduction began before the backward had ended.
  int64_t overlapped = 0;
  /// Of the buckets' gradients, padding included.
  int64_t bytes = 0;
  /// Time in which at least one bucket was under way. Seconds.
  double communication_seconds = 0;
  /// The part of it that was waited for after backward. Seconds.
  double exposed_seconds = 0;
};

class DataParallel : public Stateful {
 public:
  /// Start of a sum. Gradients are undefined until a backward makes them. What
  /// was there and not zero (nobody zeroed it) is set aside and added back by
  /// finish(), as torch would accumulate on top of it.
  /// With `in_place` it stays where it is and the sum is added to it: for a sum
  /// that nothing is reduced into and whose factor is 1. Until finish() a backward
  /// without start_backward throws: its loss would not be weighted. Local.
  /// Throws InputError for a parameter that was unfrozen, moved, reshaped or
  /// converted after construction.
  virtual void begin(bool in_place = false) = 0;

  /// Before a backward. With `reduce`, gradients are reduced while it runs; if a
  /// sum is final already, this backward's is reduced alone, and finish() adds the
  /// two. Ddp: local, except that buckets without a gradient to wait for are
  /// started.
  virtual void start_backward(bool reduce, DdpBackward backward = {}) = 0;
  /// After a backward: starts what is left, parameters that took no part
  /// included. Collective where it reduces, does not block. A rank without data
  /// calls it right after start_backward(true, {.joined = true}).
  virtual void finish_backward() = 0;
  /// Waits for the reduction, multiplies the sum by `factor`, adds what was set
  /// aside, evens out buffers. Then every grad() is final, or, where no rank used
  /// the parameter, what it was. Collective.
  /// With `defer` it may leave the multiplication to whoever reads the gradients
  /// next: see pending_factor().
  virtual void finish(double factor, const DdpRanks& ranks = {}, bool defer = false) = 0;
  /// Waits for the reduction and no more. Collective.
  virtual void wait() = 0;
  /// Gives up after a backward that threw: gradients become undefined, what was
  /// set aside is dropped. Reductions under way are abandoned, so that the
  /// group is unusable if there were any. Local.
  virtual void cancel() noexcept = 0;

  /// What every gradient is still to be multiplied by; 1: nothing. A new sum, a
  /// further backward and apply_pending_factor() do it.
  virtual double pending_factor() const = 0;
  /// Said by whoever multiplied, or who multiplies by something more later.
  virtual void set_pending_factor(double factor) = 0;
  /// Multiplies. One pass over the gradients, none where it is 1. Local.
  virtual void apply_pending_factor() = 0;

  /// Something but zeros was set aside by begin() or by a further backward, and is
  /// still to be added.
  virtual bool has_aside() const = 0;

  /// True where a backward outside begin() … finish() left gradients that are
  /// this rank's alone and that nobody has zeroed since. Looks only if there was
  /// such a backward.
  virtual bool has_foreign_gradients() = 0;

  /// Each rank holds a part of every parameter and its gradient.
  virtual bool sharded() const = 0;
  /// Makes p-norms of gradients that this rank holds the whole model's, in place;
  /// equally many on every rank. Where each holds all of it: nothing to do. Else
  /// collective, one small sum.
  virtual void reduce_norms(std::vector<double>& norms, double norm_type) const = 0;

  /// Sums gradients by this hook from the next sum on; null: plainly again. Does
  /// nothing on a rank alone. Collective.
  /// Throws InputError, on every rank, where ranks register different ones, or
  /// the model takes none.
  virtual void register_comm_hook(std::shared_ptr<CommHook> hook) = 0;
  virtual const std::shared_ptr<CommHook>& comm_hook() const = 0;

  /// Evens out the module's buffers by the policy, now: for an evaluation or a
  /// save in the middle of a sum. One message per dtype. Collective, blocking.
  virtual void sync_buffers(const DdpRanks& ranks = {}) = 0;
  /// There are peers, a policy that makes buffers equal, and some that torch
  /// writes in a forward: floating-point ones; with `any_dtype`, any at all. Local,
  /// equal on all ranks.
  virtual bool evens_out_buffers(bool any_dtype = false) const = 0;

  /// While true, sums stay this rank's own and buffers are left alone, as if
  /// there were no peers. Between sums. Local.
  /// Throws InputError in a sum, or where a rank cannot be by itself.
  virtual void set_local(bool local) = 0;

  /// Of what this rank holds of each parameter.
  virtual FlatGradients& gradients() = 0;
  virtual const FlatGradients& gradients() const = 0;
  virtual const std::shared_ptr<torch::nn::Module>& module() const = 0;
  /// Trainable or frozen, de-duplicated, in order of registration.
  virtual const FlatLayout::NamedParameters& parameters() const = 0;
  virtual const ReductionReport& reduction() const = 0;
};

} // namespace hasten
