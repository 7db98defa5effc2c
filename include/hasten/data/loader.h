// Which rows each rank sees, in which order: a pure function of (seed, epoch),
// the same on all ranks, dealt out over them.
#pragma once

#include <atomic>
#include <cstdint>
#include <iterator>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "hasten/core/stateful.h"
#include "hasten/data/dataset.h"
#include "hasten/data/ordered_workers.h"

namespace hasten {

struct LoaderOptions {
  /// Rows of one batch on one rank, ≥ 1; with split_batches, on all together.
  int64_t batch_size = 8;
  /// A batch is cut over the ranks, so that it holds the same rows on any number
  /// of them.
  bool split_batches = false;
  /// On more than one rank: a last, smaller batch is filled up with the epoch's
  /// first rows, so that all batches of all ranks are equally large. With
  /// split_batches batch_size must then be a multiple of the ranks.
  bool even_batches = false;
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
  /// With drop_last: rows of a batch that is not smaller. 0: batch_size times
  /// ranks. A resumed run at another world size takes the first start's.
  int64_t drop_batch = 0;
  /// Seed of the order stream.
  uint64_t seed = 42;
  /// Background threads that make batches; 0 makes each when it is asked for.
  /// Batches and their order are the same for any number. The data set's collate()
  /// runs in several threads at once then. Costs a thread each.
  int64_t num_workers = 0;
  /// Batches that each worker makes ahead, >= 1. Memory: num_workers times as many
  /// batches.
  int64_t prefetch_factor = 2;
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
/// With split_batches G = batch_size. With even_batches the first rows of the
/// epoch follow behind the last ones until G rows are full; those are then the
/// last ones of each rank's batch.
///
/// With group_by_length the longest row is in the first batch, so that what
/// does not fit in memory fails at once, and a global batch is dealt out in
/// order of length, to and fro, so that ranks have similar work.
/// `first_row` leaves out that many rows from the front of the epoch's order:
/// global batches are cut from what remains.
/// Local. Cost: n log n of the rows.
/// Throws InputError: batch_size < 1, or rank outside the world.
std::vector<std::vector<int64_t>> rank_batches(const Dataset& dataset, const LoaderOptions& options,
                                               uint64_t epoch, int rank, int world_size,
                                               int64_t first_row = 0);

/// A range of batches: `for (const Batch& batch : loader)` is one epoch.
/// The rows a rank's turn brings may be none (see rank_batches): such a batch is
/// handed out too, so that all ranks take the same number of turns.
/// Threading: one thread beside the workers. Memory: one batch, those made ahead,
/// and the epoch's row numbers.
/// Its state is (seed, epoch, cursor) and what else the order depends on, the same
/// on every rank and for every world size.
class DataLoader : public Stateful {
 public:
  /// Throws InputError: no dataset, or batch_size < 1.
  DataLoader(std::shared_ptr<const Dataset> dataset, LoaderOptions options);

  /// Epoch whose order the next begin() uses; begin() does not advance it.
  /// Another epoch than before forgets the cursor.
  void set_epoch(uint64_t epoch);
  uint64_t epoch() const { return epoch_; }
  /// Rows of the epoch, over all ranks, that the next begin() leaves out, once.
  /// O(1): no batch is made. Between 0 and the epoch's rows, else InputError.
  void set_cursor(int64_t rows);
  /// Rows of the epoch, over all ranks, up to the end of the batch that the
  /// newest iterator stands on; what set_cursor said until there is one.
  int64_t cursor() const { return *cursor_; }
  /// Rows of one epoch over all ranks: without those that drop_last leaves out.
  int64_t epoch_rows() const;
  /// The next begin() leaves out this rank's next `batches` ≥ 0, once. O(1).
  void skip_first_batches(int64_t batches);
  /// LoaderOptions of these names. Accelerator::prepare turns on what its own
  /// configuration asks for beside those given here.
  bool even_batches() const { return options_.even_batches; }
  bool split_batches() const { return options_.split_batches; }
  void set_even_batches(bool even) { options_.even_batches = even || given_even_; }
  void set_split_batches(bool split) { options_.split_batches = split || given_split_; }
  /// Deals rows over ranks; Accelerator::prepare calls it.
  void shard(int rank, int world_size);
  /// Batches of this rank in one epoch.
  int64_t size() const;
  const Dataset& dataset() const { return *dataset_; }
  const LoaderOptions& options() const { return options_; }

  /// values: epoch, cursor, rows, seed, shuffle, group_by_length, order_batch,
  /// drop_batch. No tensors.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// The next begin() goes on behind the cursor. Takes over order_batch and
  /// drop_batch. Throws InputError where the state is in mid-epoch and another
  /// data set, seed or order is here, naming what differs.
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

  class iterator {
   public:
    using value_type = Batch;
    using difference_type = int64_t;
    using iterator_category = std::input_iterator_tag;
    iterator() = default;
    const Batch& operator*() const { return batch_; }
    const Batch* operator->() const { return &batch_; }
    iterator& operator++();
    /// Rows of the epoch, over all ranks, up to the end of this batch.
    int64_t cursor() const;
    /// Rows at the end of this batch that even_batches repeats.
    int64_t repeated_rows() const;
    bool operator==(const iterator& other) const { return position_ == other.position_; }

   private:
    friend class DataLoader;
    void load();
    const DataLoader* loader_ = nullptr;
    std::shared_ptr<const std::vector<std::vector<int64_t>>> batches_{};
    int64_t position_ = -1; // -1 is the end
    int64_t first_row_ = 0; // of the epoch's order
    Batch batch_{};
    std::shared_ptr<OrderedWorkers<Batch>> workers_{};
  };
  iterator begin() const;
  iterator end() const { return {}; }

 private:
  std::shared_ptr<const Dataset> dataset_;
  LoaderOptions options_;
  bool given_even_ = false; // at construction
  bool given_split_ = false;
  int64_t global_batch() const;

  uint64_t epoch_ = 0;
  // Shared with the iterators, which move it, also from a prefetching thread;
  // begin() consumes `start_`.
  std::shared_ptr<std::atomic<int64_t>> cursor_ = std::make_shared<std::atomic<int64_t>>(0);
  std::shared_ptr<int64_t> start_ = std::make_shared<int64_t>(0);
  int rank_ = 0;
  int world_size_ = 1;
};

} // namespace hasten
