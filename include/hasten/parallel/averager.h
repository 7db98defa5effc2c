// Averages a list of tensors over the ranks of a communicator, now and then: the
// engine of Local SGD. It knows neither models nor optimizers, and a rank's tensors
// may be shards as well as whole parameters.
//
//   hasten::Averager averager(communicator, parameters);
//   averager.average();         // each tensor is the mean over ranks now
//   averager.average(samples);  // weighted by each rank's samples
//
// A round is a transaction: a snapshot is reduced, the ranks vote that all of them
// have the sum, then each commits it. Where a peer dies, every other rank throws
// and is left with the parameters it had before the round, or with the mean: with
// one or the other in all tensors, never with a mixture. They may stop there, or go
// on without it: Communicator::shrink(), then recover().
//
// Sums are made in fp32 (fp64 for fp64 tensors), whatever the tensors' dtype and
// whatever is on the wire, and are the same to the last bit on every rank.
// Tensors stay where they are: storages, views and optimizers remain valid.
// Threading: one thread. "Collective" = every rank, in the same order. The
// destructor never communicates.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hasten/comm/communicator.h"
#include "hasten/core/stateful.h"
#include "hasten/flat/flat_gradients.h"
#include "hasten/parallel/comm_hook.h"
#include "hasten/parallel/outer_step.h"

namespace hasten {

/// Who adds up.
enum class SyncStrategy {
  /// All ranks alike: each sums a part. 2 (n - 1) / n of the data is sent by each.
  all_reduce,
  /// The picture people learn first: rank 0 collects what all ranks have, makes
  /// the update and sends the parameters back. It sends and receives n - 1 times
  /// the data while the others wait, so a round takes about n / 2 times as long;
  /// memory on rank 0: n copies of a slice under way. The outer step is rank 0's
  /// alone.
  driver,
};

struct AveragerOptions {
  /// Reduces a copy, votes, and commits in one pass. Memory: one fp32 copy of the
  /// tensors, allocated once. False: large tensors are reduced where they lie,
  /// which saves copy and pass; a peer that dies in a round leaves half-made sums
  /// behind, and the spread is not measured.
  bool transactional = true;
  /// Tensors are sent in slices of about this size, so that copies and sums of
  /// one overlap with the sending of others. MiB, > 0.
  double slice_mb = 4;
  /// Measures how far the ranks are apart (AverageReport::spread). Costs one more
  /// number on the wire; the differences are taken in the pass that commits.
  bool measure_spread = true;
  /// Null: the mean as it is. Memory: the anchor, one copy.
  std::shared_ptr<OuterStep> outer{};
  /// What travels instead of the fp32 numbers: 16 or 8 bits, or low rank
  /// (hasten/parallel/comm_hook.h). It is given the changes since the last round,
  /// not the values. Memory: the anchor, one copy. Null: a plain all-reduce.
  std::shared_ptr<CommHook> comm_hook{};
  SyncStrategy sync = SyncStrategy::all_reduce;
  /// Of rounds in two parts (start, finish): what becomes of the way that this
  /// rank has gone between snapshot s and mean. Empty: it is kept whole,
  /// x <- x + (mean - s). Else x <- alpha x + (1 - alpha) mean: ranks come closer,
  /// and 1 - alpha of the way is lost. 0 ≤ alpha < 1. Source: Douillard et al.,
  /// "Streaming DiLoCo with overlapping communication", 2025, algorithm 2, which
  /// takes 0.5.
  std::optional<double> alpha{};
  /// Cuts the list into this many parts of about equal size that may be averaged
  /// one at a time (start's `fragment`), so that less travels at once. ≥ 1, at
  /// most the number of tensors counts.
  int64_t fragments = 1;
  /// Who owns the buffers' memory; at::zeros by default.
  FlatAllocator allocator{};
};

/// About a round.
struct AverageReport {
  /// Counted from 1; 0: none yet.
  int64_t round = 0;
  /// Sum of the ranks' weights.
  double weight = 0;
  /// Root of the ranks' mean |x_k - mean|^2, over all tensors: how far they were
  /// apart. NaN where it is not measured: measure_spread=false,
  /// transactional=false, a driver with an outer step, weights that are all 0.
  double spread = 0;
  /// Norm of the mean of all tensors, for comparing with. NaN as above, and for one
  /// rank alone without an anchor.
  double norm = 0;
  /// Sent by this rank, by the algorithm's count: 2 (n - 1) / n of the data for
  /// an all-reduce over n ranks.
  int64_t bytes = 0;
  /// That this rank spent in the round: all of it, or, where the sending ran
  /// beside the training (start, finish), the parts before and after. Seconds.
  double seconds = 0;
  /// Of these, the copies: snapshot and commit. Seconds.
  double copy_seconds = 0;
};

/// What Averager::recover() made of a round that a peer's death had broken.
enum class RoundOutcome {
  /// No rank that is left had a round under way that another has not committed.
  none,
  /// This rank has committed it now: another had.
  committed,
  /// It is dropped on every rank: each has its own parameters.
  dropped,
};

class Averager : public Stateful {
 public:
  using NamedTensorList = std::vector<std::pair<std::string, at::Tensor>>;

