// Keeps one full copy of a model per rank and sums gradients over the ranks while
// backward runs: flat buffers cut into buckets, each reduced as soon as all its
// gradients are there, in the same order on every rank.
//
//   hasten::Ddp ddp(communicator, module);
//   ddp.begin();                    // views in place; what they hold is kept
//   ddp.start_backward(false);      // accumulate here only
//   loss1.backward();
//   ddp.start_backward(true);       // reduce while this one runs
//   loss2.backward();
//   ddp.finish_backward();          // the rest of the buckets
//   ddp.finish(1.0 / rows);         // wait; every p.grad() is sum * factor
//
// Threading: one thread. Lifetime: shares module and communicator; the destructor
// never communicates. Design: docs/design/gradient_window.md
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "hasten/comm/communicator.h"
#include "hasten/core/stateful.h"
#include "hasten/flat/flat_gradients.h"
#include "hasten/flat/grad_hooks.h"

namespace torch::nn {
class Module;
}

namespace hasten {

struct DdpOptions {
  /// Gradients are reduced once this much has gathered. MiB, > 0. Larger: fewer
  /// collectives, less overlap.
  double bucket_cap_mb = 25;
  /// The first bucket's size, so that reducing begins early. MiB, > 0.
  double first_bucket_mb = 1;
  /// finish() copies rank 0's floating-point buffers to every rank.
  bool broadcast_buffers = true;
};

class Ddp : public Stateful {
 public:
  /// Verifies that every rank has the same parameters and buffers (names, shapes,
  /// dtypes, what is frozen), copies rank 0's values to all, and lays out the
  /// gradients. The module is on its device already. Collective, blocking.
  /// Memory: one copy of the gradients.
  /// Throws InputError, on every rank, naming the first that differs.
  Ddp(std::shared_ptr<Communicator> communicator,
      std::shared_ptr<torch::nn::Module> module,
      DdpOptions options = {});
  Ddp(const Ddp&) = delete;
  Ddp& operator=(const Ddp&) = delete;

  /// Start of a sum: puts views back. Gradients found non-zero there (nobody
  /// zeroed them) are set aside and added back by finish(), as torch would
  /// accumulate on top of them; with `keep`, zero ones too. With `in_place` they
  /// stay where they are and the sum is added to them: for a sum that nothing is
  /// reduced into and whose factor is 1. Until finish() a backward without
  /// start_backward throws: its loss would not be weighted. Local.
  /// Throws InputError for a parameter that was unfrozen after construction.
  void begin(bool keep = false, bool in_place = false);
  /// True where begin() set gradients aside.
  bool carried() const { return carried_; }

  /// Before a backward. With `reduce`, buckets are reduced while it runs; if a
  /// sum is final already, this backward's goes to zeroed buffers, alone, and
  /// finish() adds the two. With `hold` no bucket starts before
  /// finish_backward(): for all but one of several models in one backward, whose
  /// buckets would otherwise start in an order that depends on the graph. Local.
  void start_backward(bool reduce, bool hold = false);
  /// After a reducing backward: starts what is left, parameters that took no part
  /// included. Collective, does not block. A rank without data calls it right
  /// after start_backward(true).
  void finish_backward();
  /// Waits for the reduction, multiplies the sum by `factor`, adds what was set
  /// aside, copies buffers from rank 0. Then every grad() is final. Collective.
  void finish(double factor);
  /// Waits for the reduction and no more. Collective.
  void wait();
  /// Exchanges what was set aside and what the buffers hold. Local.
  void swap_aside();
  /// Drops what was set aside.
  void drop_aside();

  /// Gives up after a backward that threw: half-made gradients are zeroed, what
  /// was set aside is dropped. Reductions under way are abandoned, so that the
  /// group is unusable if there were any. Local.
  void cancel() noexcept;

  /// True where a backward outside begin() … finish() left gradients that are
  /// this rank's alone and that nobody has zeroed since. Looks only if there was
  /// such a backward.
  bool has_foreign_gradients();

  /// This rank's part of a state, between backwards: "grad.<name>" of every
  /// gradient that is defined and not known to be zero, "aside.<name>" of what
  /// was set aside, and where the sum stands. Local.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// Throws InputError naming the tensor that is not this model's.
  void load_state(
      const NamedTensors& tensors, const nlohmann::json& values) override;

  FlatGradients& gradients() { return gradients_; }
  const FlatGradients& gradients() const { return gradients_; }
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  /// Trainable or frozen, de-duplicated, in order of registration.
  const FlatLayout::NamedParameters& parameters() const { return parameters_; }
  /// Elements of each bucket, in the order of reduction. [bucket]
  std::vector<int64_t> bucket_sizes() const;
  /// Buckets whose reduction began before the last backward had ended.
  int64_t overlapped_buckets() const { return overlapped_; }

 private:
  struct Bucket {
    at::Tensor range{}; // part of a group's buffer
    int64_t first_slot = 0;
    int64_t last_slot = 0;
    int64_t pending = 0; // gradients still to come in this backward
  };

  void verify_and_broadcast();
  void make_buckets();
  void gradient_ready(int64_t slot);
  void launch_ready_buckets(bool all);
  void set_aside();

  // Set at construction.
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<torch::nn::Module> module_;
  DdpOptions options_;
  FlatLayout::NamedParameters parameters_;
  FlatLayout::NamedParameters module_buffers_;
  FlatGradients gradients_;
  std::vector<GradHook> hooks_; // [slot]
  std::vector<int64_t> bucket_of_; // [slot]

  // One sum.
  bool begun_ = false;
  bool carried_ = false;
  bool final_ = false;
  std::vector<at::Tensor> aside_; // [group]; empty: nothing set aside

  // One backward; hooks may run on several device threads.
  std::mutex mutex_;
  bool in_backward_ = false;
  bool reducing_ = false;
  bool hold_ = false;
  bool foreign_ = false;
  std::vector<Bucket> buckets_;
  size_t next_bucket_ = 0;
  int64_t overlapped_ = 0;
  std::vector<CommHandle> handles_;
};

} // namespace hasten
