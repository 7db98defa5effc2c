// Makes an ordinary training loop run on one process or many, with exact gradient accumulation:
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
// Or without accumulate(), as with torch's DDP. Every backward then reduces and accumulates into
// `.grad`, and you divide the loss by the number of accumulation steps yourself:
//
//     accelerator.backward(loss / k);
//     if (++i % k == 0) { optimizer.step(); optimizer.zero_grad(); }
//
// An accumulation window is gradient_accumulation_steps batches on each rank, or fewer at the end
// of the data. After its last backward every p.grad() is the gradient of the mean loss over all
// samples of the window on all ranks. The split into batches and ranks does not change it.
// "Collective" = every rank calls it, in the same order. Two accelerators in one process do not
// affect each other, because each object has its own state. Threading: one thread. Lifetime:
// destroy it before static destructors run; the destructor never communicates. Design:
// docs/design/gradient_window.md
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hasten/accelerator/accelerator_options.h"
#include "hasten/accelerator/gradients.h"
#include "hasten/accelerator/prepare.h"
#include "hasten/accelerator/prepared.h"
#include "hasten/accumulation/gradient_window.h"
#include "hasten/base/world.h"
#include "hasten/comm/communicator.h"
#include "hasten/core/stateful.h"
#include "hasten/state/saved_state.h"
#include "hasten/tracking/tracker.h"

namespace hasten {

/// One batch inside a window; returned by Accelerator::accumulate. If an exception destroys it, the
/// peers learn that this rank has failed. Otherwise it never communicates.
class [[nodiscard]] AccumulateGuard {
 public:
  /// `loader` null: the one that is prepared with the models.
  AccumulateGuard(std::shared_ptr<detail::AcceleratorCore> core,
                  std::shared_ptr<detail::LoaderState> loader, std::optional<double> weight,
                  const std::vector<torch::nn::Module*>& models);
  AccumulateGuard(const AccumulateGuard&) = delete;
  AccumulateGuard& operator=(const AccumulateGuard&) = delete;
  ~AccumulateGuard();

 private:
  std::shared_ptr<detail::AcceleratorCore> core_;
  int exceptions_at_entry_ = 0;
};

/// Decides whether backward reduces while it lives; returned by no_sync and trigger_sync. If guards
/// of a model are nested, the innermost one decides. Never communicates.
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

/// Forwards of these models may run while it lives; returned by forward_scope. Forwards of sharded
/// models compute in the accelerator's mixed precision, in which blocks are unsharded. Costs
/// nothing for other models.
class [[nodiscard]] ForwardGuard {
 public:
  ForwardGuard(detail::AcceleratorCore& core, const std::vector<torch::nn::Module*>& models);
  ForwardGuard(ForwardGuard&&) noexcept = default;
  ForwardGuard& operator=(ForwardGuard&&) = delete;

 private:
  std::vector<std::unique_ptr<ForwardScope>> scopes_;
  std::unique_ptr<Autocast> cast_;
};

/// Prepares the objects of a training loop, and reduces the gradients of its windows. Gather, reduce
/// and "run on one rank": hasten/accelerator/collect.h. Clipping: hasten/accelerator/gradients.h.
class Accelerator : public Gradients {
 public:
  /// Reads the world from the environment (hasten/base/world.h), connects to the peers, sets this
  /// process's number of threads, seeds the generators, and makes errors and log lines name the
  /// rank. Collective, blocks up to options.timeout. Throws InputError for contradictory variables
  /// and for options out of range.
  explicit Accelerator(AcceleratorOptions options = {});
  /// The same on an existing group, which the caller closes.
  Accelerator(AcceleratorOptions options, std::shared_ptr<Communicator> communicator);
  Accelerator(Accelerator&&) noexcept = default;
  Accelerator& operator=(Accelerator&&) = delete;
  ~Accelerator();