  /// The list is fixed from here on; a tensor listed twice (tied) is averaged
  /// once. Floating-point tensors that are dense in memory, on any device.
  /// Ranks compare names, shapes, dtypes and strides. Collective, blocking.
  /// Throws InputError, on every rank, naming the first tensor that differs; and
  /// for options out of range.
  Averager(std::shared_ptr<Communicator> communicator, const NamedTensorList& tensors,
           AveragerOptions options = {});
  ~Averager() override;
  Averager(const Averager&) = delete;
  Averager& operator=(const Averager&) = delete;

  /// One round: x <- sum_k w_k x_k / sum_k w_k over ranks k (then the outer step,
  /// if there is one). `weight` ≥ 0 of this rank; a rank with 0 takes part and
  /// gets the mean of the others. Where all are 0 nothing changes.
  /// Collective, blocking.
  /// Throws CommunicationError where a peer fails: tensors are then as before, and
  /// the group is dead. InputError, on this rank, for a weight below 0 or not
  /// finite and for a tensor whose shape or dtype was changed.
  const AverageReport& average(double weight = 1, double learning_rate = 0,
                               int64_t fragment = kAll);
  static constexpr int64_t kAll = -1;

  /// The same in two parts, between which this rank may go on: start() takes the
  /// snapshot s and sends, finish() waits, votes and corrects: x <- x + (mean - s),
  /// so that what was done in between is kept (see AveragerOptions::alpha). Memory:
  /// one more copy.
  /// Collective; start() does not wait for peers. Throws as average() does.
  void start(double weight = 1, double learning_rate = 0, int64_t fragment = kAll);
  const AverageReport& finish();
  /// Between start() and finish().
  bool started() const;
  /// finish() would not wait, but for the vote. Never throws; ranks may differ.
  bool ready() const;

  /// Behind Communicator::shrink(): goes on with the ranks that are left. They
  /// settle the round that broke: where one of them has committed it all do,
  /// since every rank had its sum by then, else it is dropped. Anchor and outer
  /// step are those of the last committed round (a driver's outer step begins
  /// anew where its round is dropped); what a hook kept is forgotten
  /// (CommHook::reset); the lost ranks' parameters are in no later round.
  /// Collective over those that are left, blocking. Throws CommunicationError
  /// where one more is lost: shrink() and call it again; InputError with
  /// transactional=false.
  RoundOutcome recover();

  /// About the last round. May wait for the number that tells the spread, which
  /// is on its way.
  const AverageReport& report();

  /// Elements and bytes of the tensors, tied ones once.
  int64_t numel() const;
  int64_t nbytes() const;
  int64_t fragments() const;
  /// A part of a tensor that is sent with others.
  struct Piece {
    int64_t tensor = 0; // index into the list without repetitions
    int64_t begin = 0; // element, in the order of memory
    int64_t count = 0;
    int64_t fragment = 0;
  };
  /// What is sent together, in order. Every element is in one piece.
  std::vector<std::vector<Piece>> slices() const;
  /// The anchor becomes what the tensors hold now: after they have been changed
  /// on all ranks alike. Does nothing without an anchor. Local.
  void reset_anchor();

  /// Rounds, anchor, snapshot of a round that is under way, the outer step's and
  /// the hook's state: this rank's. Between start() and finish() what was sent is
  /// sent again after loading. Local.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace hasten
