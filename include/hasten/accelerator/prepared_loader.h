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
#include "hasten/accelerator/loader_state.h"
#include "hasten/core/stateful.h"

namespace hasten {

/// This rank's share of a range of batches, on the accelerator's device.
///   * A range with shard(rank, world_size), such as DataLoader, deals itself.
///   * Any other, torch::data's loaders or a range of structs, is dealt
///     round-robin: every rank iterates all of it, in the same order, and keeps
///     batches rank, rank + world_size, … What it draws from torch's default
///     generator, as RandomSampler does, follows from the accelerator's seed and the
///     epoch, and moves nobody else's draws; with `prefetch` in begin() alone.
///   * With dispatch_batches rank 0 deals for all.
/// One batch is read ahead, so that the last is known when it is handed out.
/// A training loader (the first of a prepare() call that has an optimizer, or any
/// given to accumulate) hands out equally many batches on every rank, so that the
/// loop's body, clipping and counters of one's own among it, runs equally often: a
/// rank that has no row left gets one of its batches again, as a stand-in that
/// counts nowhere: not in gradients, reports and gather_for_metrics (a
/// hasten::Batch then has tensors, but no rows()); torch's generators are put back
/// after it. Memory: that one batch; after a loaded position DataLoader reads one
/// more for it. A rank that never had a row gets another rank's first batch. Reaching
/// the end is collective; it throws CommunicationError, on every rank, where other
/// ranks train on, and InputError where a range with a shard() of its own gives a rank
/// no row.
/// Any other loader hands out equally many batches on every rank, some without
/// rows, so that gather_for_metrics in the loop's body meets on every rank. Begun
/// inside a training loop and a window, it makes the models' buffers equal: there
/// begin() is collective (a rank that does not come gives an error on all).
template <typename Range>
class PreparedLoader {
 public:
  using value_type = std::decay_t<decltype(*std::begin(std::declval<Range&>()))>;

  PreparedLoader(std::shared_ptr<detail::AcceleratorCore> core, std::shared_ptr<Range> range,
                 std::shared_ptr<detail::LoaderState> state)
      : shared_(std::make_shared<Shared>(std::move(core), std::move(range), std::move(state))) {
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
    bool operator==(const iterator& other) const { return at_end() == other.at_end(); }

   private:
    friend class PreparedLoader;
    bool at_end() const { return !shared_ || !shared_->current; }
    typename PreparedLoader::Shared* shared_ = nullptr;
    std::shared_ptr<void> loop_{}; // gone when the loop is left in any way
  };

  /// Starts an epoch. A range with set_epoch(n) gets 0, 1, 2, … from call to
  /// call, or from what set_epoch last said. Collective where the last pass over
  /// a training loader was left by `break`, and for evaluation inside a window of
  /// models with buffers; else local.
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
  static constexpr bool kShards = requires(Range& range, int n) { range.shard(n, n); };
  static constexpr bool kHasEpochs = requires(Range& range, uint64_t n) { range.set_epoch(n); };
  static constexpr bool kSeeks = requires(Range& range, int64_t n) {
    range.set_cursor(n);
    range.skip_first_batches(n);
    std::begin(range).cursor();
  };
  using Item = detail::LoaderItem<value_type>;

  struct Shared final : Stateful {
    Shared(std::shared_ptr<detail::AcceleratorCore> c, std::shared_ptr<Range> r,
           std::shared_ptr<detail::LoaderState> s)
        : core(std::move(c)), range(std::move(r)), state(std::move(s)) {
      detail::check_configuration(state->config, 0);
      position.unit = kSeeks ? "rows" : kShards ? "rank batches" : "batches";
      deal();
    }

    // Over the ranks there are now.
    void deal() {
      options.deal = {};
      state->even = false;
      dealt_over = detail::core_world_size(*core);
      options.deal.rank = detail::core_rank(*core);
      options.deal.world_size = detail::core_world_size(*core);
      options.dispatch = state->config.dispatch_batches && options.deal.world_size > 1;
      options.pin = state->config.non_blocking && detail::core_device(*core).is_cuda();
      options.prefetch = state->config.prefetch;
      options.own = kShards ? 0 : options.deal.rank;
      options.compare = !kShards && options.deal.world_size > 1 && !options.dispatch &&
                        state->config.compare_batches;
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
      } else if (!options.dispatch && (config.even_batches || config.split_batches)) {
        detail::throw_cannot_deal(config.even_batches ? "even_batches" : "split_batches");
      }
      if (options.dispatch) {
        range->shard(0, 1); // rank 0 deals for it
      } else {
        range->shard(options.deal.rank, options.deal.world_size);
      }
    }

