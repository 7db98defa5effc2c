// Keeps one replica of the model on each rank and sums gradients over ranks while backward runs.
// Flat buffers are cut into buckets. Each bucket is reduced as soon as all its gradients are
// complete, in the same order on every rank.
//
//   hasten::Ddp ddp(communicator, module);
//   …                               // the protocol of data_parallel.h
//
// Buckets follow the order in which rank 0 completed its gradients in the first reduced backward.
// Before that they follow the reverse order of registration.
// Gradients of an Embedding or EmbeddingBag with sparse=true stay sparse, unless they are added to earlier
// ones: ranks exchange their rows.
// Gradients of 16-bit parameters are fp32 here (FlatGradients), in sums over batches and ranks: 4
// bytes per element, also in messages unless a comm hook compresses them.
// Threading: one thread. Lifetime: shares module and communicator; the destructor never
// communicates. Design: docs/design/gradient_window.md
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "hasten/comm/communicator.h"
#include "hasten/flat/flat_gradients.h"
#include "hasten/flat/grad_hooks.h"
#include "hasten/parallel/comm_hook.h"
#include "hasten/parallel/data_parallel.h"

namespace torch::nn {
class Module;
}

namespace hasten {

struct DdpOptions {
  /// Size of a bucket. MiB, > 0. A larger bucket gives fewer collectives and less overlap.
  double bucket_cap_mb = 25;
  /// Size of the first bucket, which is small so that reducing starts early. MiB, > 0.
  double first_bucket_mb = 1;
  /// Allows parameters that none of a sum's losses depends on, on some ranks or on all. A parameter
  /// that no rank used keeps the gradient it had (undefined after zero_grad(), so optimizers skip
  /// it). Costs a walk over the loss's graph. If false, and there are several ranks, an unused
  /// parameter is an error on every rank, which names it.
  bool find_unused_parameters = false;
  /// Promises that every reduced backward uses the same parameters as the first one. Unused
  /// parameters are allowed, and no walk over the graph is needed.
  bool static_graph = false;
  /// How buffers (running statistics) are made equal on all ranks.
  BroadcastBuffers broadcast_buffers = BroadcastBuffers::on;
};

class Ddp : public DataParallel {
 public:
  /// Verifies that every rank has the same parameters and buffers (names, shapes, dtypes, strides
  /// of parameters, frozen parameters), broadcasts rank 0's values and lays out the gradients. The
  /// module must already be on its device. Collective, blocking.
  /// Memory: one copy of the gradients. With one rank gradients stay where autograd puts them, and
  /// the copy is made only when earlier gradients must be kept.
  /// Throws InputError, on every rank, naming the first difference.
  Ddp(std::shared_ptr<Communicator> communicator, std::shared_ptr<torch::nn::Module> module,
      DdpOptions options = {});
  Ddp(const Ddp&) = delete;
  Ddp& operator=(const Ddp&) = delete;

  void begin(bool in_place = false) override;
  void start_backward(bool reduce, DdpBackward backward = {}) override;
  void finish_backward() override;
  /// Afterwards gradients are views of the flat buffers (with one rank: autograd's tensors).
  void finish(double factor, const DdpRanks& ranks = {}, bool defer = false) override;
  /// Throws InputError on every rank for unused parameters (see DdpOptions), or if ranks froze
  /// different ones.
  void wait() override;
  void cancel() noexcept override;
  double pending_factor() const override { return pending_factor_; }
  void set_pending_factor(double factor) override { pending_factor_ = factor; }
  void apply_pending_factor() override;
  bool has_earlier_gradients() const override { return !earlier_gradients_.empty(); }
  bool has_foreign_gradients() override;
  bool sharded() const override { return false; }
  void reduce_norms(std::vector<double>&, double) const override {}
  void register_comm_hook(std::shared_ptr<CommHook> hook) override;
  const std::shared_ptr<CommHook>& comm_hook() const override { return hook_; }
  void sync_buffers(const DdpRanks& ranks = {}) override;
  bool evens_out_buffers(bool any_dtype = false) const override;
  void set_local(bool local) override;

  /// This rank's state, between backwards: "grad.<name>" of every gradient that is defined and not
  /// known to be zero, "aside.<name>" of gradients that finish() still adds, the progress of the
  /// sum, the order of buckets (so that a resumed run adds in the same order, bit for bit), and the
  /// hook's state. Local.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// Throws InputError naming a tensor or parameter that is not this model's, or a missing hook.
  /// Local.
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

  FlatGradients& gradients() override { return gradients_; }
  const FlatGradients& gradients() const override { return gradients_; }
  const std::shared_ptr<torch::nn::Module>& module() const override { return module_; }
  const FlatLayout::NamedParameters& parameters() const override { return parameters_; }
  /// Elements of each bucket, in the order of reduction. [bucket]
  std::vector<int64_t> bucket_sizes() const;
  const ReductionReport& reduction() const override { return report_; }
  /// True if the order of buckets has been learned from a backward.
  bool order_is_learned() const { return !learned_.empty(); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Bucket {
    int64_t numel = 0; // elements, padding included
    at::Tensor range{}; // part of a group's buffer; undefined on a rank alone
    std::vector<int64_t> slots{};
    bool sparse = false; // one slot; see Note [Sparse gradients]
    int64_t pending = 0; // gradients still to come in this backward
  };
  // A bucket in flight.
  struct Operation {
    Work handle{};
    CommHook::Step step{}; // of a hook; empty: done
    Clock::time_point started{};
    Clock::time_point ended{};
  };

  void make_buckets();
  void check_parameters() const;
  void keep_earlier_gradients();
  void use_learned_order();

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
  std::vector<size_t> bucket_of_; // [slot]
  std::vector<int64_t> learned_; // order; empty: not yet known
  bool learned_in_use_ = false;
  std::optional<bool> syncs_statistics_; // in forward and backward; empty: not yet known
  std::vector<char> static_ready_; // [slot] this rank's; empty: not yet known
  std::vector<uint32_t> buffer_versions_; // at the last synchronisation
  ReductionReport report_;

  // One sum. All [slot].
  bool begun_ = false;
  bool final_ = false;
  double pending_factor_ = 1;
  std::vector<at::Tensor> earlier_gradients_; // [group] copies that finish() adds; empty: none
  std::vector<char> defined_; // grad() was, at begin(): here, then on any rank
  std::vector<char> used_; // got a gradient: here, then on any rank

  // One backward; hooks may run on several device threads.
  std::mutex mutex_;
  bool in_backward_ = false;
  bool reduce_ = false; // requested
  bool reducing_ = false; // requested, and there are peers
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
  at::Tensor order_; // count, then slots, int32; undefined: not requested
  std::string violation_; // of a static graph
  std::vector<std::string> missing_; // this rank's unused parameters, in quotes
  bool buffers_changed_ = true; // on any rank
};

} // namespace hasten