  /// Prepares models (a ModuleHolder or shared_ptr; returned unchanged), optimizers, ranges of
  /// batches and schedulers (anything with step()), in any order and number. Returns their handles
  /// in that order, as a tuple, or a single handle for one object. All objects except models are
  /// borrowed: they are lvalues that outlive the handles, or shared_ptrs. A model or optimizer may be
  /// prepared again. Do so on all ranks, between windows and after zero_grad(), when parameters were frozen,
  /// unfrozen or replaced; the state of optimizers stays.
  /// A model is moved to the device and compared with rank 0's. It gets rank 0's parameters and
  /// buffers, and its gradients become views of flat buffers (memory: one copy of the gradients).
  /// Optimizers are never replaced.
  /// Collective. Throws InputError on every rank, naming the first parameter whose name, shape or
  /// dtype differs from rank 0's; and for an optimizer's parameter that belongs to no prepared
  /// model.
  template <typename... Objects>
  auto prepare(Objects&&... objects);

  /// Prepares a range of batches with its own configuration. accumulate(loader, model) makes it a
  /// training loader.
  template <typename Range>
  auto prepare_data_loader(Range&& range, const DataLoaderConfiguration& configuration) {
    static_assert(detail::argument_is_preparable<1, Range>());
    auto state = std::make_shared<detail::LoaderState>();
    state->config = configuration;
    using Held = typename detail::BorrowedArgument<Range>::Object;
    return PreparedLoader<Held>(detail::loader_link(core_),
                                detail::BorrowedArgument<Range>::share(std::forward<Range>(range)),
                                std::move(state));
  }
  /// Returns the loader itself. Its next loop skips this rank's first `batches` batches:
  ///  `for (auto& batch : accelerator.skip_first_batches(loader, n))`.
  template <typename Range>
  PreparedLoader<Range>& skip_first_batches(PreparedLoader<Range>& loader, int64_t batches) {
    loader.skip_first_batches(batches);
    return loader;
  }

  /// Opens the next batch of a window over these models and decides whether its backward completes
  /// the window. It does if the batch is the gradient_accumulation_steps-th of the window or the
  /// loader's last. The loader is the one that was prepared together with the models, else the only
  /// training loader. A batch whose guard closes without a backward does not count. Collective
  /// where it synchronises buffers.
  /// Throws InputError if a window is open, a model is not prepared, a parameter was unfrozen or
  /// replaced since prepare(), or more than one loader is possible.
  template <detail::ModelHolder... Models>
  AccumulateGuard accumulate(const Models&... models) {
    return open(nullptr, std::nullopt, models...);
  }
  template <typename Range, detail::ModelHolder... Models>
  AccumulateGuard accumulate(const PreparedLoader<Range>& loader, const Models&... models) {
    return open(loader.state(), std::nullopt, models...);
  }
  /// `weight` ≥ 0: the number that the mean loss was divided by, if it is not the number of
  /// samples. 0: the loss is ignored and may be NaN.
  template <typename Range, detail::ModelHolder... Models>
  AccumulateGuard accumulate(const PreparedLoader<Range>& loader, double weight,
                             const Models&... models) {
    return open(loader.state(), weight, models...);
  }

  /// Backward of a scalar loss that is the mean over the batch's samples (or over the weight passed
  /// to accumulate).
  ///
  /// Inside accumulate(): in a window's last batch it is collective and blocks until every gradient
  /// is reduced; p.grad() is then final. A second such call is reduced separately and added. In
  /// other batches it is local.
  ///
  /// Outside: adds the gradient of the mean loss over the samples of all ranks to the existing
  /// gradients, for every prepared model that the loss depends on. Collective, blocking. The number
  /// of samples is that of the batch that the models' loader returned last. If it is unknown, ranks
  /// count equally, as in torch's DDP; for equal batches this is the same. With one process it does
  /// what loss.backward() does, bit for bit. Per batch this costs one reduction and one copy of the
  /// gradients more than accumulate(), and the batches of an optimizer step count equally, however
  /// many samples they have.
  ///
  /// Autograd's exceptions pass through; the gradients are then zero.
  void backward(const at::Tensor& mean_loss, BackwardOptions options = {});
  /// Backward of a loss that is a sum over `weight` ≥ 0 terms (tokens). Inside accumulate() the
  /// weight belongs to the batch, so a second backward of the batch must pass the same one.
  /// Outside, the sum over all ranks is divided by the sum of their weights.
  void backward(const at::Tensor& loss_sum, double weight, BackwardOptions options = {});

