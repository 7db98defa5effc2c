// One object that makes an ordinary training loop run on one process or many,
// with gradient accumulation that is exact:
//
//   hasten::Accelerator accelerator({.gradient_accumulation_steps = 2});
//   auto [model, optimizer, loader, scheduler] =
//       accelerator.prepare(classifier, adamw, batches, linear);
//   for (const auto& batch : loader) {
//     auto window = accelerator.accumulate(model);
//     accelerator.backward(mean_loss(model->forward(batch.x), batch.y));
//     accelerator.clip_grad_norm_(model, 1.0);
//     optimizer.step();        // these three do nothing until the window is
//     scheduler.step();        // complete
//     optimizer.zero_grad();
//   }
//   accelerator.end_training();
//
// Or without accumulate(), as with torch's DDP: every backward synchronises, adds
// to the gradients that are there, and is scaled by nobody but the caller:
//
//     accelerator.backward(loss / k);
//     if (++i % k == 0) { optimizer.step(); optimizer.zero_grad(); }
//
// A window is gradient_accumulation_steps batches on each rank, fewer at the end
// of the data. When its last backward returns, every p.grad() is the mean gradient
// of all the window's rows on all ranks, whatever the split into batches and ranks.
// "Collective" = every rank calls it, in the same order. State is per object: two
// accelerators in one process do not disturb each other.
// Threading: one thread. Lifetime: destroy it before static destructors run; the
// destructor never communicates.
// Design: docs/design/gradient_window.md
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "hasten/accelerator/accelerator_options.h"
#include "hasten/accelerator/gradients.h"
#include "hasten/accelerator/prepare.h"
#include "hasten/accelerator/prepared.h"
#include "hasten/accelerator/state.h"
#include "hasten/accumulation/gradient_window.h"
#include "hasten/base/world.h"
#include "hasten/comm/communicator.h"
#include "hasten/core/stateful.h"

namespace hasten {

/// One batch inside a window; what Accelerator::accumulate returns. Destroyed by
/// an exception it tells the peers that this rank fails; otherwise it never
/// communicates.
class [[nodiscard]] AccumulateGuard {
 public:
  explicit AccumulateGuard(std::shared_ptr<detail::AcceleratorCore> core);
  AccumulateGuard(const AccumulateGuard&) = delete;
  AccumulateGuard& operator=(const AccumulateGuard&) = delete;
  ~AccumulateGuard();

 private:
  std::shared_ptr<detail::AcceleratorCore> core_;
  int exceptions_at_entry_ = 0;
};

/// Whether backward reduces, while it lives; what no_sync and trigger_sync return.
/// Nests: the innermost of a model decides. Never communicates.
class [[nodiscard]] SyncGuard {
 public:
  SyncGuard(std::shared_ptr<detail::AcceleratorCore> core,
            const std::vector<torch::nn::Module*>& models, bool sync);
  SyncGuard(const SyncGuard&) = delete;
  SyncGuard& operator=(const SyncGuard&) = delete;
  ~SyncGuard();

 private:
  std::shared_ptr<detail::AcceleratorCore> core_;
  uint64_t id_ = 0;
};

/// While it lives forwards of these models may run; what forward_scope returns. Of
/// sharded models they compute in the accelerator's mixed precision, in which blocks
/// are put together. Costs nothing for others.
class [[nodiscard]] ForwardGuard {
 public:
  ForwardGuard(detail::AcceleratorCore& core, const std::vector<torch::nn::Module*>& models);
  ForwardGuard(ForwardGuard&&) noexcept = default;
  ForwardGuard& operator=(ForwardGuard&&) = delete;

 private:
  std::vector<std::unique_ptr<ForwardScope>> scopes_;
  std::unique_ptr<Autocast> cast_;
};

/// Gathering, reducing, who runs what: hasten/accelerator/collect.h. Clipping:
/// hasten/accelerator/gradients.h.
class Accelerator : public Gradients {
 public:
  /// Reads the world from the environment (hasten/base/world.h), meets the peers,
  /// sets this rank's threads, seeds, and makes errors and log lines name the
  /// rank. Collective, blocks up to options.timeout.
  /// Throws InputError for contradictory variables or options < 1.
  explicit Accelerator(AcceleratorOptions options = {});
  /// The same on a group that exists already and stays the caller's to close.
  Accelerator(AcceleratorOptions options, std::shared_ptr<Communicator> communicator);
  Accelerator(Accelerator&&) noexcept = default;
  Accelerator& operator=(Accelerator&&) = delete;
  ~Accelerator();

