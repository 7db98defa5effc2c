// Keeps one full copy of a model per rank and sums gradients over the ranks while
// backward runs: flat buffers cut into buckets, each reduced as soon as all its
// gradients are there, in the same order on every rank.
//
//   hasten::Ddp ddp(communicator, module);
//   ddp.begin();                    // a new sum
//   ddp.start_backward(false);      // accumulate here only
//   loss1.backward();
//   ddp.finish_backward();
//   ddp.start_backward(true);       // reduce while this one runs
//   loss2.backward();
//   ddp.finish_backward();          // the rest of the buckets
//   ddp.finish(1.0 / rows);         // wait; every p.grad() is sum * factor
//
// Buckets follow the order in which the first reduced backward completed rank 0's
// gradients; before it, the reverse order of registration.
// Gradients of 16-bit parameters are fp32 here (FlatGradients), in sums over batches
// and over ranks: 4 bytes a number, also on the wire unless a comm hook narrows it.
// Threading: one thread. Lifetime: shares module and communicator; the destructor
// never communicates. Design: docs/design/gradient_window.md
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hasten/comm/communicator.h"
#include "hasten/core/stateful.h"
#include "hasten/flat/flat_gradients.h"
#include "hasten/flat/grad_hooks.h"
#include "hasten/parallel/comm_hook.h"

namespace torch::nn {
class Module;
}

namespace hasten {

/// What happens to buffers (running statistics) at the end of a sum, so that
/// ranks are equal in evaluation and when they save; and whenever sync_buffers()
/// is called, which the Accelerator does as a window opens. Statistics of a batch
/// stay those of the rank's own rows in any case.
enum class BufferPolicy {
  /// Every rank takes those of the first rank that had a batch.
  broadcast,
  /// Floating-point ones become the mean over the ranks that had a batch.
  /// Integers (counters) are taken from the first, never averaged.
  average,
  /// Each rank keeps its own.
  leave
};

struct DdpOptions {
  /// Gradients are reduced once this much has gathered. MiB, > 0. Larger: fewer
  /// collectives, less overlap.
  double bucket_cap_mb = 25;
  /// The first bucket's size, so that reducing begins early. MiB, > 0.
  double first_bucket_mb = 1;
  /// Allows parameters that a sum's losses do not depend on, on some ranks or on
  /// all. One that none used keeps the gradient it had, undefined after
  /// zero_grad(), so that optimizers leave it alone. Costs a walk over the
  /// loss's graph. Off: such a parameter is an error on every rank that names
  /// it, where there are several.
  bool find_unused_parameters = false;
  /// Promises that every reduced backward uses the parameters the first one did.
  /// Unused ones are allowed and, known beforehand, cost nothing.
  bool static_graph = false;
  BufferPolicy buffers = BufferPolicy::broadcast;
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

class Ddp : public Stateful {
 public:
  /// Verifies that every rank has the same parameters and buffers (names, shapes,
  /// dtypes, what is frozen), copies rank 0's values to all, and lays out the
  /// gradients. The module is on its device already. Collective, blocking.
  /// Memory: one copy of the gradients; on a rank alone, whose gradients stay
  /// where autograd puts them, only once something must be set aside.
  /// Throws InputError, on every rank, naming the first that differs.
  Ddp(std::shared_ptr<Communicator> communicator,
      std::shared_ptr<torch::nn::Module> module,
      DdpOptions options = {});
  Ddp(const Ddp&) = delete;
  Ddp& operator=(const Ddp&) = delete;

  /// Sums buckets by this hook from the next sum on; null: plainly again. Does
  /// nothing on a rank alone. Collective.
  /// Throws InputError, on every rank, where ranks register different ones.
  void register_comm_hook(std::shared_ptr<CommHook> hook);
  const std::shared_ptr<CommHook>& comm_hook() const { return hook_; }

