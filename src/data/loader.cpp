#include "hasten/data/loader.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/core/random.h"

namespace hasten {

namespace detail {

// Rows of one sorting group: large enough that batches cut from it are nearly of
// one length, small enough that an epoch of a few batches is still shuffled.
int64_t length_group_rows(int64_t rows, int64_t global_batch) {
  const int64_t batches = std::clamp<int64_t>(rows / (4 * global_batch), 1, 50);
  return batches * global_batch;
}

// One epoch's rows with the lengths they are grouped by, not yet dealt out.
struct EpochOrder {
  std::vector<int64_t> rows{}; // in order
  std::vector<int64_t> lengths{}; // [row number]; empty without grouping

  void sort_longest_first(int64_t begin, int64_t end) {
    std::stable_sort(
        rows.begin() + begin, rows.begin() + end, [&](int64_t a, int64_t b) {
          return lengths[a] > lengths[b];
        });
  }

  // The row to run first: where its batch fits in memory, all do.
  int64_t longest(int64_t count) const {
    return std::max_element(
               rows.begin(),
               rows.begin() + count,
               [&](int64_t a, int64_t b) { return lengths[a] < lengths[b]; }) -
           rows.begin();
  }

  // Puts batches of similar length together and shuffles those but the first.
  // The rows of a smaller last batch are taken before sorting, so that none are
  // more likely to be in it (or, dropped, to be lost) than others.
  void group(int64_t global_batch, OrderRng& rng) {
    const int64_t full =
        static_cast<int64_t>(rows.size()) / global_batch * global_batch;
    if (full == 0) {
      sort_longest_first(0, static_cast<int64_t>(rows.size()));
      return;
    }
    if (const int64_t at = longest(static_cast<int64_t>(rows.size()));
        at >= full) {
      std::swap(rows[at], rows[0]);
    }
    const int64_t group_rows = length_group_rows(full, global_batch);
    for (int64_t begin = 0; begin < full; begin += group_rows) {
      sort_longest_first(begin, std::min(begin + group_rows, full));
    }
    sort_longest_first(full, static_cast<int64_t>(rows.size()));
    shuffle_batches(full / global_batch, global_batch, rng);
  }

  void shuffle_batches(int64_t batches, int64_t global_batch, OrderRng& rng) {
    std::vector<int64_t> order(batches);
    std::iota(order.begin(), order.end(), 0);
    std::swap(order[0], order[longest(batches * global_batch) / global_batch]);
    rng.shuffle(order.data() + 1, order.size() - 1);
    const std::vector<int64_t> sorted = rows;
    for (int64_t i = 0; i < batches; ++i) {
      std::copy_n(
          sorted.begin() + order[i] * global_batch,
          global_batch,
          rows.begin() + i * global_batch);
    }
  }
};

EpochOrder epoch_order(
    const Dataset& dataset,
    const LoaderOptions& options,
    uint64_t epoch,
    int64_t global_batch,
    int64_t group_batch) {
  EpochOrder order;
  order.rows.resize(dataset.size());
  std::iota(order.rows.begin(), order.rows.end(), 0);
  OrderRng rng(options.seed, epoch);
  if (options.shuffle) {
    rng.shuffle(order.rows.data(), order.rows.size());
  }
  if (options.drop_last) {
    order.rows.resize(order.rows.size() / global_batch * global_batch);
  }
  if (options.group_by_length && !order.rows.empty()) {
    order.lengths.resize(dataset.size());
    for (int64_t row = 0; row < dataset.size(); ++row) {
      order.lengths[row] = dataset.length(row);
    }
    if (options.shuffle) {
      order.group(group_batch, rng);
    } else {
      order.sort_longest_first(0, static_cast<int64_t>(order.rows.size()));
    }
  }
  return order;
}

// Which rank takes place `i` of a global batch. To and fro (0 1 1 0) where rows
// are sorted by length: plain turns would give rank 0 the longer row every time.
int rank_of_place(int64_t i, int world_size, bool sorted) {
  const int turn = static_cast<int>(i % world_size);
  const bool backwards = sorted && (i / world_size) % 2 == 1;
  return backwards ? world_size - 1 - turn : turn;
}

void check_loader(
    const LoaderOptions& options, int rank = 0, int world_size = 1) {
  if (options.batch_size < 1) {
    throw InputError(
        "data::DataLoader",
        "batch_size=" + std::to_string(options.batch_size),
        "at least 1");
  }
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    throw InputError(
        "data::DataLoader",
        "rank=" + std::to_string(rank) +
            ", world_size=" + std::to_string(world_size),
        "0 <= rank < world_size");
  }
}

} // namespace detail

std::vector<std::vector<int64_t>> rank_batches(
    const Dataset& dataset,
    const LoaderOptions& options,
    uint64_t epoch,
    int rank,
    int world_size) {
  detail::check_loader(options, rank, world_size);
  const int64_t global_batch = options.batch_size * world_size;
  const auto order = detail::epoch_order(
      dataset,
      options,
      epoch,
      global_batch,
      std::max(options.group_batch, global_batch));
  const auto total = static_cast<int64_t>(order.rows.size());
  std::vector<std::vector<int64_t>> batches;
  batches.reserve((total + global_batch - 1) / global_batch);
  for (int64_t begin = 0; begin < total; begin += global_batch) {
    const int64_t count = std::min(global_batch, total - begin);
    auto& batch = batches.emplace_back();
    batch.reserve(options.batch_size);
    for (int64_t i = 0; i < count; ++i) {
      if (detail::rank_of_place(i, world_size, options.group_by_length) ==
          rank) {
        batch.push_back(order.rows[begin + i]);
      }
    }
  }
  return batches;
}

DataLoader::DataLoader(
    std::shared_ptr<const Dataset> dataset, LoaderOptions options)
    : dataset_(std::move(dataset)), options_(options) {
  detail::check_loader(options_);
  if (dataset_ == nullptr) {
    throw InputError("data::DataLoader", "dataset=null", "a data set");
  }
}

void DataLoader::set_epoch(uint64_t epoch) { epoch_ = epoch; }

void DataLoader::shard(int rank, int world_size) {
  detail::check_loader(options_, rank, world_size);
  rank_ = rank;
  world_size_ = world_size;
}

int64_t DataLoader::size() const {
  const int64_t global_batch = options_.batch_size * world_size_;
  const int64_t full = dataset_->size() / global_batch;
  const bool rest = dataset_->size() % global_batch != 0;
  return full + (rest && !options_.drop_last ? 1 : 0);
}

DataLoader::iterator DataLoader::begin() const {
  iterator first;
  first.batches_ = std::make_shared<const std::vector<std::vector<int64_t>>>(
      rank_batches(*dataset_, options_, epoch_, rank_, world_size_));
  if (!first.batches_->empty()) {
    first.loader_ = this;
    first.position_ = 0;
    first.load();
  }
  return first;
}

DataLoader::iterator& DataLoader::iterator::operator++() {
  ++position_;
  if (position_ == static_cast<int64_t>(batches_->size())) {
    *this = {};
  } else {
    load();
  }
  return *this;
}

void DataLoader::iterator::load() {
  batch_ = loader_->dataset_->collate((*batches_)[position_]);
}

} // namespace hasten