  /// Prepares any of: models (a ModuleHolder or shared_ptr; returned as it is),
  /// optimizers, ranges of batches and schedulers (anything with step()), in any
  /// order and number; returns the handles in that order, as a tuple, or the one
  /// handle for one object. All but models are borrowed: lvalues that outlive the
  /// handles, or shared_ptrs. Idempotent for a model.
  /// A model is moved to the device, compared with rank 0's, given rank 0's
  /// parameters and buffers, and its gradients become views of flat buffers
  /// (memory: one gradient copy). An optimizer is never replaced.
  /// Collective. Throws InputError naming the first parameter whose name, shape
  /// or dtype differs from rank 0's, on every rank; or an optimizer's parameter
  /// that no prepared model has.
  template <typename... Objects>
  auto prepare(Objects&&... objects);

  /// Prepares a range of batches with a configuration of its own. It becomes a
  /// training loader by accumulate(loader, model).
  template <typename Range>
  auto prepare_data_loader(Range&& range, const DataLoaderConfiguration& configuration) {
    static_assert(detail::argument_is_preparable<1, Range>());
    auto state = std::make_shared<detail::LoaderState>();
    state->config = configuration;
    using Held = typename detail::Lent<Range>::Object;
    return PreparedLoader<Held>(core_, detail::Lent<Range>::share(std::forward<Range>(range)),
                                std::move(state));
  }
  /// `for (auto& batch : accelerator.skip_first_batches(loader, n))`: the loader
  /// itself, whose next loop leaves out this rank's first n batches.
  template <typename Range>
  PreparedLoader<Range>& skip_first_batches(PreparedLoader<Range>& loader, int64_t batches) {
    loader.skip_first_batches(batches);
    return loader;
  }

  /// Opens the next batch of a window over these models; decides whether its
  /// backward completes the window: it is the gradient_accumulation_steps-th, or
  /// the loader's last. Loader: the one prepared together with the models, else
  /// the only training loader. A batch whose guard closes without a
  /// backward does not count. Collective where it makes buffers equal.
  /// Throws InputError if a window is open, a model is not prepared, or a
  /// parameter was unfrozen or replaced since; if which loader is not clear.
  template <detail::ModelHolder... Models>
  AccumulateGuard accumulate(const Models&... models) {
    return open(nullptr, std::nullopt, models...);
  }
  template <typename Range, detail::ModelHolder... Models>
  AccumulateGuard accumulate(const PreparedLoader<Range>& loader, const Models&... models) {
    return open(loader.shared_->state, std::nullopt, models...);
  }
  /// `weight` ≥ 0 is what the mean loss was divided by, if not the batch's rows.
  /// 0: the loss is not looked at; it may be NaN.
  template <typename Range, detail::ModelHolder... Models>
  AccumulateGuard accumulate(const PreparedLoader<Range>& loader, double weight,
                             const Models&... models) {
    return open(loader.shared_->state, weight, models...);
  }

  /// Backward of a scalar loss that is the mean over the batch's rows (or over the
  /// weight given to accumulate).
  ///
  /// Inside accumulate(): in a window's last batch collective; blocks until every
  /// gradient is reduced, and p.grad() is final. A second such call is reduced
  /// alone and added. Else local.
  ///
  /// Outside: adds, to the gradients that are there, the gradient of the mean over
  /// the rows of all ranks, for every prepared model that the loss depends on.
  /// Collective, blocking. Rows are those of the batch that the models' loader
  /// handed out last; unknown: ranks count equally, as in torch's DDP, which is
  /// the same where batches are equal. One process: what loss.backward() does, to
  /// the bit. By hand costs a reduction and a copy of the gradients a batch more
  /// than accumulate(), and weighs batches of a step equally, whatever they hold.
  ///
  /// Autograd's errors pass through; gradients are zero after one.
  void backward(const at::Tensor& mean_loss, BackwardOptions options = {});
  /// Backward of a loss that is a sum over `weight` ≥ 0 terms (tokens). Inside
  /// accumulate() the weight belongs to the batch: a second backward in it must
  /// say the same. Outside, the sum of all ranks is divided by their weights'.
  void backward(const at::Tensor& loss_sum, double weight, BackwardOptions options = {});