  /// For forwards outside accumulate(), such as evaluation. Unshards the root unit of a sharded
  /// model (the parameters outside all blocks) while the guard lives. Does nothing for other
  /// models. Every rank must run the same number of forwards in it. Collective for sharded models.
  template <detail::ModelHolder... Models>
  ForwardGuard forward_scope(const Models&... models) const {
    return ForwardGuard(*core_, {detail::module_of(models).get()...});
  }
  /// Runs `use` on rank 0, where the models' parameters are unsharded meanwhile: for example to
  /// save them in your own format. It does not run on other ranks. Values that `use` writes into
  /// parameters of sharded models are lost. Call it between windows. Collective, blocking. Memory
  /// on rank 0: the models. Rethrows an exception of `use` on every rank.
  template <detail::ModelHolder... Models>
  void summon_full_params(const std::function<void()>& use, const Models&... models) {
    run_summon_full_params(use, {detail::module_of(models).get()...});
  }
  /// `load` sets whole parameters and buffers on rank 0. Every rank then gets its shard of these
  /// values. Otherwise like summon_full_params().
  template <detail::ModelHolder... Models>
  void load_full_params(const std::function<void()>& load, const Models&... models) {
    run_load_full_params(load, {detail::module_of(models).get()...});
  }
  /// The model's unsharded parameters and buffers by name, on rank 0; empty on the others. Between
  /// windows. Collective, blocking. Memory on rank 0: a copy of the model, twice if it is sharded.
  NamedTensors get_state_dict(const detail::ModelRef& model);
  /// Writes get_state_dict()'s tensors to model.safetensors in the folder, tied tensors once. Other
  /// files in the folder stay. Rank 0 writes. Collective, blocking.
  void save_model(const detail::ModelRef& model, const std::filesystem::path& save_directory);

  /// While the guard lives, backward of losses that depend on these models (all models if none is
  /// passed) is local. The next backward outside it reduces everything accumulated:
  ///   * inside accumulate(): a batch can have several backwards this way; length and weights of
  ///     windows do not change
  ///   * outside: mean losses are added up with equal weight for each rank; sums give the total
  ///     over the total weight. No optimizer may step in between.
  template <detail::ModelHolder... Models>
  SyncGuard no_sync(const Models&... models) {
    return SyncGuard(core_, {detail::module_of(models).get()...}, false);
  }
  /// Inside no_sync(): backward reduces again while the guard lives. The forward may have run
  /// before, because only backward decides.
  template <detail::ModelHolder... Models>
  SyncGuard trigger_sync(const Models&... models) {
    return SyncGuard(core_, {detail::module_of(models).get()...}, true);
  }

  /// From the next window on, this hook reduces the model's gradients
  /// (hasten/parallel/comm_hook.h). Null: the plain all-reduce again. One hook per model.
  /// Collective. Throws InputError on every rank if the ranks' hooks differ.
  void register_comm_hook(const detail::ModelRef& model, std::shared_ptr<CommHook> hook);
  /// Synchronises the buffers of models that have floating-point buffers now. Use it to evaluate
  /// inside a window on a range that was not prepared. Collective, blocking.
  void sync_buffers();

  /// The end of a loop over a range that was not prepared, which all ranks ran equally often. Inside
  /// LocalSGD they may have run it differently often: the rank takes part in the others'
  /// synchronisations until every rank is here. Loops over prepared loaders need no call, whatever
  /// the ranks' data. An incomplete window is dropped with a warning. Collective, blocking.
  /// Throws CommunicationError on every rank if other ranks continue to train.
  void join_uneven_inputs();

  /// True if optimizers step after this batch's backward: in a batch that completes its window, and
  /// from there until the next window opens. Outside accumulate(): after every backward except
  /// those under no_sync().
  bool sync_gradients() const;
  /// Report of the last complete window.
  const WindowReport& last_window() const;

  const AcceleratorOptions& options() const;
  /// Applies to later windows. Every rank sets the same value, between windows. Throws InputError
  /// for steps < 1 and inside a window.
  void set_gradient_accumulation_steps(int64_t steps);

