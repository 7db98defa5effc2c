// Local SGD: every rank steps by itself, and every H optimizer steps the ranks
// average their parameters. Two lines more than a loop with an Accelerator has:
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
// Batch size, learning rate and schedule stay what they are with DDP. Inside the
// scope backward reduces nothing: a window is normalised by this rank's own
// weight, gradients and their clipping are local, each rank's optimizer keeps its
// own moments. H = 1 with plain SGD is DDP.
//
// What is counted are attempted optimizer steps: a window counts once, when its
// gradients are final, whether the step was made or skipped for a number that is
// not finite. So accumulation counts as one step, and ranks stay in one rhythm.
//
// Uneven numbers of batches: a rank whose training loader has ended takes part in
// the rounds of the others (with weight 0 where it made no step in them) until all
// have ended; then the ranks set their counts to the largest.
//
// Models with strategy hsdp: the ranks of a copy train it together, every H steps
// copies are averaged, rows by rows: each rank with those that hold the same. What
// is said of ranks is of copies then.
//
// Threading: the accelerator's thread. "Collective" = every rank calls it, in the
// same order. The destructor never communicates. Guide: docs/guides/local-sgd.md
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "hasten/accelerator/accelerator.h"
#include "hasten/parallel/averager.h"

namespace hasten {

/// What becomes of the optimizers' moments.
enum class MomentPolicy {
  /// Each rank keeps its own, until finish() averages them.
  keep,
  /// Averaged in every round of all parameters. Costs their bytes: with Adam three
  /// times as much travels. Memory: a copy of them.
  average,
};

/// What the other ranks do when one dies or fails while a scope is open.
enum class PeerFailure {
  /// Every rank throws CommunicationError that names it, with the parameters of
  /// the last average, or its own.
  stop,
  /// The ranks that are left go on as a smaller world, see
  /// LocalSGDOptions::on_peer_failure.
  survivors,
};

struct LocalSGDOptions {
  /// H: attempted optimizer steps between two averages, ≥ 1.
  int64_t local_sgd_steps = 8;
  /// False: the scope does nothing, and training is what it is without it.
  bool enabled = true;
  /// A changing H: the steps of the round that begins after `step` attempted
  /// steps; a function of `step` alone, the same on every rank. Empty: `local_sgd_steps`.
  std::function<int64_t(int64_t step)> schedule{};
  /// Post-local SGD: gradients are averaged, as in plain training, in this many
  /// steps of the scope; then Local SGD begins. ≥ 0. Source: Lin, Stich, Patel,
  /// Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020.
  int64_t post_local_start = 0;
  /// Hierarchical: the ranks of a group average among themselves every so many
  /// steps, plainly, all ranks every `local_sgd_steps`, a multiple of it. 0: all at once.
  /// Memory: one more copy.
  int64_t inner_steps = 0;
  /// Which group this rank is in: those that give the same name. Empty: its host's.
  std::string group{};
  /// Delayed averaging: a snapshot is sent, and the ranks' mean less the snapshot
  /// is added this many steps later, so that training goes on beside the sending.
  /// From 0 to local_sgd_steps / average.fragments. Memory: one more copy.
  int64_t delay = 0;
  /// Tries delayed averaging in the first rounds, and makes averages at once where
  /// that is as quick. False: delays them in any case.
  bool delay_only_if_it_pays = true;
  /// Ranks count by the weight of the windows they have trained on since the last
  /// average (rows, or what was given to accumulate and backward), not equally.
  bool weigh_by_samples = false;
  MomentPolicy moments = MomentPolicy::keep;
  /// survivors: where a peer is lost, step(), synchronize(), finish() and the end
  /// of a training loader go on without it. The ranks that are left meet
  /// (Communicator::shrink: bounded by the accelerator's timeout, rank 0 must be
  /// among them). The round that broke counts for all of them if one had completed
  /// it; else it is made again, of what they have, and the lost rank's steps since
  /// the last average are gone. A delayed average or a fragment that was under way
  /// is dropped and all parameters are averaged at once; so is, in its group, an
  /// average of a hierarchy that others have completed. Outer step and anchor are
  /// those of the last average; errors that a hook kept and a driver's momentum
  /// begin anew; a trial of delays ends without one.
  /// From then on process_index(), num_processes() and communicator() are of the
  /// smaller world, ranks in their old order without gaps. A loader that is being
  /// read goes on with this rank's share, what was dealt to the lost rank is not
  /// read in this pass; a pass that begins later is dealt over the ranks that are
  /// left. A state saved from then on is one of that many ranks.
  /// Only the scope survives: plain training (post_local_start's too), gathers,
  /// evaluations, saves and dispatch_batches throw as ever. Needs
  /// average.transactional, whole models on all ranks, and a launcher that lets the
  /// others live (docs/guides/local-sgd.md).
  PeerFailure on_peer_failure = PeerFailure::stop;
  /// How rounds are made: outer step, numbers on the wire, fragments (streaming:
  /// each has a turn of its own within the H steps, so that less travels at once);
  /// see AveragerOptions.
  AveragerOptions average{};
};

/// About the rounds of a scope.
struct LocalSGDReport {
  /// Attempted optimizer steps, and averages, so far.
  int64_t steps = 0;
  int64_t rounds = 0;
  /// That train one model together: 1, but for hsdp.
  int ranks_per_copy = 1;
  /// Averages within the group. Not in what follows.
  int64_t inner_rounds = 0;
  /// The last round.
  AverageReport last{};
  /// Over all rounds: bytes sent by this rank, seconds in rounds, and the share
  /// of the scope's time that they are, 0 to 1.
  int64_t bytes = 0;
  double seconds = 0;
  double communication_share = 0;
};

class LocalSGD {
 public:
  /// Opens the scope for a prepared model, whose parameters are equal on all
  /// ranks now. Parameters that are frozen stay out, tied ones count once; floating
  /// running statistics are averaged too (a batch norm's variance as that of the
  /// joined rows), integers taken from rank 0. Collective, blocking. Memory: one
  /// fp32 copy of the parameters.
  /// Throws InputError: options out of range, a model that is not prepared, of which
  /// there is one copy, or whose window is open, no prepared optimizer has its parameters, a scope is open already,
  /// ranks that open different scopes (on every rank).
  template <detail::ModelHolder Model>
  LocalSGD(Accelerator& accelerator, const Model& model, LocalSGDOptions options = {})
      : LocalSGD(accelerator, *detail::module_of(model), std::move(options)) {}
  LocalSGD(Accelerator& accelerator, torch::nn::Module& model, LocalSGDOptions options);
  /// Without finish() logs an error and leaves every rank its own parameters; while
  /// an exception is on its way tells the peers that this rank fails, so that
  /// they end with an error that names it. Never takes part in a collective.
  ~LocalSGD();
  LocalSGD(const LocalSGD&) = delete;
  LocalSGD& operator=(const LocalSGD&) = delete;

  /// After the optimizer's step: counts it, and averages where H steps are
  /// complete. Does nothing inside a window. True where it averaged. Collective
  /// where it averages, else local.
  /// Throws InputError where an optimizer of the model was prepared inside the
  /// scope (each rank's moments would belong to another); CommunicationError where
  /// a peer fails.
  bool step();
  /// Averages now, unless nobody has stepped since the last time: before an
  /// evaluation or a save. Does not touch the rhythm. Between windows.
  /// Collective.
  void synchronize();
  /// Averages what is left, makes the optimizers' moments equal (their means, so
  /// that plain training may follow) and closes the scope. Collective. A second
  /// call does nothing.
  void finish();

  /// Closes the scope without an average and without a word, after an error that
  /// the peers have been told of. Local.
  void abort() noexcept;

  /// False: enabled=false, a world of one, or finished.
  bool active() const;
  /// Attempted optimizer steps so far; at the data's end the same on all ranks.
  int64_t steps() const;
  LocalSGDReport report() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
  int exceptions_at_entry_ = std::uncaught_exceptions();
};

} // namespace hasten
