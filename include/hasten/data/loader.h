// Decides which samples each rank gets, and in which order. The order is a pure function of (seed,
// epoch) and equal on all ranks.
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
  /// Samples in one batch on one rank, ≥ 1. With split_batches: samples in one batch of all ranks
  /// together.
  int64_t batch_size = 8;
  /// Divides each batch among the ranks. A global batch then has the same samples for any number of
  /// ranks.
  bool split_batches = false;
  /// On more than one rank: fills a smaller last batch with the epoch's first samples, so that all
  /// batches of all ranks have the same size. With split_batches, batch_size must then be a
  /// multiple of the number of ranks.
  bool even_batches = false;
  /// Draws a new order each epoch. If false, the order is the dataset's.
  bool shuffle = true;
  /// Puts samples of similar length into a batch, which saves padding. The shuffled order is cut
  /// into large groups, each group is sorted by length, and the batches are shuffled again. Without
  /// shuffle all samples are sorted, the longest first. Batch::indices has the samples' indices.
  /// Costs one call of Dataset::length() per sample.
  bool group_by_length = true;
  /// Samples that stay together in grouping by length: those of one optimizer step on all ranks, a
  /// multiple of batch_size · world size. An optimizer step then has the same samples for any split
  /// into batches. 0: batch_size · world size.
  int64_t group_batch = 0;
  /// Leaves out the last, smaller batch of an epoch.
  bool drop_last = false;
  /// With drop_last: samples in a full batch. 0: batch_size · world size. A run that resumes at
  /// another world size takes the value of its first start.
  int64_t drop_batch = 0;
  /// Seed of the order stream.
  uint64_t seed = 42;
  /// Background threads that make batches. 0 makes each batch when the loop needs it. Batches and
  /// their order do not depend on this number. With more than one thread, the dataset's collate()
  /// runs in several threads at the same time.
  int64_t num_workers = 0;
  /// Batches that each worker makes in advance, ≥ 1. Memory: num_workers · prefetch_factor batches.
  int64_t prefetch_factor = 2;
};

/// The sample indices of one rank for one epoch: [batch][sample].
///
/// A pure function of its arguments. With G = batch_size · world_size (with split_batches G =
/// batch_size), batch i of all ranks together is one global batch of G samples. It depends on G but
/// not on world_size. Every sample occurs exactly once over all ranks. drop_last leaves out size %
/// G samples; with shuffle each epoch draws others. All ranks get the same number of batches. A
/// last global batch with fewer than G samples is divided evenly, so a rank's batch may be empty.
/// even_batches instead appends the epoch's first samples until the global batch has G samples.
/// These are then the last samples in each rank's batch.
///
/// With group_by_length the longest sample is in the first batch, so that too little memory
/// shows in the first step. A global batch is assigned to ranks in order of length, in
/// alternating direction, so that ranks have similar work.
/// `first_row` skips that many samples at the front of the epoch's order. Global batches are cut
/// from the rest.
/// Local. Cost: O(n log n) in the number of samples.
/// Throws InputError if batch_size < 1 or another option is out of range, if rank is outside the
/// world, or with split_batches and even_batches if batch_size is not a multiple of world_size.
std::vector<std::vector<int64_t>> rank_batches(const Dataset& dataset, const LoaderOptions& options,
                                               uint64_t epoch, int rank, int world_size,
                                               int64_t first_row = 0);

/// A range of batches: `for (const Batch& batch : loader)` is one epoch. A batch of this rank may
/// be empty (see rank_batches). The loop gets it too, so that all ranks run the same number of
/// iterations.
/// Threading: use it from one thread. Memory: one batch, the prefetched batches and the epoch's
/// sample indices.
/// Its state is (seed, epoch, cursor) and the options that determine the order. It is the same on
/// every rank and for every world size.
class DataLoader : public Stateful {
 public:
  /// Throws InputError if `dataset` is null or an option is out of range.
  DataLoader(std::shared_ptr<const Dataset> dataset, LoaderOptions options);

