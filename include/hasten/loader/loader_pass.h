// One pass over a range of batches on one rank: reads, distributes over ranks, prefetches, sends
// from rank 0. Users call nothing here; DataLoaderConfiguration (hasten/loader/loader_state.h)
// documents the behaviour.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "hasten/data/prefetch.h"
#include "hasten/loader/batch.h"
#include "hasten/loader/loader_state.h"
#include "hasten/loader/range_reader.h"

namespace hasten::detail {

struct DistributorOptions {
  int rank = 0;
  int world_size = 1;
  bool split = false;
  bool even = false;
  bool all_ranks = false; // also makes the others' parts, and knows the last global batch
};

// Makes global batches, a part for each rank, from the batches that it reads.
template <typename Value>
class BatchDistributor {
 public:
  using Item = LoaderItem<Value>;
  struct GlobalBatch {
    std::vector<Item> parts{}; // this rank's only, or [rank] with all_ranks
    bool last = false; // known only with all_ranks or even
  };

  BatchDistributor(std::function<std::optional<Item>()> read, const DistributorOptions& options)
      : read_(std::move(read)), options_(options) {}

  static PackedBatch packed(const Value& batch) {
    PackedBatch packed = pack_batch(batch);
    if (packed.tensors.empty() && !(packed.lists_rows && packed.rows == 0)) {
      throw_no_tensor_inside();
    }
    return packed;
  }

  std::optional<GlobalBatch> next() {
    std::vector<Item> taken = take_items();
    if (taken.empty()) {
      return std::nullopt;
    }
    ++global_batches_;
    GlobalBatch global_batch;
    if (options_.all_ranks || options_.even) {
      ahead_ = read_();
      global_batch.last = !ahead_;
    }
    if (options_.split || (global_batch.last && is_short(taken))) {
      cut(taken, global_batch);
      return global_batch;
    }
    add_parts(global_batch, taken, [&](int64_t rank) {
      return rank < std::ssize(taken) ? std::move(taken[static_cast<size_t>(rank)])
                                      : Item{.batch = form_};
    });
    return global_batch;
  }

 private:
  static bool has_rows(const std::optional<Value>& batch) {
    return batch && batch_rows(*batch) != 0;
  }
  // Once: the first batch with samples, for ranks that have none in its global batch.
  std::optional<Value> take_peer_batch(const std::vector<Item>& taken) {
    for (size_t i = 0; !peer_batch_taken_ && i < taken.size(); ++i) {
      if (has_rows(taken[i].batch)) {
        peer_batch_taken_ = true;
        return taken[i].batch;
      }
    }
    return std::nullopt;
  }
  // Adds what `make` returns for each rank, or for this one.
  template <typename Make>
  void add_parts(GlobalBatch& global_batch, const std::vector<Item>& taken, const Make& make) {
    const std::optional<Value> peer_batch = take_peer_batch(taken);
    for (int64_t rank = 0; rank < options_.world_size; ++rank) {
      if (options_.all_ranks || rank == options_.rank) {
        Item& part = global_batch.parts.emplace_back(make(rank));
        part.position = taken.back().position;
        part.checksum = taken.back().checksum;
        part.peer_batch = has_rows(part.batch) ? std::nullopt : peer_batch;
      }
    }
  }
  std::vector<Item> take_items() {
    std::vector<Item> taken;
    const int wanted = options_.split ? 1 : options_.world_size;
    const bool keep_all = options_.all_ranks || options_.even || options_.split;
    while (static_cast<int>(taken.size()) < wanted) {
      auto item = ahead_ ? std::exchange(ahead_, std::nullopt) : read_();
      if (!item) {
        break;
      }
      if (!form_ && options_.world_size > 1) {
        form_ = batch_without_rows(*item->batch);
      }
      if (!keep_all && peer_batch_taken_ && static_cast<int>(taken.size()) != options_.rank) {
        item->batch.reset(); // another rank's
      }
      taken.push_back(std::move(*item));
    }
    if (options_.even && first_.empty() && !taken.empty()) {
      for (const Item& item : taken) {
        first_.push_back(packed(*item.batch));
      }
    }
    return taken;
  }

  // True if the global batch has less for some rank than the first one had.
  bool is_short(const std::vector<Item>& taken) const {
    if (!options_.even) {
      return false;
    }
    int64_t rows = 0;
    for (const Item& item : taken) {
      rows += batch_rows(*item.batch).value_or(0);
    }
    return static_cast<int>(taken.size()) < options_.world_size ||
           rows < even_rows(first_, false, options_.world_size, false);
  }

  // Splits the batches into blocks, one for each rank; fills them up if the tail is to be even.
  void cut(const std::vector<Item>& taken, GlobalBatch& global_batch) {
    std::vector<PackedBatch> batches;
    for (const Item& item : taken) {
      batches.push_back(packed(*item.batch));
    }
    PackedBatch joined = batches.size() == 1 ? batches.front() : packed_concat(batches);
    const int64_t real = joined.rows;
    const int64_t world = options_.world_size;
    if (options_.even) {
      const int64_t full =
          even_rows(first_, options_.split, world, global_batch.last && global_batches_ == 1);
      if (global_batch.last) {
        joined = packed_filled(std::move(joined), first_, full);
      }
    }
    add_parts(global_batch, taken, [&](int64_t rank) {
      const int64_t each = joined.rows / world, more = joined.rows % world;
      const int64_t begin = rank * each + std::min(rank, more);
      const int64_t count = each + (rank < more ? 1 : 0);
      Item part;
      part.batch = unpack_batch(packed_rows(joined, begin, count), Value(*taken.front().batch));
      part.repeated = count - std::clamp<int64_t>(real - begin, 0, count);
      return part;
    });
  }

