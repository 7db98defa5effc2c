// Local SGD: every rank makes its own optimizer steps, and the ranks average their parameters every
// H steps. It needs two more lines than a loop with an Accelerator:
//
//   hasten::LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 8});
//   for (const auto& batch : loader) {
//     auto window = accelerator.accumulate(model);
//     accelerator.backward(mean_loss(model->forward(batch.x), batch.y));
//     optimizer.step();
//     scheduler.step();
//     optimizer.zero_grad();
//     local_sgd.step();   // averages after every 8th optimizer step
//   }
//   local_sgd.finish();   // averages what is left
//
// Batch size, learning rate and schedule stay the same as with DDP. Inside the scope backward
// reduces nothing: a window is normalised by this rank's own weight, gradients and clipping are
// local, and each rank's optimizer keeps its own moments. H = 1 with plain SGD is DDP.
//
// The scope counts attempted optimizer steps. A window counts once, when its gradients are final,
// even if the step is skipped because a value is not finite. So accumulation counts as one step,
// and the ranks' counts stay equal.
//
// Inside the scope ranks send nothing but the synchronisations. What a Trainer's callback asks of all
// ranks, and the checksum of the data that all ranks read, travel with them. Ranks without samples
// run stand-in batches that they find without a message; the weight of a rank is 0 in a
// synchronisation before which it had no samples. If the ranks made different numbers of steps, they
// set their counts to the largest in synchronize() and finish().
//
// Models with strategy hsdp: the ranks of a replica train it together. Every H steps the replicas
// are averaged: each rank averages with the ranks that hold the same shard. "Rank" then means
// "replica" in the text above and below.
//
// Threading: the accelerator's thread. "Collective" = every rank calls it, in the same order. The
// destructor never communicates. Guide: docs/guides/local-sgd.md
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "hasten/accelerator/accelerator.h"
#include "hasten/local_sgd/averager.h"