  /// Sets the epoch whose order the next begin() uses. begin() does not advance it. A change of the
  /// epoch resets the cursor to 0.
  void set_epoch(uint64_t epoch);
  uint64_t epoch() const { return epoch_; }
  /// The next begin(), and only that one, skips `rows` samples of the epoch, counted over all
  /// ranks. O(1): no batch is made. Throws InputError if `rows` is not in [0, epoch_rows()].
  void set_cursor(int64_t rows);
  /// How many samples of the epoch the newest iterator has passed, over all ranks, its current
  /// batch included. Before begin(): the value of set_cursor().
  int64_t cursor() const { return *cursor_; }
  /// Samples of one epoch over all ranks, without those that drop_last leaves out.
  int64_t epoch_rows() const;
  /// The next begin(), and only that one, skips this rank's next `batches` ≥ 0 batches. O(1).
  void skip_first_batches(int64_t batches);
  /// The LoaderOptions of these names. Accelerator::prepare can turn them on. It cannot turn off an
  /// option that the constructor got.
  bool even_batches() const { return options_.even_batches; }
  bool split_batches() const { return options_.split_batches; }
  void set_even_batches(bool even) { options_.even_batches = even || given_even_; }
  void set_split_batches(bool split) { options_.split_batches = split || given_split_; }
  /// Sets the rank for which the loader makes batches. Accelerator::prepare calls it. Throws
  /// InputError as rank_batches does.
  void shard(int rank, int world_size);
  /// Batches of this rank in one epoch; equal on all ranks.
  int64_t size() const;
  const Dataset& dataset() const { return *dataset_; }
  const LoaderOptions& options() const { return options_; }

  /// values: epoch, cursor, rows, seed, shuffle, group_by_length, drop_last, order_batch,
  /// drop_batch. No tensors.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// The next begin() continues at the saved cursor, with the saved order_batch and drop_batch.
  /// Throws InputError if the state is from the middle of an epoch and the dataset's size, seed or
  /// order differs. The message names the difference.
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

  class iterator {
   public:
    using value_type = Batch;
    using difference_type = int64_t;
    using iterator_category = std::input_iterator_tag;
    /// The end.
    iterator() = default;
    /// What loader.begin() returns.
    explicit iterator(const DataLoader& loader);
    const Batch& operator*() const { return batch_; }
    const Batch* operator->() const { return &batch_; }
    iterator& operator++();
    /// Samples of the epoch, over all ranks, up to the end of this batch.
    int64_t cursor() const;
    /// Samples at the end of this batch that even_batches repeats.
    int64_t repeated_rows() const;
    bool operator==(const iterator& other) const { return position_ == other.position_; }

   private:
    void load();
    const DataLoader* loader_ = nullptr;
    std::shared_ptr<const std::vector<std::vector<int64_t>>> batches_{};
    int64_t position_ = -1; // -1 is the end
    int64_t first_row_ = 0; // index in the epoch's order
    Batch batch_{};
    std::shared_ptr<OrderedWorkers<Batch>> workers_{};
  };
  iterator begin() const { return iterator(*this); }
  iterator end() const { return {}; }

 private:
  std::shared_ptr<const Dataset> dataset_;
  LoaderOptions options_;
  bool given_even_ = false; // the constructor's value
  bool given_split_ = false;
  int64_t global_batch() const;

  uint64_t epoch_ = 0;
  // The iterators share and advance these, also in a prefetching thread. begin() takes the value of
  // `start_` and resets it to 0.
  std::shared_ptr<std::atomic<int64_t>> cursor_ = std::make_shared<std::atomic<int64_t>>(0);
  std::shared_ptr<int64_t> start_ = std::make_shared<int64_t>(0);
  int rank_ = 0;
  int world_size_ = 1;
};

} // namespace hasten
