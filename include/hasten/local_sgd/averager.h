// The engine of Local SGD: averages a list of tensors over the ranks of a communicator. It uses
// neither modules nor optimizers. The tensors may be whole parameters or shards.
//
//   hasten::Averager averager(communicator, parameters);
//   averager.average();         // each tensor is the mean over ranks now
//   averager.average(samples);  // weighted by each rank's samples
//
// A synchronisation is a transaction: the ranks reduce a snapshot, vote that every rank has the
// sum, and then commit it. If a peer dies, every other rank throws. Its tensors are then either all
// as before the synchronisation or all the mean, never a mixture. The other ranks may stop there,
// or continue without the peer: Communicator::shrink(), then recover().
//
// Sums are computed in fp32 (fp64 for fp64 tensors) for every dtype of the tensors and of the
// messages. They are equal bit for bit on every rank. Tensors keep their storage, so views and
// optimizers remain valid.
// Threading: one thread. "Collective" = every rank, in the same order. The destructor never
// communicates.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hasten/comm/communicator.h"
#include "hasten/core/stateful.h"
#include "hasten/flat/flat_gradients.h"
#include "hasten/local_sgd/outer_step.h"
#include "hasten/parallel/comm_hook.h"

namespace hasten {

/// How the ranks compute the sum.
enum class SyncStrategy {
  /// An all-reduce: each rank sums a part and sends 2 (n - 1) / n of the data.
  all_reduce,
  /// A parameter server: rank 0 receives every rank's tensors, computes the update and sends the
  /// parameters back. It sends and receives n - 1 times the data while the others wait, so a
  /// synchronisation takes about n / 2 times as long. Memory on rank 0: n copies of the slices that
  /// are in flight. Only rank 0 runs the outer step.
  driver,
};

struct AveragerOptions {
  /// Reduces a copy, votes, and commits in one pass. Memory: one fp32 copy of the tensors,
  /// allocated once. If false, large tensors are reduced in place, which saves the copy and the
  /// pass. Then the tensors hold partial sums after a peer dies, and the spread is not measured.
  bool transactional = true;
  /// Tensors are sent in slices of about this size, so that copying and summing one slice overlaps
  /// with sending others. MiB, > 0.
  double slice_mb = 4;
  /// Measures how far the ranks are apart (AverageReport::spread). Sends one more element. The pass
  /// that commits computes the differences.
  bool measure_spread = true;
  /// Null: parameters become the mean. Memory otherwise: the anchor, one copy.
  std::shared_ptr<OuterStep> outer{};
  /// Compresses what is sent: 16 bits, or a hook of your own (hasten/parallel/comm_hook.h). The hook
  /// gets the changes since the last synchronisation, not the values. Memory: the anchor, one copy.
  /// Null: a plain all-reduce.
  std::shared_ptr<CommHook> comm_hook{};
  SyncStrategy sync = SyncStrategy::all_reduce;
  /// For start() and finish(): how to treat the change that this rank made between snapshot s and
  /// mean. Empty: it is kept, x <- x + (mean - s). Otherwise x <- alpha x + (1 - alpha) mean, which
  /// brings the ranks closer and drops 1 - alpha of the change. 0 ≤ alpha < 1. Source: Douillard et
  /// al., "Streaming DiLoCo with overlapping communication", 2025, algorithm 2, which uses 0.5.
  std::optional<double> alpha{};
  /// Cuts the list into this many fragments of about equal size, which can be averaged one at a
  /// time (start's `fragment`) to send less per synchronisation. ≥ 1. More than the number of
  /// tensors has no further effect.
  int64_t fragments = 1;
  /// Allocates the buffers; Communicator::allocate_tensor() by default.
  FlatAllocator allocator{};
};

/// Report of a synchronisation.
struct AverageReport {
  /// Its number, from 1; 0: none yet.
  int64_t round = 0;
  /// Sum of the ranks' weights.
  double weight = 0;
  /// How far the ranks were apart: the root of the ranks' mean |x_k - mean|^2, over all tensors.
  /// NaN if it is not measured: measure_spread=false, transactional=false, a driver with an outer
  /// step, or weights that are all 0.
  double spread = 0;
  /// Norm of the mean of all tensors, to compare the spread with. NaN in the same cases, and with
  /// one rank and no anchor.
  double norm = 0;
  /// Bytes that this rank sent according to the algorithm: 2 (n - 1) / n of the data for an
  /// all-reduce over n ranks.
  int64_t bytes = 0;
  /// Time of this rank in the synchronisation. With start() and finish(): the time inside these two
  /// calls. Seconds.
  double seconds = 0;
  /// The part of `seconds` spent in copies: snapshot and commit. Seconds.
  double copy_seconds = 0;
};

/// What Averager::recover() did with a synchronisation that a peer's death interrupted.
enum class RoundOutcome {
  /// No remaining rank had an open synchronisation that another has not committed.
  none,
  /// This rank has committed it now, because another rank had.
  committed,
  /// Every rank has dropped it and keeps its own parameters.
  dropped,
};

class Averager : public Stateful {
 public:
  using NamedTensorList = std::vector<std::pair<std::string, at::Tensor>>;