  /// Around forwards outside accumulate(): evaluation. Puts together what no block of
  /// a sharded model holds, until the guard is gone; does nothing for other models.
  /// Every rank runs equally many forwards in it. Collective for sharded models.
  template <detail::ModelHolder... Models>
  ForwardGuard forward_scope(const Models&... models) const {
    return ForwardGuard(*core_, {detail::module_of(models).get()...});
  }
  /// Each rank holds a part of this model: it was prepared so, and there are peers.
  template <detail::ModelHolder Model>
  bool shards(const Model& model) const {
    return shards_module(*detail::module_of(model));
  }
  /// Runs `use` on rank 0 while the models' parameters are whole there: to save them
  /// in a format of one's own. On the others it does not run. What `use` writes into
  /// parameters of sharded models is lost. Between windows. Collective, blocking.
  /// Memory on rank 0: the models. Throws what it throws, on every rank.
  template <detail::ModelHolder... Models>
  void summon_full_params(const std::function<void()>& use, const Models&... models) {
    run_summon_full_params(use, {detail::module_of(models).get()...});
  }
  /// Gives every rank its part of rank 0's values of parameters and buffers, which
  /// `load` sets there, whole. Otherwise as summon_full_params().
  template <detail::ModelHolder... Models>
  void load_full_params(const std::function<void()>& load, const Models&... models) {
    run_load_full_params(load, {detail::module_of(models).get()...});
  }

  /// While the guard lives, backward of losses that depend on these models (none
  /// given: all) is local; the next one outside it reduces what has gathered:
  ///   * inside accumulate() a batch may so have several backwards; windows keep
  ///     their lengths and weights
  ///   * outside, mean losses are added up, ranks counting equally, and sums give
  ///     the total over the total weight. No optimizer may step in between.
  template <detail::ModelHolder... Models>
  SyncGuard no_sync(const Models&... models) {
    return SyncGuard(core_, {detail::module_of(models).get()...}, false);
  }
  /// Inside no_sync(): backward reduces again, while the guard lives. The forward
  /// may have run before: only backward decides.
  template <detail::ModelHolder... Models>
  SyncGuard trigger_sync(const Models&... models) {
    return SyncGuard(core_, {detail::module_of(models).get()...}, true);
  }

  /// Sums the model's gradients by this hook from the next window on (see
  /// hasten/parallel/comm_hook.h); null: plainly again. One hook a model.
  /// Collective. Throws InputError, on every rank, where ranks differ.
  template <detail::ModelHolder Model>
  void register_comm_hook(const Model& model, std::shared_ptr<CommHook> hook) {
    register_hook(*detail::module_of(model), std::move(hook));
  }
  /// Makes buffers of models with floating-point ones equal on all ranks, now: for
  /// evaluation in a window on data of one's own. Collective, blocking.
  void sync_buffers();

  /// For a loop over data of one's own: this rank has no batch left. Takes part
  /// with weight 0 in the windows that others complete, until every rank has called
  /// it. Then a rank that trained to the end sends parameters, gradients, optimizer
  /// state, schedulers' ticks and the loss scale to the ranks that did not: all are
  /// equal bit for bit. Loops over prepared loaders need no call. A window left in the
  /// middle is dropped with a warning. Collective, blocking.
  /// Throws InputError, on every rank, where the others train a sharded model or one
  /// with synchronised batch norm, or an optimizer's state is not known (derive it
  /// from Stateful); CommunicationError where a rank ends its loop without the call.
  void join_uneven_inputs();

