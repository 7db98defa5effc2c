#include "hasten/data/loader.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/core/random.h"

namespace hasten {

namespace detail {

std::thread start_worker_thread(std::function<void()> body, int torch_threads) {
  const int threads = torch_threads > 0 ? torch_threads : at::get_num_threads();
  return std::thread([threads, body = std::move(body)] {
    at::set_num_threads(threads); // OpenMP has a setting per thread
    body();
  });
}

// Samples of one sorting group. Large enough that its batches have samples of nearly equal length;
// small enough that an epoch of a few batches is still shuffled.
int64_t length_group_rows(int64_t rows, int64_t global_batch) {
  const int64_t batches = std::clamp<int64_t>(rows / (4 * global_batch), 1, 50);
  return batches * global_batch;
}

// One epoch's samples and their lengths for grouping, before they are assigned to ranks.
struct EpochOrder {
  std::vector<int64_t> rows{}; // in order
  std::vector<int64_t> lengths{}; // [sample]; empty without grouping

  void sort_longest_first(int64_t begin, int64_t end) {
    std::stable_sort(rows.begin() + begin, rows.begin() + end,
                     [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
  }

  // The sample that must run first: if its batch fits in memory, all batches do.
  int64_t longest(int64_t count) const {
    return std::max_element(rows.begin(), rows.begin() + count,
                            [&](int64_t a, int64_t b) { return lengths[a] < lengths[b]; }) -
           rows.begin();
  }

  // Groups batches of similar length and shuffles all but the first. The samples of a smaller last
  // batch are chosen before sorting, so that every sample is equally likely to be in it (or to be
  // dropped).
  void group(int64_t global_batch, OrderRng& rng) {
    const int64_t full = static_cast<int64_t>(rows.size()) / global_batch * global_batch;
    if (full == 0) {
      sort_longest_first(0, static_cast<int64_t>(rows.size()));
      return;
    }
    if (const int64_t at = longest(static_cast<int64_t>(rows.size())); at >= full) {
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
      std::copy_n(sorted.begin() + order[i] * global_batch, global_batch,
                  rows.begin() + i * global_batch);
    }
  }
};

EpochOrder epoch_order(const Dataset& dataset, const LoaderOptions& options, uint64_t epoch,
                       int64_t global_batch) {
  EpochOrder order;
  order.rows.resize(dataset.size());
  std::iota(order.rows.begin(), order.rows.end(), 0);
  OrderRng rng(options.seed, epoch);
  if (options.shuffle) {
    rng.shuffle(order.rows.data(), order.rows.size());
  }
  if (options.drop_last) {
    const int64_t drop = options.drop_batch > 0 ? options.drop_batch : global_batch;
    order.rows.resize(dataset.size() / drop * drop);
  }
  if (options.group_by_length && !order.rows.empty()) {
    order.lengths.resize(dataset.size());
    for (int64_t row = 0; row < dataset.size(); ++row) {
      order.lengths[row] = dataset.length(row);
    }
    if (options.shuffle) {
      order.group(options.group_batch > 0 ? options.group_batch : global_batch, rng);
    } else {
      order.sort_longest_first(0, static_cast<int64_t>(order.rows.size()));
    }
  }
  return order;
}

// Rank of place `i` in a global batch. The direction alternates (0 1 1 0) if samples are sorted by
// length; otherwise rank 0 would get the longer sample every time.
int rank_of_place(int64_t i, int world_size, bool sorted) {
  const int rank = static_cast<int>(i % world_size);
  const bool backwards = sorted && (i / world_size) % 2 == 1;
  return backwards ? world_size - 1 - rank : rank;
}

int64_t global_batch_rows(const LoaderOptions& options, int world_size) {
  return options.batch_size * (options.split_batches ? 1 : world_size);
}

void check_loader(const LoaderOptions& options, int rank = 0, int world_size = 1) {
  if (options.batch_size < 1) {
    throw InputError("data::DataLoader", "batch_size=" + std::to_string(options.batch_size),
                     "at least 1");
  }
  if (options.num_workers < 0 || options.prefetch_factor < 1) {
    throw InputError("data::DataLoader",
                     "num_workers=" + std::to_string(options.num_workers) +
                         ", prefetch_factor=" + std::to_string(options.prefetch_factor),
                     "num_workers at least 0, prefetch_factor at least 1");
  }
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    throw InputError("data::DataLoader",
                     "rank=" + std::to_string(rank) + ", world_size=" + std::to_string(world_size),
                     "0 <= rank < world_size");
  }
  if (options.even_batches && options.split_batches && options.batch_size % world_size != 0) {
    throw InputError("data::DataLoader",
                     "batch_size=" + std::to_string(options.batch_size) + " on " +
                         std::to_string(world_size) + " ranks",
                     "with split_batches and even_batches a multiple of the number of ranks",
                     "change batch_size, or set even_batches=false");
  }
}

} // namespace detail

std::vector<std::vector<int64_t>> rank_batches(const Dataset& dataset, const LoaderOptions& options,
                                               uint64_t epoch, int rank, int world_size,
                                               int64_t first_row) {
  detail::check_loader(options, rank, world_size);
  const int64_t global_batch = detail::global_batch_rows(options, world_size);
  const auto order = detail::epoch_order(dataset, options, epoch, global_batch);
  const auto total = static_cast<int64_t>(order.rows.size());
  std::vector<std::vector<int64_t>> batches;
  batches.reserve((total + global_batch - 1) / global_batch);
  for (int64_t begin = first_row; begin < total; begin += global_batch) {
    const bool fill = options.even_batches && world_size > 1;
    const int64_t count = fill ? global_batch : std::min(global_batch, total - begin);
    auto& batch = batches.emplace_back();
    batch.reserve(std::min(options.batch_size, count));
    for (int64_t i = 0; i < count; ++i) {
      if (detail::rank_of_place(i, world_size, options.group_by_length) == rank) {
        batch.push_back(order.rows[(begin + i) % total]);
      }
    }
  }
  return batches;
}

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, LoaderOptions options)
    : dataset_(std::move(dataset)),
      options_(options),
      given_even_(options.even_batches),
      given_split_(options.split_batches) {
  detail::check_loader(options_);
  if (dataset_ == nullptr) {
    throw InputError("data::DataLoader", "dataset=null", "a data set");
  }
}

void DataLoader::set_epoch(uint64_t epoch) {
  if (epoch != epoch_) {
    epoch_ = epoch;
    *start_ = *cursor_ = 0;
  }
}

void DataLoader::set_cursor(int64_t rows) {
  if (rows < 0 || rows > epoch_rows()) {
    throw InputError("data::DataLoader", "cursor=" + std::to_string(rows),
                     "0 to " + std::to_string(epoch_rows()) + ", the samples of an epoch");
  }
  *start_ = *cursor_ = rows;
}

int64_t DataLoader::epoch_rows() const {
  if (!options_.drop_last) {
    return dataset_->size();
  }
  const int64_t drop = options_.drop_batch > 0 ? options_.drop_batch : global_batch();
  return dataset_->size() / drop * drop;
}

void DataLoader::skip_first_batches(int64_t batches) {
  if (batches < 0) {
    throw InputError("data::DataLoader", "batches to skip=" + std::to_string(batches), "0 or more");
  }
  const int64_t left = epoch_rows() - *start_;
  set_cursor(batches > left / global_batch() ? epoch_rows() : *start_ + batches * global_batch());
}

int64_t DataLoader::global_batch() const {
  return detail::global_batch_rows(options_, world_size_);
}

void DataLoader::shard(int rank, int world_size) {
  detail::check_loader(options_, rank, world_size);
  rank_ = rank;
  world_size_ = world_size;
}

int64_t DataLoader::size() const { return (epoch_rows() + global_batch() - 1) / global_batch(); }

DataLoader::iterator::iterator(const DataLoader& loader)
    : first_row_(std::exchange(*loader.start_, 0)) {
  const LoaderOptions& options = loader.options_;
  *loader.cursor_ = first_row_;
  batches_ = std::make_shared<const std::vector<std::vector<int64_t>>>(rank_batches(
      *loader.dataset_, options, loader.epoch_, loader.rank_, loader.world_size_, first_row_));
  if (batches_->empty()) {
    return;
  }
  loader_ = &loader;
  position_ = 0;
  if (options.num_workers > 0) {
    workers_ = std::make_shared<OrderedWorkers<Batch>>(
        [dataset = loader.dataset_, batches = batches_, epoch = loader.epoch_](int64_t batch) {
          return dataset->collate_in_epoch((*batches)[batch], epoch);
        },
        static_cast<int64_t>(batches_->size()), static_cast<int>(options.num_workers),
        options.num_workers * options.prefetch_factor);
  }
  load();
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

int64_t DataLoader::iterator::cursor() const {
  return std::min(first_row_ + (position_ + 1) * loader_->global_batch(), loader_->epoch_rows());
}

int64_t DataLoader::iterator::repeated_rows() const {
  const LoaderOptions& options = loader_->options_;
  const int64_t last_rows =
      loader_->epoch_rows() - first_row_ - position_ * loader_->global_batch();
  if (!options.even_batches || loader_->world_size_ == 1) {
    return 0;
  }
  auto repeated = static_cast<int64_t>((*batches_)[position_].size());
  for (int64_t i = 0; i < std::min(last_rows, loader_->global_batch()); ++i) {
    repeated -=
        detail::rank_of_place(i, loader_->world_size_, options.group_by_length) == loader_->rank_
            ? 1
            : 0;
  }
  return repeated;
}

void DataLoader::iterator::load() {
  batch_ = workers_ ? *workers_->next()
                    : loader_->dataset_->collate_in_epoch((*batches_)[position_], loader_->epoch_);
  *loader_->cursor_ = cursor();
}

void DataLoader::save_state(NamedTensors&, nlohmann::json& values) const {
  const auto or_global = [this](int64_t rows) { return rows > 0 ? rows : global_batch(); };
  values["epoch"] = epoch_;
  values["cursor"] = cursor_->load();
  values["rows"] = dataset_->size();
  values["seed"] = options_.seed;
  values["shuffle"] = options_.shuffle;
  values["group_by_length"] = options_.group_by_length;
  values["drop_last"] = options_.drop_last;
  values["order_batch"] = or_global(options_.group_batch);
  values["drop_batch"] = or_global(options_.drop_batch);
}

void DataLoader::load_state(const NamedTensors&, const nlohmann::json& values) {
  constexpr const char* kWhere = "data::DataLoader";
  nlohmann::json mine;
  NamedTensors none;
  save_state(none, mine);
  for (const auto& [name, value] : mine.items()) {
    const auto saved = values.find(name);
    if (saved == values.end() || saved->type_name() != std::string(value.type_name())) {
      throw InputError(kWhere,
                       "the state lacks " + name + ", or it is not of type " + value.type_name(),
                       "a state that save_state() wrote");
    }
  }
  const auto cursor = values.at("cursor").get<int64_t>();
  LoaderOptions options = options_;
  options.group_batch = values.at("order_batch").get<int64_t>();
  options.drop_batch = values.at("drop_batch").get<int64_t>();
  if (options.group_batch < 1 || options.drop_batch < 1 || cursor < 0 ||
      cursor > values.at("rows").get<int64_t>()) {
    throw InputError(kWhere, "the state's numbers contradict each other: " + values.dump(),
                     "a state that save_state() wrote");
  }
  for (const char* name : {"rows", "seed", "shuffle", "group_by_length", "drop_last"}) {
    if (cursor > 0 && values.at(name) != mine.at(name)) {
      throw InputError(kWhere,
                       std::string("the state is from the middle of an epoch with ") + name + "=" +
                           values.at(name).dump() + ", but this loader has " + mine.at(name).dump(),
                       "the same samples in the same order, so that each is used once",
                       "make the loader as in the saved run, or resume from the end of an epoch");
    }
  }
  options_ = options;
  epoch_ = values.at("epoch").get<uint64_t>();
  *start_ = *cursor_ = cursor;
}

} // namespace hasten
