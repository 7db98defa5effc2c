// The handle that Accelerator::prepare makes of a range of batches.
// Threading: the thread that uses the Accelerator.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <iterator>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <utility>

#include "hasten/accelerator/batch.h"
#include "hasten/core/stateful.h"

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
  uint64_t index = 0; // in order of preparation, the same on every rank
  std::weak_ptr<void> loop{}; // what the loop's iterators hold
  std::weak_ptr<Stateful> position{}; // expired: its handles are gone
};

// Where a pass over a loader stands. What `cursor` counts: rows or batches over
// all ranks, or this rank's batches.
struct LoaderPosition {
  const char* unit = "rows";
  bool active = false; // between begin() and the end every rank agreed on
  uint64_t epoch = 0; // of the next begin()
  int64_t start = 0; // what the next begin() leaves out
  int64_t cursor = 0; // handed out in this pass
  int64_t read = 0; // `cursor` of what is read ahead
  at::Tensor
      random{}; // torch's generator at begin(): ranges that shuffle by it
  at::Tensor start_random{}; // for the next begin()
};
void save_position(
    const LoaderPosition& position,
    const Stateful* range,
    NamedTensors& tensors,
    nlohmann::json& values);
void load_position(
    LoaderPosition& position,
    Stateful* range,
    const NamedTensors& tensors,
    const nlohmann::json& values);
// Torch's default generator of the CPU.
at::Tensor random_state();
void set_random_state(const at::Tensor& state);

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
    shared_->state->position = shared_;
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

  /// Epoch of the next begin(). Another one than it was to be forgets where a
  /// loaded state stood.
  void set_epoch(uint64_t epoch) {
    if (shared_->position.epoch != epoch) {
      shared_->position.epoch = epoch;
      shared_->position.start = 0;
      shared_->position.start_random = at::Tensor();
    }
  }
  /// Of the next begin(): after load_state() the one that was under way.
  uint64_t epoch() const { return shared_->position.epoch; }
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
  static constexpr bool kHasEpochs =
      requires(Range& range, uint64_t n) { range.set_epoch(n); };
  static constexpr bool kSeeks = requires(Range& range, int64_t n) {
    range.set_cursor(n);
    std::begin(range).cursor();
  };

  struct Shared final : Stateful {
    using First = decltype(std::begin(std::declval<Range&>()));
    using Last = decltype(std::end(std::declval<Range&>()));

    Shared(
        std::shared_ptr<detail::AcceleratorCore> c,
        std::shared_ptr<Range> r,
        std::shared_ptr<detail::LoaderState> s)
        : core(std::move(c)), range(std::move(r)), state(std::move(s)) {
      position.unit = kSeeks ? "rows" : kShards ? "rank batches" : "batches";
    }

    void begin() {
      drop();
      detail::core_begin_range(*core, *state);
      if constexpr (kHasEpochs) {
        range->set_epoch(position.epoch);
      }
      ++position.epoch;
      detail::core_enter_loop(*core, state);
      position.active = true;
      position.read = position.start;
      if constexpr (kSeeks) {
        range->set_cursor(position.start);
        first.emplace(std::begin(*range));
        last.emplace(std::end(*range));
      } else {
        seek();
      }
      position.start = 0;
      next = fetch();
      advance();
    }

    // A range that cannot seek is read up to there.
    void seek() {
      const at::Tensor then =
          std::exchange(position.start_random, at::Tensor());
      at::Tensor now;
      if (then.defined()) { // the order of the pass that was under way
        now = detail::random_state();
        detail::set_random_state(then);
      }
      position.random = detail::random_state();
      first.emplace(std::begin(*range));
      last.emplace(std::end(*range));
      position.read = 0;
      while (position.read < position.start && read()) {
      }
      if (now.defined()) {
        detail::set_random_state(now);
      }
    }

    void advance() {
      current = std::exchange(next, std::nullopt);
      position.cursor = position.read;
      if (!current) {
        drop();
        detail::core_end_range(*core, *state);
        position.active = false;
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
      if constexpr (kSeeks) {
        position.read = first->cursor();
      } else {
        ++position.read;
      }
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

    void save_state(
        NamedTensors& tensors, nlohmann::json& values) const override {
      detail::save_position(position, stateful_range(), tensors, values);
    }
    // Collective by contract, so nobody waits for this rank at a pass's end.
    void load_state(
        const NamedTensors& tensors, const nlohmann::json& values) override {
      detail::load_position(position, stateful_range(), tensors, values);
      drop(); // ends a loop that is under way
      state->open = false;
    }
    Stateful* stateful_range() const {
      if constexpr (std::derived_from<Range, Stateful>) {
        return range.get();
      } else {
        return nullptr;
      }
    }

    std::shared_ptr<detail::AcceleratorCore> core;
    std::shared_ptr<Range> range;
    std::shared_ptr<detail::LoaderState> state;
    detail::LoaderPosition position{};
    std::optional<First> first;
    std::optional<Last> last;
    std::optional<value_type> current, next;
  };

  std::shared_ptr<Shared> shared_;
};

} // namespace hasten