  /// The list cannot change afterwards. A tensor that is listed twice (tied) is averaged once.
  /// Tensors are floating-point and dense in memory, on any device. Ranks compare names, shapes,
  /// dtypes and strides. Collective, blocking.
  /// Throws InputError on every rank, naming the first tensor that differs, and for options out of
  /// range.
  Averager(std::shared_ptr<Communicator> communicator, const NamedTensorList& tensors,
           AveragerOptions options = {});
  ~Averager() override;
  Averager(const Averager&) = delete;
  Averager& operator=(const Averager&) = delete;

  /// One synchronisation: x <- sum_k w_k x_k / sum_k w_k over ranks k, then the outer step, if
  /// there is one. `weight` ≥ 0 is this rank's. A rank with weight 0 takes part and gets the mean
  /// of the others. If all weights are 0, nothing changes. Collective, blocking.
  /// Throws CommunicationError if a peer fails; tensors are then as before and the group is
  /// unusable. Throws InputError, on this rank, for a weight that is negative or not finite and for
  /// a tensor whose shape or dtype has changed.
  const AverageReport& average(double weight = 1, double learning_rate = 0,
                               int64_t fragment = kAll);
  static constexpr int64_t kAll = -1;

  /// The same in two calls; this rank may train in between. start() takes the snapshot s and starts
  /// sending. finish() waits, votes and corrects: x <- x + (mean - s), which keeps the changes made
  /// in between (see AveragerOptions::alpha). Memory: one more copy. Collective; start() does not
  /// wait for peers. Both throw as average() does.
  void start(double weight = 1, double learning_rate = 0, int64_t fragment = kAll);
  const AverageReport& finish();
  /// True between start() and finish().
  bool started() const;
  /// True if finish() would wait for nothing but the vote. Never throws; ranks may differ.
  bool ready() const;

  /// Call after Communicator::shrink() to continue with the remaining ranks. They settle the
  /// interrupted synchronisation: if one of them has committed it, all commit it, because then
  /// every rank has the sum; otherwise all drop it. Anchor and outer step are those of the last
  /// committed synchronisation (a driver's outer step starts anew if its synchronisation is
  /// dropped). Hooks forget their state (CommHook::reset). Later synchronisations do not include
  /// the lost ranks' parameters. Collective over the remaining ranks, blocking. Throws
  /// CommunicationError if another rank is lost: call shrink() and recover() again. Throws
  /// InputError with transactional=false. `remaining`: a group of the remaining ranks that takes the
  /// place of this averager's, if another group than the averager's has shrunk.
  RoundOutcome recover(std::shared_ptr<Communicator> remaining = nullptr);

  /// Report of the last synchronisation. May wait until the spread has been reduced.
  const AverageReport& report();

  /// Elements and bytes of the tensors, tied ones once.
  int64_t numel() const;
  int64_t nbytes() const;
  int64_t fragments() const;
  /// A contiguous part of a tensor.
  struct Piece {
    int64_t tensor = 0; // index into the list without repetitions
    int64_t begin = 0; // element, in the order of memory
    int64_t count = 0;
    int64_t fragment = 0;
  };
  /// The pieces that each message carries, in order. Every element is in exactly one piece.
  std::vector<std::vector<Piece>> slices() const;
  /// Sets the anchor to the tensors' values, after they were changed in the same way on all ranks.
  /// Does nothing without an anchor. Local.
  void reset_anchor();

  /// This rank's count of synchronisations, anchor, snapshot of an open synchronisation, and the
  /// state of outer step and hook. A state saved between start() and finish() sends its data again
  /// after loading. Local.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace hasten