  /// Start of a sum. Gradients are undefined until a backward makes them. What
  /// was there and not zero (nobody zeroed it) is set aside and added back by
  /// finish(), as torch would accumulate on top of it; with `keep`, zeros too.
  /// With `in_place` it stays where it is and the sum is added to it: for a sum
  /// that nothing is reduced into and whose factor is 1. Until finish() a backward
  /// without start_backward throws: its loss would not be weighted. Local.
  /// Throws InputError for a parameter that was unfrozen, moved, reshaped or
  /// converted after construction.
  void begin(bool keep = false, bool in_place = false);

  /// Before a backward. With `reduce`, buckets are reduced while it runs; if a
  /// sum is final already, this backward's goes to zeroed buffers, alone, and
  /// finish() adds the two. Local, except that buckets without a gradient to wait
  /// for are started.
  void start_backward(bool reduce, DdpBackward backward = {});
  /// After a backward: starts what is left, parameters that took no part
  /// included. Collective where it reduces, does not block. A rank without data
  /// calls it right after start_backward(true, {.joined = true}).
  void finish_backward();
  /// Waits for the reduction, multiplies the sum by `factor`, adds what was set
  /// aside, evens out buffers. Then every grad() is final: a view of the flat
  /// buffers (on a rank alone: autograd's tensor), or, where no rank used the
  /// parameter, what it was. Collective.
  /// With `defer` it may leave the multiplication to whoever reads the gradients
  /// next: see pending_factor().
  void finish(double factor, const DdpRanks& ranks = {}, bool defer = false);
  /// What every gradient is still to be multiplied by; 1: nothing. A new sum, a
  /// further backward and apply_pending_factor() do it.
  double pending_factor() const { return pending_factor_; }
  /// Said by whoever multiplied, or who multiplies by something more later.
  void set_pending_factor(double factor) { pending_factor_ = factor; }
  /// Multiplies. One pass over the gradients, none where it is 1. Local.
  void apply_pending_factor();
  /// Waits for the reduction and no more. Collective.
  /// Throws InputError on every rank for unused parameters (see DdpOptions), or
  /// where ranks froze different ones.
  void wait();
  /// Exchanges what was set aside and what the buffers hold. Local.
  void swap_aside();
  /// Slots for which something but zeros was set aside. Looks at all of it.
  std::vector<int64_t> kept_slots() const;
  /// Drops what was set aside for others than these.
  void keep_aside(const std::vector<int64_t>& slots);

  /// Gives up after a backward that threw: gradients become undefined, what was
  /// set aside is dropped. Reductions under way are abandoned, so that the
  /// group is unusable if there were any. Local.
  void cancel() noexcept;

  /// True where a backward outside begin() … finish() left gradients that are
  /// this rank's alone and that nobody has zeroed since. Looks only if there was
  /// such a backward.
  bool has_foreign_gradients();

  /// This rank's part of a state, between backwards: "grad.<name>" of every
  /// gradient that is defined and not known to be zero, "aside.<name>" of what
  /// was set aside, where the sum stands, the order of buckets (a run that goes on
  /// adds up in the same order, to the last bit), and the hook's state. Local.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// Throws InputError naming the tensor or parameter that is not this model's,
  /// or the hook that is missing. Local.
  void load_state(
      const NamedTensors& tensors, const nlohmann::json& values) override;

  /// Evens out the module's buffers by the policy, now: for an evaluation or a
  /// save in the middle of a sum. One message per dtype. Collective, blocking.
  void sync_buffers(const DdpRanks& ranks = {});
  /// There are peers, a policy that makes buffers equal, and some that torch
  /// writes in a forward: floating-point ones. Local, equal on all ranks.
  bool evens_out_buffers() const;

  /// While true, sums stay this rank's own and buffers are left alone, as if
  /// there were no peers. Between sums. Local.
  void set_local(bool local);