  std::function<std::optional<Item>()> read_;
  DistributorOptions options_;
  std::optional<Item> ahead_{};
  std::optional<Value> form_{}; // a batch without samples
  bool peer_batch_taken_ = false;
  int64_t global_batches_ = 0;
  std::vector<PackedBatch> first_{}; // the first global batch, if tails are filled
};

// What rank 0 sends for one global batch.
struct DispatchedBatch {
  std::vector<PackedBatch> parts{}; // [rank], then that of ranks without one; empty: the end
  std::vector<int64_t> repeated{}; // [rank]
  int64_t position = 0;
  bool last = false;
  std::shared_ptr<const nlohmann::json> failure{}; // failure_of() an exception in reading, or null
};
[[noreturn]] void throw_not_sendable();
void describe_failure(DispatchedBatch& sent, const std::exception_ptr& error);

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

template <typename Range>
class LoaderPass {
 public:
  using Value = RangeValue<Range>;
  using Item = LoaderItem<Value>;
  using GlobalBatch = typename BatchDistributor<Value>::GlobalBatch;

  LoaderPass(Range& range, std::shared_ptr<const LoaderLink> link, const PassOptions& options)
      : link_(std::move(link)),
        options_(options),
        distributor_([this] { return reader_->read(); }, options.distributor) {
    if (options.dispatch && options.distributor.rank != 0) {
      return; // the range is not touched
    }
    reader_.emplace(range, options.random, options.compare);
    for (int64_t i = 0; i < options.skip; ++i) {
      auto item = reader_->read();
      if (!item) {
        break;
      }
      if (i == options.own && !options.distributor.split && !options.dispatch) {
        left_out_ = std::move(item->batch);
      }
    }
    reader_->read_in_thread(options.prefetch > 0);
  }
  // This rank's first batch, if it was skipped.
  const std::optional<Value>& left_out() const { return left_out_; }
  LoaderPass(const LoaderPass&) = delete;
  LoaderPass& operator=(const LoaderPass&) = delete;

  // This rank's next batch, on the host. Collective if rank 0 dispatches.
  std::optional<Item> next() {
    if (options_.dispatch) {
      return dispatched();
    }
    std::optional<GlobalBatch> global_batch = read();
    return global_batch ? std::optional<Item>(std::move(global_batch->parts.front()))
                        : std::nullopt;
  }

 private:
  std::optional<GlobalBatch> read() {
    if (options_.prefetch > 0 && !ahead_) {
      ahead_.emplace([this] { return make(); }, options_.prefetch);
    }
    return ahead_ ? ahead_->next() : make();
  }

  std::optional<GlobalBatch> make() {
    std::optional<GlobalBatch> global_batch = distributor_.next();
    if (global_batch && options_.pin) {
      for (Item& part : global_batch->parts) {
        pin(part);
      }
    }
    return global_batch;
  }
  static void pin(Item& part) {
    if (part.batch) {
      change_tensors(*part.batch, pinned);
    }
  }

  std::optional<Item> dispatched() {
    if (std::exchange(ended_, true)) {
      return std::nullopt;
    }
    std::optional<Item> mine;
    DispatchedBatch sent;
    if (options_.distributor.rank == 0) {
      std::exception_ptr error;
      try {
        mine = pack_global_batch(sent);
      } catch (...) {
        error = std::current_exception();
        describe_failure(sent, error);
      }
      link_->dispatch(&sent);
      if (error) {
        std::rethrow_exception(error);
      }
    } else {
      sent = link_->dispatch(nullptr);
      if (!sent.parts.empty()) {
        mine.emplace();
        if constexpr (std::default_initializable<Value>) {
          mine->batch = unpack_batch(std::move(sent.parts.front()), Value());
          if (sent.parts.size() > 1) {
            mine->peer_batch = unpack_batch(std::move(sent.parts.back()), Value());
          }
        }
        if (options_.pin) {
          pin(*mine);
        }
        mine->repeated = sent.repeated.front();
        mine->position = sent.position;
      }
    }
    ended_ = sent.last;
    return mine;
  }

  std::optional<Item> pack_global_batch(DispatchedBatch& sent) {
    if constexpr (!std::default_initializable<Value>) {
      throw_not_sendable();
    }
    std::optional<GlobalBatch> global_batch = read();
    sent.last = !global_batch || global_batch->last;
    if (!global_batch) {
      return std::nullopt;
    }
    for (const Item& part : global_batch->parts) {
      if (!part.batch) {
        throw_no_tensor_inside();
      }
      sent.parts.push_back(BatchDistributor<Value>::packed(*part.batch));
      sent.repeated.push_back(part.repeated);
    }
    const auto has_peer_batch = [](const Item& part) { return part.peer_batch.has_value(); };
    if (const auto part = std::ranges::find_if(global_batch->parts, has_peer_batch);
        part != global_batch->parts.end()) {
      sent.parts.push_back(BatchDistributor<Value>::packed(*part->peer_batch));
      sent.repeated.push_back(0);
    }
    sent.position = global_batch->parts.front().position;
    return std::move(global_batch->parts.front());
  }

  std::shared_ptr<const LoaderLink> link_;
  PassOptions options_;
  std::optional<RangeReader<Range>> reader_{};
  BatchDistributor<Value> distributor_;
  std::optional<Value> left_out_{};
  bool ended_ = false; // nothing more is sent
  std::optional<Prefetcher<GlobalBatch>> ahead_{}; // last: its thread uses the others
};

} // namespace hasten::detail
