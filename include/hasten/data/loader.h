// Which rows each rank sees, in which order: a pure function of (seed, epoch),
// the same on all ranks, dealt out over them.
#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <vector>

#include "hasten/data/dataset.h"

namespace hasten {

struct LoaderOptions {
  /// Rows of one batch on one rank, ≥ 1.
  int64_t batch_size = 8;
  /// New order each epoch; false keeps the dataset's order.
  bool shuffle = true;
  /// Batches of rows of similar length (less padding): the shuffled order is
  /// cut into large groups, sorted by length inside each, and the batches are
  /// shuffled again. Without shuffle all rows are sorted, the longest first;
  /// Batch::indices says which row is which. Costs one length() call a row.
  bool group_by_length = true;
  /// Rows that stay together when grouping: those of one optimizer step over all
  /// ranks, a multiple of batch_size times ranks, so that a step holds the same
  /// rows however they are cut. 0: batch_size times ranks.
  int64_t group_batch = 0;
  /// Leaves out the last, smaller batch of an epoch.
  bool drop_last = false;
  /// Seed of the order stream.
  uint64_t seed = 42;
};

/// Batches of row numbers for one epoch: [batch][row].
///
/// A pure function of its arguments. With G = batch_size · world_size, batch i of
/// all ranks together is one global batch of G rows that depends on G but not on
/// world_size. Every row occurs exactly once over all ranks; drop_last leaves out
/// size % G rows, drawn anew each epoch under shuffle. All ranks get the same
/// number of batches; a last one of fewer than G rows is dealt out evenly, so a
/// rank's share may be empty.
///
/// With group_by_length the longest row is in the first batch, so that what
/// does not fit in memory fails at once, and a global batch is dealt out in
/// order of length, to and fro, so that ranks have similar work.
/// Local. Cost: n log n, about 0.1 s for a million rows.
/// Throws InputError: batch_size < 1, or rank outside the world.
std::vector<std::vector<int64_t>> rank_batches(
    const Dataset& dataset,
    const LoaderOptions& options,
    uint64_t epoch,
    int rank,
    int world_size);

/// A range of batches: `for (const Batch& batch : loader)` is one epoch.
/// The rows a rank's turn brings may be none (see rank_batches): such a batch is
/// handed out too, so that all ranks take the same number of turns.
/// Threading: one thread. Memory: one batch and the epoch's row numbers.
class DataLoader {
 public:
  /// Throws InputError: no dataset, or batch_size < 1.
  DataLoader(std::shared_ptr<const Dataset> dataset, LoaderOptions options);

  /// Epoch whose order the next begin() uses; begin() does not advance it.
  void set_epoch(uint64_t epoch);
  uint64_t epoch() const { return epoch_; }
  /// Deals rows over ranks; Accelerator::prepare calls it.
  void shard(int rank, int world_size);
  /// Batches of this rank in one epoch.
  int64_t size() const;
  const Dataset& dataset() const { return *dataset_; }
  const LoaderOptions& options() const { return options_; }

  class iterator {
   public:
    using value_type = Batch;
    using difference_type = int64_t;
    using iterator_category = std::input_iterator_tag;
    iterator() = default;
    const Batch& operator*() const { return batch_; }
    const Batch* operator->() const { return &batch_; }
    iterator& operator++();
    bool operator==(const iterator& other) const {
      return position_ == other.position_;
    }

   private:
    friend class DataLoader;
    void load();
    const DataLoader* loader_ = nullptr;
    std::shared_ptr<const std::vector<std::vector<int64_t>>> batches_{};
    int64_t position_ = -1; // -1 is the end
    Batch batch_{};
  };
  iterator begin() const;
  iterator end() const { return {}; }

 private:
  std::shared_ptr<const Dataset> dataset_;
  LoaderOptions options_;
  uint64_t epoch_ = 0;
  int rank_ = 0;
  int world_size_ = 1;
};

} // namespace hasten
