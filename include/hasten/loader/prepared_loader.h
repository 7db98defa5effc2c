// The handle that Accelerator::prepare returns for a range of batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <iterator>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <utility>

#include "hasten/core/stateful.h"
#include "hasten/loader/batch.h"
#include "hasten/loader/loader_pass.h"
#include "hasten/loader/loader_state.h"

namespace hasten {

/// This rank's share of a range of batches, on the accelerator's device.
///   * A range with shard(rank, world_size), such as DataLoader, distributes its batches itself.
///   * Any other, such as torch::data's loaders or a range of structs, is distributed round-robin:
///     every rank iterates all of it in the same order and keeps batches rank, rank + world_size
///     and so on. Random values that it draws from torch's default generator, as RandomSampler
///     does, follow from the accelerator's seed and the epoch, and do not advance the generator for
///     others; with `prefetch` this holds in begin() only.
///   * With dispatch_batches rank 0 reads and distributes all batches.
/// One batch is read ahead, so that the last batch is known when it is returned. On a device other
/// than the CPU it is copied there from pinned memory, on a side stream, while the loop uses the
/// batch before it. So the device holds two batches, and the host waits for no copy.
/// A training loader is the first loader of a prepare() call with an optimizer, or one that was
/// passed to accumulate. It returns equally many batches on every rank, so that the loop's body
/// runs equally often. A rank without samples gets one of its earlier batches again, as a stand-in
/// batch. A stand-in has no weight in gradients, reports and gather_for_metrics (a hasten::Batch
/// then has tensors, but no rows()), and torch's generators are restored after it. Memory: that one
/// batch; after a loaded position DataLoader reads one more for it. A rank that never had a sample
/// gets another rank's first batch. Reaching the end is collective. It throws CommunicationError on
/// every rank if other ranks continue to train, and InputError if a range with its own shard()
/// gives a rank no sample.
/// Any other loader returns equally many batches on every rank, some without samples, so that all
/// ranks meet in a gather_for_metrics in the loop's body. Inside a training loop and a window begin()
/// synchronises the models' buffers and is collective; if a rank does not call it, all ranks throw.
template <typename Range>
class PreparedLoader {
  struct Shared;

 public:
  using value_type = std::decay_t<decltype(*std::begin(std::declval<Range&>()))>;

  PreparedLoader(std::shared_ptr<const detail::LoaderLink> link, std::shared_ptr<Range> range,
                 std::shared_ptr<detail::LoaderState> state)
      : shared_(std::make_shared<Shared>(std::move(link), std::move(range), std::move(state))) {
    shared_->state->position = shared_;
  }

  class iterator {
   public:
    using value_type = PreparedLoader::value_type;
    using difference_type = int64_t;
    using iterator_category = std::input_iterator_tag;
    iterator() = default;
    /// `loop` is destroyed with the last copy, when the loop ends in any way.
    iterator(typename PreparedLoader::Shared* shared, std::shared_ptr<void> loop)
        : shared_(shared), loop_(std::move(loop)) {}
    const value_type& operator*() const { return *shared_->current; }
    const value_type* operator->() const { return &*shared_->current; }
    /// Collective at the end of a training loader, else local.
    iterator& operator++() {
      shared_->advance();
      return *this;
    }
    bool operator==(const iterator& other) const { return at_end() == other.at_end(); }

   private:
    bool at_end() const { return !shared_ || !shared_->current; }
    typename PreparedLoader::Shared* shared_ = nullptr;
    std::shared_ptr<void> loop_{};
  };

  /// Starts an epoch. A range with set_epoch(n) gets 0, 1, 2, … in successive calls, starting at
  /// the value that set_epoch last set. Collective if the last pass over a training loader was left
  /// by `break`, and for evaluation inside a window of models with buffers; else local.
  iterator begin() {
    shared_->begin();
    const std::shared_ptr<void> loop = std::make_shared<char>();
    shared_->state->loop = loop;
    return {shared_.get(), loop};
  }
  iterator end() { return {}; }

  /// The next begin() skips this rank's first `batches` ≥ 0, once. O(1) for ranges with
  /// skip_first_batches(n), such as DataLoader, which read nothing. Other ranges are read up to
  /// there. Throws InputError for batches < 0.
  void skip_first_batches(int64_t batches) {
    detail::check_configuration(shared_->state->config, batches);
    shared_->skip = batches;
  }