  /// The precision in which forwards compute; never automatic.
  Precision mixed_precision() const;
  /// Changes the precision; call it between windows. automatic tests what is faster, and the ranks
  /// agree. The loss scale starts anew. Collective, blocking. Throws InputError on every rank if
  /// the ranks' values differ or one of them cannot compute in it.
  void set_mixed_precision(Precision precision);
  /// A scope that computes in this precision, for forwards outside accumulate(): evaluation, or
  /// calls of backward() outside it. backward() turns it off while it runs. No effect with fp32.
  /// Local.
  Autocast autocast() const;
  /// The factor of the losses; value() is 1 unless mixed_precision is fp16.
  const LossScale& loss_scale() const;

  /// Saves the whole training state into `folder`, which appears by one rename: prepared models,
  /// optimizers, schedulers, positions of loaders, windows (also an incomplete one), torch's
  /// generators of every rank, registered objects. Call it between batches or at the end of the
  /// loop's body. After `break`, the loop counts as still in its epoch. Files and sizes:
  /// hasten/state/saved_state.h. Collective, blocking.
  /// Throws InputError on every rank for a batch without its backward, an optimizer or scheduler
  /// whose state is unknown (derive it from Stateful), or a folder that holds something else.
  /// Throws Error if a rank cannot write. The folder is then unchanged.
  void save_state(const std::filesystem::path& folder, const SaveStateOptions& options = {});
  /// Restores a saved state into objects that were prepared and registered in the same order. Call
  /// it outside loops over prepared loaders. The next loop continues where the saved one was, in
  /// the epoch PreparedLoader::epoch(). Collective, blocking. Memory: that of the optimizers'
  /// state.
  /// Throws InputError on every rank, naming file and reason, before anything is changed: the state
  /// is incomplete or damaged, or belongs to another model or other objects.
  LoadedState load_state(const std::filesystem::path& folder, const LoadStateOptions& options = {});
  /// Adds your object to the state, under a unique name. Every rank registers the same names. An
  /// object passed by reference is borrowed: it must outlive the accelerator's last save or load.
  /// Throws InputError for a name that is taken, unless by a shared object without other owners.
  void register_for_checkpointing(std::string name, std::shared_ptr<Stateful> object,
                                  StateScope scope = StateScope::shared);
  void register_for_checkpointing(std::string name, Stateful& object,
                                  StateScope scope = StateScope::shared);

  /// Makes the trackers of AcceleratorOptions::log_with on rank 0; named ones write into
  /// logging_dir/project_name. They store `config`, a JSON object of hyper-parameters. A tracker
  /// that fails, here or later, is a warning, and training continues without it. Local.
  void init_trackers(const std::string& project_name,
                     const nlohmann::json& config = nlohmann::json::object());
  /// Passes a JSON object of names and values to all trackers: {{"train/loss", 0.5}}. Local; does
  /// nothing except on rank 0. Throws InputError before init_trackers().
  void log(const nlohmann::json& values, std::optional<int64_t> step = {});
  /// The tracker of this name, for example to log a histogram; never null. Except on rank 0 its
  /// functions do nothing. Throws InputError for a name that is not in log_with.
  std::shared_ptr<GeneralTracker> get_tracker(const std::string& name) const;

  /// Ends the run: compares the ranks' steps, then closes the group if this accelerator made it,
  /// and finishes the trackers. Later collective calls throw. A second call does nothing. Collective. Throws
  /// CommunicationError on every rank if other ranks continue to train.
  void end_training();

 private:
  template <typename... Models>
  AccumulateGuard open(std::shared_ptr<detail::LoaderState> loader, std::optional<double> weight,
                       const Models&... models) {
    static_assert(sizeof...(Models) > 0, "accumulate needs a model");
    return AccumulateGuard(core_, std::move(loader), weight, {detail::module_of(models).get()...});
  }
  void run_summon_full_params(const std::function<void()>& use,
                              const std::vector<torch::nn::Module*>& models);
  void run_load_full_params(const std::function<void()>& load,
                            const std::vector<torch::nn::Module*>& models);
};

template <typename... Objects>
auto Accelerator::prepare(Objects&&... objects) {
  return detail::prepare_objects(core_, std::forward<Objects>(objects)...);
}

} // namespace hasten
