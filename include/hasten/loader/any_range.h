// A range of batches of any type, as loaders read it. Users call nothing here. Threading: one thread
// at a time.
#pragma once

#include <concepts>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "hasten/core/stateful.h"
#include "hasten/loader/any_batch.h"

namespace hasten::detail {

template <typename Range>
using RangeValue = std::decay_t<decltype(*std::begin(std::declval<Range&>()))>;

class AnyRange {
 public:
  virtual ~AnyRange() = default;

  // It has shard(rank, world_size): it distributes its batches over ranks itself.
  virtual bool shards() const = 0;
  // It can begin anywhere, and all ranks get equally many batches: hasten's DataLoader.
  virtual bool seeks() const = 0;
  // Number of this rank's batches in an epoch; -1: unknown.
  virtual int64_t size() const = 0;
  // There may be ranks without a sample in an epoch.
  virtual bool few_rows(int64_t world_size) const = 0;
  virtual void shard(int rank, int world_size) = 0;
  virtual void set_epoch(uint64_t epoch) = 0;
  virtual void seek(int64_t cursor, int64_t skip) = 0;
  // Turns the range's own options on; then returns both as they are. False: it has none.
  virtual bool distributes(bool& even_batches, bool& split_batches) = 0;
  // Starts an iteration; one at a time. Between end() and begin() the range has no iterator.
  virtual void begin() = 0;
  virtual void end() = 0;
  // The next batch; none at the end.
  virtual AnyBatch read() = 0;
  // After read(): samples at the end of the batch that occurred before in the epoch, and the position
  // in the range after it; -1: unknown.
  virtual int64_t repeated() const = 0;
  virtual int64_t cursor() const = 0;
  // A batch of the range's type, from its default constructor. None if it has none.
  virtual AnyBatch form() const = 0;
  // Null if it has no state that can be saved.
  virtual Stateful* stateful() const = 0;
  virtual const std::type_info& type() const = 0;
};

template <typename Range>
class RangeOf final : public AnyRange {
 public:
  explicit RangeOf(std::shared_ptr<Range> range) : range_(std::move(range)) {}

  bool shards() const override { return kShards; }
  bool seeks() const override { return kSeeks; }
  int64_t size() const override {
    if constexpr (kShards && requires { range_->size(); }) {
      return static_cast<int64_t>(range_->size());
    }
    return -1;
  }
  bool few_rows(int64_t world) const override {
    if constexpr (requires { range_->epoch_rows() + range_->options().batch_size; }) {
      const int64_t batch = range_->options().batch_size;
      return range_->epoch_rows() < batch * world || batch < world;
    }
    return false;
  }
  void shard(int rank, int world_size) override {
    if constexpr (kShards) {
      range_->shard(rank, world_size);
    }
  }
  void set_epoch(uint64_t epoch) override {
    if constexpr (requires { range_->set_epoch(epoch); }) {
      range_->set_epoch(epoch);
    }
  }
  void seek(int64_t cursor, int64_t skip) override {
    if constexpr (kSeeks) {
      range_->set_cursor(cursor);
      range_->skip_first_batches(skip);
    }
  }
  bool distributes(bool& even, bool& split) override {
    if constexpr (requires { range_->set_even_batches(true); }) {
      range_->set_even_batches(even);
      range_->set_split_batches(split);
      even = range_->even_batches();
      split = range_->split_batches();
      return true;
    }
    return false;
  }
  void begin() override {
    next_.emplace(std::begin(*range_));
    end_.emplace(std::end(*range_));
    started_ = false;
  }
  void end() override {
    next_.reset();
    end_.reset();
  }
  AnyBatch read() override {
    if (!next_) {
      return {};
    }
    if (std::exchange(started_, true)) {
      ++*next_;
    }
    if (*next_ != *end_) {
      return AnyBatch::of(RangeValue<Range>(**next_));
    }
    end();
    return {};
  }
  int64_t repeated() const override {
    if constexpr (requires { next_->repeated_rows(); }) {
      return next_->repeated_rows();
    }
    return 0;
  }
  int64_t cursor() const override {
    if constexpr (requires { next_->cursor(); }) {
      return next_->cursor();
    }
    return -1;
  }
  AnyBatch form() const override {
    if constexpr (std::default_initializable<RangeValue<Range>>) {
      return AnyBatch::of(RangeValue<Range>());
    }
    return {};
  }
  Stateful* stateful() const override {
    if constexpr (kSeeks && std::derived_from<Range, Stateful>) {
      return range_.get();
    }
    return nullptr;
  }
  const std::type_info& type() const override { return typeid(Range); }

 private:
  static constexpr bool kShards = requires(Range& range, int n) { range.shard(n, n); };
  static constexpr bool kSeeks = requires(Range& range, int64_t n) {
    range.set_cursor(n);
    range.skip_first_batches(n);
    std::begin(range).cursor();
  };

  std::shared_ptr<Range> range_;
  std::optional<decltype(std::begin(std::declval<Range&>()))> next_{};
  std::optional<decltype(std::end(std::declval<Range&>()))> end_{};
  bool started_ = false;
};

} // namespace hasten::detail
