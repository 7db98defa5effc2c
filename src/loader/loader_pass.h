// One pass over a range of batches on one rank: reads, distributes over ranks, prefetches, sends
// from rank 0. DataLoaderConfiguration (hasten/loader/loader_state.h) documents the behaviour.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "hasten/core/device.h"
#include "hasten/data/prefetch.h"
#include "hasten/loader/any_range.h"
#include "hasten/loader/loader_state.h"

namespace hasten::detail {

struct DispatchedBatch;

struct PassOptions {
  int rank = 0;
  int world_size = 1; // 1 also if the range distributes itself
  bool split = false;
  bool even = false;
  bool dispatch = false;
  bool pin = false;
  int64_t prefetch = 0;
  int64_t skip = 0; // batches of the range to read and skip first
  int64_t own = 0; // index of this rank's first batch in the range, if not split
  bool compare = false; // keeps checksums
  at::Tensor random{}; // the range's generator; undefined: torch's own
};

/// While it lives, torch's default CPU generator draws from `state`, which advances. Afterwards the
/// generator is as before. No effect if `state` is undefined.
class RangeRandom {
 public:
  explicit RangeRandom(at::Tensor& state);
  ~RangeRandom();
  RangeRandom(const RangeRandom&) = delete;
  RangeRandom& operator=(const RangeRandom&) = delete;

 private:
  at::Tensor& state_;
  GeneratorScope scope_;
};

class LoaderPass {
 public:
  LoaderPass(AnyRange& range, const LoaderLink& link, const PassOptions& options);
  ~LoaderPass();
  LoaderPass(const LoaderPass&) = delete;
  LoaderPass& operator=(const LoaderPass&) = delete;

  /// This rank's first batch, if it was skipped.
  const AnyBatch& left_out() const { return left_out_; }
  /// This rank's next batch, on the host. Collective if rank 0 dispatches.
  std::optional<LoaderItem> next();

 private:
  /// A part for each rank, or this rank's only.
  struct GlobalBatch {
    std::vector<LoaderItem> parts{};
    bool last = false; // known only if rank 0 dispatches, and with `even`
  };

  LoaderItem read_range();
  std::optional<GlobalBatch> read();
  std::optional<GlobalBatch> make();
  std::optional<GlobalBatch> distribute();
  std::vector<LoaderItem> take_items();
  AnyBatch take_peer_batch(const std::vector<LoaderItem>& taken);
  void add_parts(GlobalBatch& global_batch, const std::vector<LoaderItem>& taken,
                 const std::function<LoaderItem(int64_t rank)>& make);
  bool is_short(const std::vector<LoaderItem>& taken) const;
  void cut(const std::vector<LoaderItem>& taken, GlobalBatch& global_batch);
  std::optional<LoaderItem> dispatched();
  std::optional<LoaderItem> pack_global_batch(DispatchedBatch& sent);

  AnyRange& range_;
  const LoaderLink& link_;
  PassOptions options_;
  at::Tensor random_; // the range's generator, in the thread that reads
  uint64_t sum_; // checksum of what was read; 0: not computed
  int64_t reads_ = 0;
  LoaderItem next_item_{}; // read ahead
  AnyBatch form_{}; // a batch without samples
  bool peer_batch_taken_ = false;
  int64_t global_batches_ = 0;
  std::vector<PackedBatch> first_{}; // the first global batch, if tails are filled
  AnyBatch left_out_{};
  bool ended_ = false; // nothing more is sent
  std::optional<Prefetcher<GlobalBatch>> ahead_{}; // last: its thread uses the others
};

} // namespace hasten::detail
