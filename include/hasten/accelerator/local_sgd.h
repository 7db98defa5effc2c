// Local SGD: every rank steps by itself, and every H optimizer steps the ranks
// average their parameters. Two lines more than a loop with an Accelerator has:
//
//   hasten::LocalSgd local_sgd(accelerator, model, {.steps = 8});
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
// Threading: the accelerator's thread. "Collective" = every rank calls it, in the
// same order. The destructor never communicates. Guide: docs/guides/local-sgd.md
#pragma once

#include <cstdint>
#include <memory>

#include "hasten/accelerator/accelerator.h"
#include "hasten/parallel/averager.h"

namespace hasten {

struct LocalSgdOptions {
  /// H: attempted optimizer steps between two averages, ≥ 1.
  int64_t steps = 8;
  /// False: the scope does nothing, and training is what it is without it.
  bool enabled = true;
  /// How rounds are made; see AveragerOptions.
  AveragerOptions average{};
};

/// About the rounds of a scope.
struct LocalSgdReport {
  /// Attempted optimizer steps, and averages, so far.
  int64_t steps = 0;
  int64_t rounds = 0;
  /// The last round.
  AverageReport last{};
  /// Over all rounds: bytes sent by this rank, seconds in rounds, and the share
  /// of the scope's time that they are, 0 to 1.
  int64_t bytes = 0;
  double seconds = 0;
  double communication_share = 0;
};

class LocalSgd {
 public:
  /// Opens the scope for a prepared model, whose parameters are equal on all
  /// ranks now. Parameters that are frozen stay out, tied ones count once; floating
  /// running statistics are averaged too (a batch norm's variance as that of the
  /// joined rows), integers taken from rank 0. Collective, blocking. Memory: one
  /// fp32 copy of the parameters.
  /// Throws InputError: steps < 1, a model that is not prepared or whose window is
  /// open, no prepared optimizer has its parameters, a scope is open already,
  /// ranks that open different scopes (on every rank).
  template <detail::ModelHolder Model>
  LocalSgd(
      Accelerator& accelerator,
      const Model& model,
      LocalSgdOptions options = {})
      : LocalSgd(accelerator, *detail::module_of(model), std::move(options)) {}
  LocalSgd(
      Accelerator& accelerator,
      torch::nn::Module& model,
      LocalSgdOptions options);
  /// Without finish() logs an error and leaves every rank its own parameters; while
  /// an exception is on its way tells the peers that this rank fails, so that
  /// they end with an error that names it. Never takes part in a collective.
  ~LocalSgd();
  LocalSgd(const LocalSgd&) = delete;
  LocalSgd& operator=(const LocalSgd&) = delete;

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

  /// False: enabled=false, or a world of one.
  bool active() const;
  LocalSgdReport report() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace hasten