  /// Sets the epoch of the next begin(). If it differs from the current value, the position of a
  /// loaded state is dropped.
  void set_epoch(uint64_t epoch) {
    if (shared_->position.epoch != epoch) {
      shared_->position.epoch = epoch;
      shared_->position.start = 0;
      shared_->position.start_random = at::Tensor();
    }
  }
  /// Epoch that the next begin() will run. After load_state(): the interrupted epoch.
  uint64_t epoch() const { return shared_->position.epoch; }
  /// Position in the pass: samples over all ranks if the range has set_cursor(n), such as
  /// DataLoader; else batches.
  int64_t cursor() const { return shared_->position.cursor; }
  /// Number of this rank's batches in one epoch, if the range has shard(); includes batches without
  /// samples.
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

  /// Users call nothing of it.
  const std::shared_ptr<detail::LoaderState>& state() const { return shared_->state; }

 private:
  static constexpr bool kShards = requires(Range& range, int n) { range.shard(n, n); };
  static constexpr bool kHasEpochs = requires(Range& range, uint64_t n) { range.set_epoch(n); };
  static constexpr bool kSeeks = requires(Range& range, int64_t n) {
    range.set_cursor(n);
    range.skip_first_batches(n);
    std::begin(range).cursor();
  };
  using Item = detail::LoaderItem<value_type>;

  struct Shared final : Stateful {
    Shared(std::shared_ptr<const detail::LoaderLink> l, std::shared_ptr<Range> r,
           std::shared_ptr<detail::LoaderState> s)
        : link(std::move(l)), range(std::move(r)), state(std::move(s)) {
      detail::check_configuration(state->config, 0);
      position.unit = kSeeks ? "rows" : kShards ? "rank batches" : "batches";
      distribute();
    }

    // Distributes over the current ranks.
    void distribute() {
      options.distributor = {};
      state->even = false;
      distributed_over = link->world_size();
      options.distributor.rank = link->rank();
      options.distributor.world_size = link->world_size();
      options.dispatch = state->config.dispatch_batches && options.distributor.world_size > 1;
      options.pin = state->config.non_blocking && !link->device().is_cpu();
      if (options.pin && !side) {
        side.emplace(link->device());
      }
      options.prefetch = state->config.prefetch;
      options.own = kShards ? 0 : options.distributor.rank;
      options.compare = !kShards && options.distributor.world_size > 1 && !options.dispatch &&
                        state->config.compare_batches;
      if constexpr (kShards) {
        shard();
      }
      state->even = state->even || state->config.even_batches;
      options.distributor.split = options.distributor.split || state->config.split_batches;
      if (options.distributor.world_size == 1) {
        state->even = options.distributor.split = false;
      } else if (options.dispatch || !kShards) {
        options.distributor.even = state->even;
        options.distributor.all_ranks = options.dispatch;
        return;
      }
      options.distributor = {}; // it distributes its batches itself
    }

    // Configures a range that distributes its batches itself.
    void shard() {
      auto& config = state->config;
      if constexpr (requires { range->set_even_batches(true); }) {
        range->set_even_batches(config.even_batches);
        range->set_split_batches(config.split_batches);
        state->even = range->even_batches();
        options.distributor.split = range->split_batches();
      } else if (!options.dispatch && (config.even_batches || config.split_batches)) {
        detail::throw_cannot_distribute(config.even_batches ? "even_batches" : "split_batches");
      }
      if (options.dispatch) {
        range->shard(0, 1); // rank 0 distributes
      } else {
        range->shard(options.distributor.rank, options.distributor.world_size);
      }
    }

    void begin() {
      state->random.clear(); // after `break` the generators have advanced
      drop();
      state->first_read = state->read = state->compared = 0;
      state->range = detail::range_name(typeid(Range), state->index);
      link->begin(*state);
      if (distributed_over != link->world_size()) {
        distribute(); // ranks were lost
      }
      if constexpr (kHasEpochs) {
        range->set_epoch(position.epoch);
      }
      ++position.epoch;
      link->enter_loop(state);
      position.active = true;
      start_pass();
      position.start = 0;
      next = fetch();
      advance();
    }