  FlatGradients& gradients() { return gradients_; }
  const FlatGradients& gradients() const { return gradients_; }
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  /// Trainable or frozen, de-duplicated, in order of registration.
  const FlatLayout::NamedParameters& parameters() const { return parameters_; }
  /// Elements of each bucket, in the order of reduction. [bucket]
  std::vector<int64_t> bucket_sizes() const;
  /// Buckets whose reduction began before the last backward had ended.
  int64_t overlapped_buckets() const { return report_.overlapped; }
  const ReductionReport& reduction() const { return report_; }
  /// The order of buckets is the learned one.
  bool order_is_learned() const { return !learned_.empty(); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Bucket {
    int64_t numel = 0; // elements, padding included
    at::Tensor range{}; // part of a group's buffer; undefined on a rank alone
    std::vector<int64_t> slots{};
    int64_t pending = 0; // gradients still to come in this backward
  };
  // A bucket under way.
  struct Operation {
    CommHandle handle{};
    CommHook::Step step{}; // a hook's; empty: done
    Clock::time_point started{};
    Clock::time_point ended{};
  };

  void verify_and_broadcast();
  void make_buckets();
  void check_parameters() const;
  std::string replaced_parameter() const;
  void begin_alone(bool in_place);
  void set_aside();
  void use_learned_order();
  bool buffers_may_differ() const;
  std::vector<int64_t> saved_order(const nlohmann::json& names) const;

  // ddp_backward.cpp
  void gradient_ready(int64_t slot);
  std::vector<char> awaited(const DdpBackward& backward) const;
  void launch(size_t bucket);
  void launch_ready_buckets(bool all);
  void check_static_graph();
  void start_agreement();
  void settle_agreement();
  void finish_hooks();
  [[noreturn]] void throw_unused();
  void report_operations(Clock::time_point waited_from);

  // Set at construction.
  std::shared_ptr<Communicator> communicator_;
  bool alone_ = false; // Note [A rank alone]
  std::shared_ptr<torch::nn::Module> module_;
  DdpOptions options_;
  FlatLayout::NamedParameters parameters_;
  FlatLayout::NamedParameters module_buffers_;
  FlatGradients gradients_;
  std::vector<GradHook> hooks_; // [slot]
  std::shared_ptr<CommHook> hook_;

  // Over sums.
  std::vector<Bucket> buckets_;
  std::vector<int64_t> bucket_of_; // [slot]
  std::vector<int64_t> learned_; // order; empty: not yet
  bool learned_in_use_ = false;
  std::vector<char> static_used_; // [slot] agreed; empty: not yet
  std::vector<char> static_ready_; // [slot] this rank's; empty: not yet
  std::vector<uint32_t> buffer_versions_; // when they were evened out last
  ReductionReport report_;

  // One sum. All [slot].
  bool begun_ = false;
  bool carried_ = false;
  bool final_ = false;
  double pending_factor_ = 1;
  std::vector<at::Tensor> aside_; // [group]; empty: nothing set aside
  std::vector<char> aside_defined_; // grad() was, where it was set aside
  bool aside_in_place_ = false; // between two swaps
  std::vector<char> defined_; // grad() was, at the begin: here, then anywhere
  std::vector<char> used_; // got a gradient: here, then anywhere

  // One backward; hooks may run on several device threads.
  std::mutex mutex_;
  bool in_backward_ = false;
  bool reduce_ = false; // asked for
  bool reducing_ = false; // asked for, and there are peers
  bool foreign_ = false;
  bool further_ = false; // a sum of this window was final before
  DdpBackward backward_;
  std::optional<double> prescale_; // hooks: what buckets were multiplied by
  std::vector<char> ready_; // [slot]
  std::vector<char> waits_; // [slot]
  std::vector<int64_t> ready_order_; // slots
  size_t next_bucket_ = 0;
  std::vector<Operation> operations_; // buckets, then agreement and order
  at::Tensor agreement_; // Note [Agreement]
  at::Tensor order_; // count, then slots, int32; undefined: not asked for
  std::string violation_; // of a static graph
  std::vector<std::string> missing_; // this rank's unused parameters
  bool buffers_changed_ = true; // on any rank
};

} // namespace hasten