  /// True where optimizers step after this batch's backward: in a batch that
  /// completes its window, and behind it until the next; outside accumulate()
  /// behind every backward but those under no_sync().
  bool sync_gradients() const;
  /// About the last complete window.
  const WindowReport& last_window() const;

  const AcceleratorOptions& options() const;
  /// Of the windows to come. Every rank sets the same, between windows. Throws
  /// InputError below 1, and inside a window.
  void set_gradient_accumulation_steps(int64_t steps);

  /// What forwards compute in: never automatic.
  Precision mixed_precision() const;
  /// Another one, between windows; automatic tries and agrees. A loss scale begins
  /// anew. Collective, blocking. Throws InputError, on every rank, where ranks ask for
  /// different ones, or one of them cannot compute in it.
  void set_mixed_precision(Precision precision);
  /// A scope that computes in it, for forwards outside accumulate(): evaluation, or
  /// backward by hand, which turns it off while it runs. Nothing changes with fp32.
  /// Local.
  Autocast autocast() const;
  /// What losses are multiplied by; value() is 1 unless mixed_precision is fp16.
  const LossScale& loss_scale() const;

  /// Saves the whole training state into `folder`, which appears by one rename:
  /// prepared models, optimizers, schedulers and positions of loaders, windows
  /// (also one that is not complete), torch's generators of every rank, registered
  /// objects. Between batches, or at the end of the loop's body. A loop left by
  /// `break` counts as still in its epoch. Files and sizes:
  /// hasten/accelerator/state.h. Collective, blocking; ranks in
  /// join_uneven_inputs() take part from there.
  /// Throws InputError, on every rank: a batch without its backward, an optimizer
  /// or scheduler whose state is not known (derive it from Stateful), a folder
  /// that holds something else; Error where a rank cannot write. The folder is
  /// then as it was.
  void save_state(const std::filesystem::path& folder, const SaveStateOptions& options = {});
  /// Restores it, into objects that were prepared and registered in the same
  /// order as then. Call it outside loops over prepared loaders; the next one
  /// goes on where the saved one was: PreparedLoader::epoch() is its epoch.
  /// Collective, blocking. Memory: that of the optimizers' state.
  /// Throws InputError naming file and reason, on every rank, before anything was
  /// changed: incomplete, damaged, another model, other objects.
  LoadedState load_state(const std::filesystem::path& folder, const LoadStateOptions& options = {});
  /// Makes an object of the user's part of the state, under a name of its own.
  /// Every rank registers the same names. A reference is borrowed: it outlives
  /// the accelerator's last save or load. Throws InputError for a name taken, unless
  /// by a shared object that nobody else holds any more.
  void register_for_checkpointing(std::string name, std::shared_ptr<Stateful> object,
                                  StateScope scope = StateScope::shared);
  void register_for_checkpointing(std::string name, Stateful& object,
                                  StateScope scope = StateScope::shared);

  /// Ends the run in order: compares the ranks' steps, then closes the group if this
  /// accelerator made it. Collective. Later collective calls throw. A second call does
  /// nothing. Throws CommunicationError, on every rank, where other ranks train on.
  void end_training();

 private:
  template <typename... Models>
  AccumulateGuard open(std::shared_ptr<detail::LoaderState> loader, std::optional<double> weight,
                       const Models&... models) {
    static_assert(sizeof...(Models) > 0, "accumulate needs a model");
    detail::core_open(*core_, std::move(loader), weight, {detail::module_of(models).get()...});
    return AccumulateGuard(core_);
  }
  bool shards_module(const torch::nn::Module& model) const;
  void run_summon_full_params(const std::function<void()>& use,
                              const std::vector<torch::nn::Module*>& models);
  void run_load_full_params(const std::function<void()>& load,
                            const std::vector<torch::nn::Module*>& models);
  void register_hook(torch::nn::Module& model, std::shared_ptr<CommHook> hook);
};

template <typename... Objects>
auto Accelerator::prepare(Objects&&... objects) {
  return detail::prepare_objects(core_, std::forward<Objects>(objects)...);
}

} // namespace hasten