    // Starts after the loaded position and the batches to skip.
    void start_pass() {
      const int64_t batches =
          std::exchange(skip, 0) * (options.distributor.split ? 1 : options.distributor.world_size);
      if constexpr (kSeeks) {
        find_stand_in(position.start + batches);
        if (!options.dispatch || options.distributor.rank == 0) {
          range->set_cursor(position.start);
          range->skip_first_batches(batches);
        }
        position.read = position.start;
        pass.emplace(*range, link, options);
        return;
      }
      // The generator of the interrupted pass, or that of this epoch.
      options.random = std::exchange(position.start_random, at::Tensor());
      const auto seed = link->order_seed();
      if (!options.random.defined() && seed) {
        options.random = detail::order_state(*seed, state->index, position.epoch - 1);
      }
      position.random =
          options.random.defined() ? options.random : detail::GeneratorState().tensor();
      position.read = options.skip = position.start + batches;
      pass.emplace(*range, link, options);
      if (!before && pass->left_out()) {
        keep(*pass->left_out());
      }
    }

    // A rank may have no sample in the whole epoch.
    bool few_rows() const {
      if constexpr (requires { range->epoch_rows() + range->options().batch_size; }) {
        const int64_t world = link->world_size();
        const int64_t batch = range->options().batch_size;
        return range->epoch_rows() < batch * world || batch < world;
      }
      return false;
    }
    // A pass that begins late may have no sample for this rank.
    void find_stand_in(int64_t left_out) {
      if (std::exchange(began, true) || !state->training || link->world_size() == 1 ||
          (left_out == 0 && !few_rows())) {
        return;
      }
      if (!options.dispatch || options.distributor.rank == 0) {
        range->set_cursor(0);
      }
      detail::PassOptions first = options;
      first.prefetch = 0;
      const auto read = [&] {
        const auto item = detail::LoaderPass<Range>(*range, link, first).next();
        if (item && item->batch && detail::batch_rows(*item->batch) != 0) {
          keep(*item->batch);
        } else if (item && item->peer_batch) {
          keep(*item->peer_batch);
        }
      };
      read();
      if (!before && !options.dispatch) { // another rank's batch
        range->shard(0, 1);
        range->set_cursor(0);
        read();
        range->shard(link->rank(), link->world_size());
      }
    }
    void keep(const value_type& batch) {
      before = detail::batch_to_device(value_type(batch), link->device());
    }

    void advance() {
      detail::set_generator_states(std::exchange(state->random, {}));
      current.reset();
      position.cursor = position.read;
      if (!next) {
        drop();
        link->end(*state);
        position.active = false;
        return;
      }
      state->repeated = next->repeated;
      state->stand_in = next->stand_in;
      current = std::move(next->batch);
      detail::receive_batch(*current, side);
      next = fetch();
      state->last = !next.has_value();
      state->rows = detail::batch_rows(*current);
      if (state->stand_in) {
        state->repeated = state->rows.value_or(0);
        state->rows = 0;
        state->random = detail::generator_states({link->device()});
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
          if (!before && item->peer_batch) {
            keep(*item->peer_batch);
          }
          if (!before && kShards && !options.dispatch && link->world_size() > 1) {
            link->refuse_no_row(state->range);
          }
          if (!before) {
            continue; // no rank has a sample in this global batch
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
        item->batch = detail::batch_to_device(std::move(*item->batch), link->device(),
                                              side ? &*side : nullptr);
        if (link->world_size() > 1) {
          before = item->batch;
        }
        return item;
      }
    }

    void save_state(NamedTensors& tensors, nlohmann::json& values) const override {
      detail::save_position(position, stateful_range(), tensors, values);
    }
    // Every rank calls it, so no rank waits for this one at the end of a pass.
    void load_state(const NamedTensors& tensors, const nlohmann::json& values) override {
      detail::load_position(position, stateful_range(), tensors, values);
      state->random.clear(); // the generators are loaded, too
      drop(); // ends an open loop
      state->open = false;
    }
    Stateful* stateful_range() const {
      if constexpr (kSeeks && std::derived_from<Range, Stateful>) {
        return range.get();
      } else {
        return nullptr;
      }
    }

    std::shared_ptr<const detail::LoaderLink> link;
    std::shared_ptr<Range> range;
    std::shared_ptr<detail::LoaderState> state;
    detail::PassOptions options{};
    detail::LoaderPosition position{};
    int64_t skip = 0; // batches of this rank
    std::optional<value_type> current{};
    std::optional<value_type> before{}; // an earlier batch with samples
    bool began = false; // a pass, on all ranks
    int distributed_over = 1; // ranks
    std::optional<Item> next{};
    std::optional<detail::SideStream> side{}; // copies `next` to the device
    std::optional<detail::LoaderPass<Range>> pass{};
  };

  std::shared_ptr<Shared> shared_;
};

} // namespace hasten
