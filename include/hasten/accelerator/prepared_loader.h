// The handle that Accelerator::prepare makes of a range of batches.
// Threading: the thread that uses the Accelerator.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>

#include "hasten/accelerator/batch.h"

namespace hasten {

namespace detail {

class AcceleratorCore;

// What the core knows of a prepared loader.
struct LoaderState {
  bool training = false; // windows are opened on its batches
  bool open = false; // between begin() and the end every rank agreed on
  bool last = false; // the batch handed out is this rank's last
  std::optional<int64_t> rows{}; // of the batch handed out
  bool even = false; // fills the last round up with rows of the first
  int64_t repeated = 0; // such rows, at the end of the batch handed out
  bool handed_out = false; // a batch, whose loop goes on
  std::weak_ptr<void> loop{}; // what the loop's iterators hold
};

// Non-template doors into the core, so that this header needs none of it.
void core_begin_range(AcceleratorCore& core, LoaderState& loader);
void core_end_range(AcceleratorCore& core, LoaderState& loader);
// Until its loop ends, `loader` is the innermost.
void core_enter_loop(
    AcceleratorCore& core, const std::shared_ptr<LoaderState>& loader);
at::Device core_device(const AcceleratorCore& core);
int core_rank(const AcceleratorCore& core);
int core_world_size(const AcceleratorCore& core);
[[noreturn]] void throw_no_empty_batch();

} // namespace detail

/// This rank's share of a range of batches, on the accelerator's device.
///   * A range with shard(rank, world_size), such as DataLoader, deals itself.
///   * Any other is dealt round-robin: every rank iterates all of it, in the same
///     order, and keeps batches rank, rank + world_size, …
/// One batch is read ahead, so that the last is known when it is handed out.
/// A training loader (the first of a prepare() call that has an optimizer, or any
/// given to accumulate) leaves out batches without rows; reaching its end is
/// collective: ranks that run out first join the others' windows with weight 0.
/// Any other loader hands out equally many batches on every rank, some without
/// rows, so that gather_for_metrics in the loop's body meets on every rank.
template <typename Range>
class PreparedLoader {
 public:
  using value_type =
      std::decay_t<decltype(*std::begin(std::declval<Range&>()))>;

  PreparedLoader(
      std::shared_ptr<detail::AcceleratorCore> core,
      std::shared_ptr<Range> range,
      std::shared_ptr<detail::LoaderState> state)
      : shared_(std::make_shared<Shared>(
            std::move(core), std::move(range), std::move(state))) {
    if constexpr (kShards) {
      shared_->range->shard(
          detail::core_rank(*shared_->core),
          detail::core_world_size(*shared_->core));
    }
  }

  class iterator {
   public:
    using value_type = PreparedLoader::value_type;
    using difference_type = int64_t;
    using iterator_category = std::input_iterator_tag;
    iterator() = default;
    const value_type& operator*() const { return *shared_->current; }
    const value_type* operator->() const { return &*shared_->current; }
    /// Collective at the end of a training loader, else local.
    iterator& operator++() {
      shared_->advance();
      return *this;
    }
    bool operator==(const iterator& other) const {
      return at_end() == other.at_end();
    }

   private:
    friend class PreparedLoader;
    bool at_end() const { return !shared_ || !shared_->current; }
    typename PreparedLoader::Shared* shared_ = nullptr;
    std::shared_ptr<void> loop_{}; // gone when the loop is left in any way
  };

  /// Starts an epoch. A range with set_epoch(n) gets 0, 1, 2, … from call to
  /// call, or from what set_epoch last said. Collective where the last pass over
  /// a training loader was left by `break`, else local.
  iterator begin() {
    shared_->begin();
    iterator it;
    it.shared_ = shared_.get();
    it.loop_ = std::make_shared<char>();
    shared_->state->loop = it.loop_;
    return it;
  }
  iterator end() { return {}; }

  /// Epoch of the next begin().
  void set_epoch(uint64_t epoch) { shared_->epoch = epoch; }
  /// Batches of this rank in one epoch, where the range deals itself; batches
  /// without rows included.
  int64_t size() const
    requires requires(Range& range, int n) {
      range.shard(n, n);
      range.size();
    }
  {
    return shared_->range->size();
  }

  Range* operator->() const { return shared_->range.get(); }
  Range& operator*() const { return *shared_->range; }

 private:
  friend class Accelerator;
  static constexpr bool kShards =
      requires(Range& range, int n) { range.shard(n, n); };

  struct Shared {
    using First = decltype(std::begin(std::declval<Range&>()));
    using Last = decltype(std::end(std::declval<Range&>()));

    Shared(
        std::shared_ptr<detail::AcceleratorCore> c,
        std::shared_ptr<Range> r,
        std::shared_ptr<detail::LoaderState> s)
        : core(std::move(c)), range(std::move(r)), state(std::move(s)) {}

    void begin() {
      drop();
      detail::core_begin_range(*core, *state);
      if constexpr (requires { range->set_epoch(epoch); }) {
        range->set_epoch(epoch);
      }
      ++epoch;
      detail::core_enter_loop(*core, state);
      first.emplace(std::begin(*range));
      last.emplace(std::end(*range));
      next = fetch();
      advance();
    }

    void advance() {
      current = std::exchange(next, std::nullopt);
      if (!current) {
        drop();
        detail::core_end_range(*core, *state);
        return;
      }
      next = fetch();
      state->last = !next.has_value();
      state->rows = detail::batch_rows(*current);
      state->handed_out = true;
    }

    void drop() {
      current.reset();
      next.reset();
      first.reset();
      last.reset();
      state->last = false;
      state->rows.reset();
      state->repeated = 0;
      state->handed_out = false;
    }

    // This rank's next batch, on the device.
    std::optional<value_type> fetch() {
      std::optional<value_type> batch;
      do {
        batch = kShards ? read() : deal();
      } while (batch && state->training && detail::batch_rows(*batch) == 0);
      if (batch) {
        return detail::batch_to_device(
            std::move(*batch), detail::core_device(*core));
      }
      return batch;
    }

    std::optional<value_type> read() {
      if (!(*first != *last)) {
        return std::nullopt;
      }
      std::optional<value_type> batch(**first);
      ++*first;
      return batch;
    }

    // One round of the deal: a batch for every rank, while there are any.
    std::optional<value_type> deal() {
      const int rank = detail::core_rank(*core);
      std::optional<value_type> mine, other;
      for (int r = 0; r < detail::core_world_size(*core); ++r) {
        auto batch = read();
        if (!batch) {
          break;
        }
        (r == rank ? mine : other) = std::move(batch);
      }
      if (mine || !other || state->training) {
        return mine;
      }
      mine = detail::batch_without_rows(std::move(*other));
      if (!mine) {
        detail::throw_no_empty_batch();
      }
      return mine;
    }

    std::shared_ptr<detail::AcceleratorCore> core;
    std::shared_ptr<Range> range;
    std::shared_ptr<detail::LoaderState> state;
    uint64_t epoch = 0;
    std::optional<First> first;
    std::optional<Last> last;
    std::optional<value_type> current, next;
  };

  std::shared_ptr<Shared> shared_;
};

} // namespace hasten
