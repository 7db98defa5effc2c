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
#include "hasten/accelerator/loader_pass.h"
#include "hasten/core/stateful.h"

namespace hasten {

/// How prepared loaders share batches out over ranks; Accelerate's words.
struct DataLoaderConfiguration {
  /// False: a loader's batch is one rank's; ranks × batches make a step. True: it
  /// is cut into equal parts, so that a step holds the same rows on any number of
  /// ranks. Where rows do not divide, the first ranks have one more.
  bool split_batches = false;
  /// Rank 0 alone reads, and sends every rank its batches: for streams that only
  /// one process can read. The other ranks give a range of the same type, which is
  /// not touched. Costs world_size times the bandwidth, and one batch a rank is
  /// read ahead on rank 0. Leave the loop on all ranks in the same turn.
  bool dispatch_batches = false;
  /// The tail of the data is filled up with rows from its beginning, so that every
  /// rank gets equally many batches of equal size. gather_for_metrics leaves the
  /// repeated rows out again; training counts them twice. False: every row once,
  /// and ranks with smaller batches, or without rows, at the end. Ranges that do
  /// not deal themselves keep one batch for each rank in memory.
  bool even_batches = false;
  /// Copies to a GPU go from pinned memory without waiting. No effect on the CPU.
  bool non_blocking = false;
  /// Batches read ahead in a background thread (hasten/data/prefetch.h), beside
  /// the one that is always read ahead. 0: none, no thread.
  int64_t prefetch = 0;
};

namespace detail {

class AcceleratorCore;

// What the core knows of a prepared loader.
struct LoaderState {
  DataLoaderConfiguration config{};
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
[[noreturn]] void throw_cannot_deal(const char* option);
void check_configuration(const DataLoaderConfiguration& config, int64_t skip);

} // namespace detail

/// This rank's share of a range of batches, on the accelerator's device.
///   * A range with shard(rank, world_size), such as DataLoader, deals itself.
///   * Any other, torch::data's loaders or a range of structs, is dealt
///     round-robin: every rank iterates all of it, in the same order, and keeps
///     batches rank, rank + world_size, …
///   * With dispatch_batches rank 0 deals for all.
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

  /// The next begin() leaves out this rank's first `batches` ≥ 0, once. O(1) for
  /// ranges with skip_first_batches(n), such as DataLoader: nothing is read;
  /// others are read up to there. Throws InputError below 0.
  void skip_first_batches(int64_t batches) {
    detail::check_configuration(shared_->state->config, batches);
    shared_->skip = batches;
  }

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
  /// How much of the pass was handed out: rows over all ranks where the range has
  /// set_cursor(n), such as DataLoader; else batches.
  int64_t cursor() const { return shared_->position.cursor; }
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
    range.skip_first_batches(n);
    std::begin(range).cursor();
  };
  using Item = detail::LoaderItem<value_type>;

  struct Shared final : Stateful {
    Shared(
        std::shared_ptr<detail::AcceleratorCore> c,
        std::shared_ptr<Range> r,
        std::shared_ptr<detail::LoaderState> s)
        : core(std::move(c)), range(std::move(r)), state(std::move(s)) {
      detail::check_configuration(state->config, 0);
      position.unit = kSeeks ? "rows" : kShards ? "rank batches" : "batches";
      options.deal.rank = detail::core_rank(*core);
      options.deal.world_size = detail::core_world_size(*core);
      options.dispatch =
          state->config.dispatch_batches && options.deal.world_size > 1;
      options.pin =
          state->config.non_blocking && detail::core_device(*core).is_cuda();
      options.prefetch = state->config.prefetch;
      if constexpr (kShards) {
        shard();
      }
      state->even = state->even || state->config.even_batches;
      options.deal.split = options.deal.split || state->config.split_batches;
      if (options.deal.world_size == 1) {
        state->even = options.deal.split = false;
      } else if (options.dispatch || !kShards) {
        options.deal.even = state->even;
        options.deal.all_ranks = options.dispatch;
        return;
      }
      options.deal = {}; // it deals itself
    }

    // Tells a range that deals itself how to.
    void shard() {
      auto& config = state->config;
      if constexpr (requires { range->set_even_batches(true); }) {
        range->set_even_batches(config.even_batches);
        range->set_split_batches(config.split_batches);
        state->even = range->even_batches();
        options.deal.split = range->split_batches();
      } else if (
          !options.dispatch && (config.even_batches || config.split_batches)) {
        detail::throw_cannot_deal(
            config.even_batches ? "even_batches" : "split_batches");
      }
      if (options.dispatch) {
        range->shard(0, 1); // rank 0 deals for it
      } else {
        range->shard(options.deal.rank, options.deal.world_size);
      }
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
      start_pass();
      position.start = 0;
      next = fetch();
      advance();
    }

    // Behind what a loaded state had done and what is to be skipped.
    void start_pass() {
      const int64_t batches =
          std::exchange(skip, 0) *
          (options.deal.split ? 1 : options.deal.world_size);
      if constexpr (kSeeks) {
        if (!options.dispatch || options.deal.rank == 0) {
          range->set_cursor(position.start);
          range->skip_first_batches(batches);
        }
        position.read = position.start;
        pass.emplace(*range, core, options);
        return;
      }
      const at::Tensor then =
          std::exchange(position.start_random, at::Tensor());
      at::Tensor now;
      if (then.defined()) { // the order of the pass that was under way
        now = detail::random_state();
        detail::set_random_state(then);
      }
      position.random = detail::random_state();
      position.read = options.skip = position.start + batches;
      pass.emplace(*range, core, options);
      if (now.defined()) {
        detail::set_random_state(now);
      }
    }

    void advance() {
      current.reset();
      position.cursor = position.read;
      if (!next) {
        drop();
        detail::core_end_range(*core, *state);
        position.active = false;
        return;
      }
      state->repeated = next->repeated;
      current = std::move(next->batch);
      next = fetch();
      state->last = !next.has_value();
      state->rows = detail::batch_rows(*current);
      state->handed_out = true;
    }

    void drop() {
      current.reset();
      next.reset();
      pass.reset();
      state->last = false;
      state->rows.reset();
      state->repeated = 0;
      state->handed_out = false;
    }

    // This rank's next batch, on the device.
    std::optional<Item> fetch() {
      for (;;) {
        std::optional<Item> item = pass->next();
        if (!item) {
          return std::nullopt;
        }
        position.read = item->position;
        if (state->training && item->optional &&
            (!item->batch || detail::batch_rows(*item->batch) == 0)) {
          continue;
        }
        if (!item->batch) {
          detail::throw_no_empty_batch();
        }
        item->batch = detail::batch_to_device(
            std::move(*item->batch), detail::core_device(*core));
        return item;
      }
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
      if constexpr (kSeeks && std::derived_from<Range, Stateful>) {
        return range.get();
      } else {
        return nullptr;
      }
    }

    std::shared_ptr<detail::AcceleratorCore> core;
    std::shared_ptr<Range> range;
    std::shared_ptr<detail::LoaderState> state;
    detail::PassOptions options{};
    detail::LoaderPosition position{};
    int64_t skip = 0; // batches of this rank
    std::optional<value_type> current{};
    std::optional<Item> next{};
    std::optional<detail::LoaderPass<Range>> pass{};
  };

  std::shared_ptr<Shared> shared_;
};

} // namespace hasten