    void begin() {
      state->random.clear(); // left by break: they went on since
      drop();
      state->first_read = state->read = state->compared = 0;
      state->range = detail::range_name(typeid(Range), state->index);
      detail::core_begin_range(*core, *state);
      if (dealt_over != detail::core_world_size(*core)) {
        deal(); // ranks were lost
      }
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
          std::exchange(skip, 0) * (options.deal.split ? 1 : options.deal.world_size);
      if constexpr (kSeeks) {
        find_stand_in(position.start + batches);
        if (!options.dispatch || options.deal.rank == 0) {
          range->set_cursor(position.start);
          range->skip_first_batches(batches);
        }
        position.read = position.start;
        pass.emplace(*range, core, options);
        return;
      }
      // Of the pass that was under way, or this epoch's.
      options.random = std::exchange(position.start_random, at::Tensor());
      const auto seed = detail::core_order_seed(*core);
      if (!options.random.defined() && seed) {
        options.random = detail::order_state(*seed, state->index, position.epoch - 1);
      }
      position.random = options.random.defined() ? options.random : detail::random_state();
      position.read = options.skip = position.start + batches;
      pass.emplace(*range, core, options);
      if (!before && pass->left_out()) {
        keep(*pass->left_out());
      }
    }

    // Some rank may have no row of the whole epoch.
    bool few_rows() const {
      if constexpr (requires { range->epoch_rows() + range->options().batch_size; }) {
        const int64_t world = detail::core_world_size(*core);
        const int64_t batch = range->options().batch_size;
        return range->epoch_rows() < batch * world || batch < world;
      }
      return false;
    }
    // A pass that begins late may have no row for this rank.
    void find_stand_in(int64_t left_out) {
      if (std::exchange(began, true) || !state->training || detail::core_world_size(*core) == 1 ||
          (left_out == 0 && !few_rows())) {
        return;
      }
      if (!options.dispatch || options.deal.rank == 0) {
        range->set_cursor(0);
      }
      detail::PassOptions first = options;
      first.prefetch = 0;
      const auto read = [&] {
        const auto item = detail::LoaderPass<Range>(*range, core, first).next();
        if (item && item->batch && detail::batch_rows(*item->batch) != 0) {
          keep(*item->batch);
        } else if (item && item->lent) {
          keep(*item->lent);
        }
      };
      read();
      if (!before && !options.dispatch) { // another rank's
        range->shard(0, 1);
        range->set_cursor(0);
        read();
        range->shard(detail::core_rank(*core), detail::core_world_size(*core));
      }
    }
    void keep(const value_type& batch) {
      before = detail::batch_to_device(value_type(batch), detail::core_device(*core));
    }

    void advance() {
      if (!state->random.empty()) {
        detail::set_random_states(detail::core_device(*core), std::exchange(state->random, {}));
      }
      current.reset();
      position.cursor = position.read;
      if (!next) {
        drop();
        detail::core_end_range(*core, *state);
        position.active = false;
        return;
      }
      state->repeated = next->repeated;
      state->stand_in = next->stand_in;
      current = std::move(next->batch);
      next = fetch();
      state->last = !next.has_value();
      state->rows = detail::batch_rows(*current);
      if (state->stand_in) {
        state->repeated = state->rows.value_or(0);
        state->rows = 0;
        state->random = detail::random_states(detail::core_device(*core));
      }
      state->handed_out = true;
    }

    void drop() {
      current.reset();
      next.reset();
      pass.reset();
      state->last = false;
      state->rows.reset();
      state->repeated = 0;
      state->stand_in = false;
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
        state->read = item->checksum;
        state->first_read = state->first_read == 0 ? item->checksum : state->first_read;
        if (state->training && (!item->batch || detail::batch_rows(*item->batch) == 0)) {
          if (!before && item->lent) {
            keep(*item->lent);
          }
          if (!before && kShards && !options.dispatch && detail::core_world_size(*core) > 1) {
            detail::core_refuse_no_row(*core, state->range);
          }
          if (!before) {
            continue; // no rank has a row of this round
          }
          item->batch = before;
          item->stand_in = true;
          if constexpr (std::is_same_v<value_type, Batch>) {
            item->batch->indices.clear();
          }
          return item;
        }
        if (!item->batch) {
          detail::throw_no_empty_batch();
        }
        item->batch = detail::batch_to_device(std::move(*item->batch), detail::core_device(*core));
        if (detail::core_world_size(*core) > 1) {
          before = item->batch;
        }
        return item;
      }
    }

    void save_state(NamedTensors& tensors, nlohmann::json& values) const override {
      detail::save_position(position, stateful_range(), tensors, values);
    }
    // Collective by contract, so nobody waits for this rank at a pass's end.
    void load_state(const NamedTensors& tensors, const nlohmann::json& values) override {
      detail::load_position(position, stateful_range(), tensors, values);
      state->random.clear(); // the generators are loaded too
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
    std::optional<value_type> before{}; // a batch that had rows
    bool began = false; // a pass, on all ranks
    int dealt_over = 1; // ranks
    std::optional<Item> next{};
    std::optional<detail::LoaderPass<Range>> pass{};
  };

  std::shared_ptr<Shared> shared_;
};

} // namespace hasten
