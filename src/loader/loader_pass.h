// One pass over a range of batches on one rank: reads, distributes over ranks, prefetches, sends
// from rank 0. DataLoaderConfiguration (hasten/loader/loader_state.h) documents the behaviour.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "hasten/data/prefetch.h"
#include "hasten/loader/any_range.h"
#include "hasten/loader/loader_state.h"

namespace hasten::detail {

struct DistributorOptions {
  int rank = 0;
  int world_size = 1;
  bool split = false;
  bool even = false;
  bool all_ranks = false; // also makes the others' parts, and knows the last global batch
};

/// Makes global batches, a part for each rank, from the batches that it reads.
class BatchDistributor {
 public:
  struct GlobalBatch {
    std::vector<LoaderItem> parts{}; // this rank's only, or [rank] with all_ranks
    bool last = false; // known only with all_ranks or even
  };

  BatchDistributor(std::function<LoaderItem()> read, const DistributorOptions& options)
      : read_(std::move(read)), options_(options) {}

  std::optional<GlobalBatch> next();

 private:
  AnyBatch take_peer_batch(const std::vector<LoaderItem>& taken);
  void add_parts(GlobalBatch& global_batch, const std::vector<LoaderItem>& taken,
                 const std::function<LoaderItem(int64_t rank)>& make);
  std::vector<LoaderItem> take_items();
  bool is_short(const std::vector<LoaderItem>& taken) const;
  void cut(const std::vector<LoaderItem>& taken, GlobalBatch& global_batch);

  std::function<LoaderItem()> read_; // without a batch: the end
  DistributorOptions options_;
  LoaderItem ahead_{};
  AnyBatch form_{}; // a batch without samples
  bool formed_ = false;
  bool peer_batch_taken_ = false;
  int64_t global_batches_ = 0;
  std::vector<PackedBatch> first_{}; // the first global batch, if tails are filled
};

struct PassOptions {
  DistributorOptions distributor{};
  bool dispatch = false;
  bool pin = false;
  int64_t prefetch = 0;
  int64_t skip = 0; // batches of the range to read and skip first
  int64_t own = 0; // index of this rank's first batch in the range, if not split
  bool compare = false; // keeps checksums
  at::Tensor random{}; // the range's generator; undefined: torch's own
};

struct DispatchedBatch;

class LoaderPass {
 public:
  LoaderPass(AnyRange& range, const LoaderLink& link, const PassOptions& options);
  LoaderPass(const LoaderPass&) = delete;
  LoaderPass& operator=(const LoaderPass&) = delete;

  /// This rank's first batch, if it was skipped.
  const AnyBatch& left_out() const { return left_out_; }
  /// This rank's next batch, on the host. Collective if rank 0 dispatches.
  std::optional<LoaderItem> next();

 private:
  using GlobalBatch = BatchDistributor::GlobalBatch;
  LoaderItem read_range();
  std::optional<GlobalBatch> read();
  std::optional<GlobalBatch> make();
  std::optional<LoaderItem> dispatched();
  std::optional<LoaderItem> pack_global_batch(DispatchedBatch& sent);

  AnyRange& range_;
  const LoaderLink& link_;
  PassOptions options_;
  std::unique_ptr<RangeReader> reader_; // null: the range is not touched
  at::Tensor random_; // the range's generator, in the thread that reads
  uint64_t sum_; // checksum of what was read; 0: not computed
  int64_t reads_ = 0;
  BatchDistributor distributor_;
  AnyBatch left_out_{};
  bool ended_ = false; // nothing more is sent
  std::optional<Prefetcher<GlobalBatch>> ahead_{}; // last: its thread uses the others
};

} // namespace hasten::detail