namespace hasten {

/// How the optimizers' moments are treated.
enum class MomentPolicy {
  /// Each rank keeps its own until finish() averages them.
  keep,
  /// Averaged in every synchronisation of all parameters. Sends their bytes, too: with Adam three
  /// times as much. Memory: a copy of them.
  average,
};

/// What the other ranks do when one dies or fails while a scope is open.
enum class PeerFailure {
  /// Every rank throws a CommunicationError that names it. Parameters are those of the last average
  /// or the rank's own.
  stop,
  /// The remaining ranks continue as a smaller world; see LocalSGDOptions::on_peer_failure.
  survivors,
};

struct LocalSGDOptions {
  /// H: attempted optimizer steps between two averages. ≥ 1.
  int64_t local_sgd_steps = 8;
  /// False: the scope does nothing, and training is as without it.
  bool enabled = true;
  /// A variable H: the number of steps until the next synchronisation, called with the number of
  /// steps attempted so far. It must depend on `step` only and be equal on all ranks. Empty:
  /// `local_sgd_steps`.
  std::function<int64_t(int64_t step)> schedule{};
  /// Post-local SGD: in the first post_local_start steps of the scope gradients are averaged, as in
  /// plain training; then Local SGD begins. ≥ 0. Source: Lin, Stich, Patel, Jaggi, "Don't Use Large
  /// Mini-Batches, Use Local SGD", ICLR 2020.
  int64_t post_local_start = 0;
  /// Hierarchical: the ranks of a group average among themselves every inner_steps steps, without
  /// outer step or hook. All ranks average every `local_sgd_steps`, which must be a multiple. 0: no
  /// groups. Memory: one more copy.
  int64_t inner_steps = 0;
  /// The name of this rank's group; ranks with the same name form a group. Empty: one group per
  /// host.
  std::string group{};
  /// Delayed averaging: a snapshot is sent while training continues. `delay` steps later the ranks'
  /// mean minus the snapshot is added. From 0 to local_sgd_steps / average.fragments. Other
  /// collectives do not wait for what is being sent: it has another group of the same ranks. Memory:
  /// one more copy.
  int64_t delay = 0;
  /// Weights each rank by its windows since the last average (samples, or the weight passed to
  /// accumulate and backward). False: ranks count equally.
  bool weigh_by_samples = false;
  MomentPolicy moments = MomentPolicy::keep;
  /// survivors: if a peer is lost, this rank continues without it in step(), synchronize(),
  /// finish() and join_uneven_inputs(). The remaining ranks meet by
  /// Communicator::shrink, within the accelerator's timeout; rank 0 must be among them. If one of them had completed the interrupted
  /// synchronisation, it counts for all. Otherwise it is repeated with the remaining ranks'
  /// parameters, and the lost rank's steps since the last average are lost. An open delayed average
  /// or fragment is dropped, and all parameters are averaged without delay. An average within groups that some ranks have
  /// completed is skipped by the others. Outer step and anchor are those of the last average.
  /// Errors that a hook kept and a driver's momentum start anew.
  /// From then on process_index(), num_processes() and communicator() are those of the smaller
  /// world, with ranks in their old order without gaps. A loader that is being read continues with
  /// this rank's share; the lost rank's share is not read in this pass. A later pass is distributed
  /// over the remaining ranks. A state saved later is one of that many ranks.
  /// Only the scope survives: plain training (post_local_start's too), gathers, evaluations, saves
  /// and dispatch_batches throw as before. Needs average.transactional, unsharded models on all
  /// ranks, and a launcher that does not end the other ranks (docs/guides/local-sgd.md).
  PeerFailure on_peer_failure = PeerFailure::stop;
  /// How synchronisations work: outer step, number format of messages, fragments (streaming: each
  /// is averaged at its own time within the H steps, so that less is sent at a time). See
  /// AveragerOptions.
  AveragerOptions average{};
};

/// Report of a scope's synchronisations.
struct LocalSGDReport {
  /// Attempted optimizer steps, and synchronisations, so far.
  int64_t steps = 0;
  int64_t rounds = 0;
  /// Ranks that train one replica together: 1, except with hsdp.
  int ranks_per_copy = 1;
  /// Averages within the group. The fields below do not include them.
  int64_t inner_rounds = 0;
  /// The last synchronisation.
  AverageReport last{};
  /// Over all synchronisations: bytes that this rank sent, seconds spent, and the share of the
  /// scope's time that this is, 0 to 1.
  int64_t bytes = 0;
  double seconds = 0;
  double communication_share = 0;
};

class LocalSGD {
 public:
  /// Opens the scope for a prepared model, whose parameters are equal on all ranks now. Frozen
  /// parameters are left out, and tied ones count once. Floating-point running statistics are
  /// averaged, too (a batch norm's variance becomes that of the joined samples); integer ones are
  /// taken from rank 0. Collective, blocking. Memory: one fp32 copy of the parameters.
  /// Throws InputError if an option is out of range, if the model is not prepared, is sharded over
  /// all ranks, or has an open window, if no prepared optimizer has its parameters, if a scope is
  /// open already, or, on every rank, if the ranks open different scopes.
  template <detail::ModelHolder Model>
  LocalSGD(Accelerator& accelerator, const Model& model, LocalSGDOptions options = {})
      : LocalSGD(accelerator, *detail::module_of(model), std::move(options)) {}
  LocalSGD(Accelerator& accelerator, torch::nn::Module& model, LocalSGDOptions options);
  /// If finish() was not called, it logs an error and every rank keeps its own parameters. If an
  /// exception destroys the scope, the peers learn that this rank has failed, and end with an error
  /// that names it. Never takes part in a collective.
  ~LocalSGD();
  LocalSGD(const LocalSGD&) = delete;
  LocalSGD& operator=(const LocalSGD&) = delete;

  /// Call it after the optimizer's step. Counts the step, and averages when H steps are complete.
  /// Does nothing inside a window. Returns true if it averaged. Collective if it averages, else
  /// local.
  /// Throws InputError if an optimizer of the model was prepared inside the scope (ranks would mix
  /// up moments), and CommunicationError if a peer fails.
  bool step();
  /// Averages now, unless no rank has made a step since the last average: for an evaluation or a
  /// save. Does not change when the next average is due. Call it between windows. Collective. Ranks
  /// that come early take part in the averages of those that still train.
  void synchronize();
  /// Averages the remaining steps, replaces the optimizers' moments by their means, so that plain
  /// training can follow, and closes the scope. A second call does nothing. Collective.
  void finish();

  /// Closes the scope without an average and without an error in the log, after an error that the
  /// peers know of. Local.
  void abort() noexcept;

  /// False if enabled=false, if the world has one rank, or after finish().
  bool active() const;
  /// Attempted optimizer steps so far; equal on all ranks at the end of the data.
  int64_t steps() const;
  LocalSGDReport report() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
  int exceptions_at_entry_ = std::uncaught_exceptions();
};

} // namespace hasten
