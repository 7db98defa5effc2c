// The handle that Accelerator::prepare returns for a range of batches.
#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>

#include "hasten/loader/any_loader.h"
#include "hasten/loader/any_range.h"

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
/// A range with shard() and no size() reads two batches ahead, so the device holds three: its ranks
/// ask each other with one small message a batch whether any has one more, and the answer arrives
/// while the loop works. With a size() they exchange it in begin(). All other ranges need no message.
/// A training loader is the first loader of a prepare() call with an optimizer, or one that was
/// passed to accumulate. It returns equally many batches on every rank, so that the loop's body
/// runs equally often. A rank without samples gets one of its earlier batches again, as a stand-in
/// batch. A stand-in has no weight in gradients, reports and gather_for_metrics (a hasten::Batch
/// then has tensors, but no rows()), and torch's generators are restored after it. Memory: that one
/// batch; after a loaded position DataLoader reads one more for it. A rank that never had a sample
/// gets another rank's first batch. Reaching the end is collective. It throws CommunicationError on
/// every rank if other ranks continue to train, and InputError if a range with its own shard()
/// gives a rank no sample. Inside LocalSGD, where nothing is sent, a pass over a range with shard()
/// ends with the rank's own data; then the rank takes part in the others' synchronisations until
/// theirs has ended. hasten's DataLoader has equally many batches on every rank.
/// Any other loader returns equally many batches on every rank, some without samples, so that all
/// ranks meet in a gather_for_metrics in the loop's body. Inside a training loop and a window begin()
/// synchronises the models' buffers and is collective; if a rank does not call it, all ranks throw.
template <typename Range>
class PreparedLoader {
 public:
  using value_type = detail::RangeValue<Range>;

  PreparedLoader(std::shared_ptr<const detail::LoaderLink> link, std::shared_ptr<Range> range,
                 std::shared_ptr<detail::LoaderState> state)
      : range_(std::move(range)),
        loader_(std::make_shared<detail::AnyLoader>(
            std::move(link), std::make_unique<detail::RangeOf<Range>>(range_), std::move(state))) {
    loader_->state()->position = loader_;
  }

  class iterator {
   public:
    using value_type = PreparedLoader::value_type;
    using difference_type = int64_t;
    using iterator_category = std::input_iterator_tag;
    iterator() = default;
    /// `loop` is destroyed with the last copy, when the loop ends in any way.
    iterator(detail::AnyLoader* loader, std::shared_ptr<void> loop)
        : loader_(loader), loop_(std::move(loop)) {}
    const value_type& operator*() const { return loader_->current().template as<value_type>(); }
    const value_type* operator->() const { return &**this; }
    /// Collective at the end of a training loader, and for a range with shard() but no size(); else
    /// local.
    iterator& operator++() {
      loader_->advance();
      return *this;
    }
    bool operator==(const iterator& other) const { return at_end() == other.at_end(); }

   private:
    bool at_end() const { return loader_ == nullptr || !loader_->current(); }
    detail::AnyLoader* loader_ = nullptr;
    std::shared_ptr<void> loop_{};
  };

  /// Starts an epoch. A range with set_epoch(n) gets 0, 1, 2, … in successive calls, starting at
  /// the value that set_epoch last set. Collective if the last pass over a training loader was left
  /// by `break`, and for evaluation inside a window of models with buffers; else local.
  iterator begin() {
    loader_->begin();
    const std::shared_ptr<void> loop = std::make_shared<char>();
    loader_->state()->loop = loop;
    return {loader_.get(), loop};
  }
  iterator end() { return {}; }

  /// The next begin() skips this rank's first `batches` ≥ 0, once. O(1) for ranges with
  /// skip_first_batches(n), such as DataLoader, which read nothing. Other ranges are read up to
  /// there. Throws InputError for batches < 0.
  void skip_first_batches(int64_t batches) { loader_->skip_first_batches(batches); }

  /// Sets the epoch of the next begin(). If it differs from the current value, the position of a
  /// loaded state is dropped.
  void set_epoch(uint64_t epoch) { loader_->set_epoch(epoch); }
  /// Epoch that the next begin() will run. After load_state(): the interrupted epoch.
  uint64_t epoch() const { return loader_->position().epoch; }
  /// Position in the pass: samples over all ranks if the range has set_cursor(n), such as
  /// DataLoader; else batches.
  int64_t cursor() const { return loader_->position().cursor; }
  /// Number of this rank's batches in one epoch, if the range has shard(); includes batches without
  /// samples.
  int64_t size() const
    requires requires(Range& range, int n) {
      range.shard(n, n);
      range.size();
    }
  {
    return range_->size();
  }

  Range* operator->() const { return range_.get(); }
  Range& operator*() const { return *range_; }

  /// Users call nothing of it.
  const std::shared_ptr<detail::LoaderState>& state() const { return loader_->state(); }

 private:
  std::shared_ptr<Range> range_;
  std::shared_ptr<detail::AnyLoader> loader_;
};

} // namespace hasten
