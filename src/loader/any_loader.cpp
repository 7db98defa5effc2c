#include "hasten/loader/any_loader.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/comm/communicator.h"
#include "hasten/core/random.h"
#include "loader_pass.h"

namespace hasten::detail {

// "loader 1 (std::vector)"; index 0: a loader without a number.
static std::string range_name(const std::type_info& type, uint64_t index) {
  const std::string text = c10::demangle(type.name());
  return (index > 0 ? "loader " + std::to_string(index) : "a loader") + " (" +
         text.substr(0, std::min<size_t>(text.find('<'), 80)) + ")";
}

// The generator from which a range draws in an epoch; equal on every rank.
static at::Tensor order_state(uint64_t seed, uint64_t index, uint64_t epoch) {
  return seeded_generator(stream_seed("loader", seed, index, epoch)).get_state();
}

int LoaderLink::rank() const { return communicator().rank(); }
int LoaderLink::world_size() const { return communicator().world_size(); }

[[noreturn]] static void throw_no_empty_batch() {
  throw InputError("accelerator::PreparedLoader",
                   "the batches cannot be split evenly over ranks, and their type has no tensor "
                   "from which to make a batch without samples",
                   "a batch type with tensors, or with flatten(visit, batch)");
}

static void check_configuration(const DataLoaderConfiguration& config, int64_t skip) {
  if (config.prefetch < 0 || skip < 0) {
    throw InputError("accelerator::PreparedLoader",
                     config.prefetch < 0 ? "prefetch=" + std::to_string(config.prefetch)
                                         : "batches to skip=" + std::to_string(skip),
                     "0 or more");
  }
}

AnyLoader::AnyLoader(std::shared_ptr<const LoaderLink> link, std::unique_ptr<AnyRange> range,
                     std::shared_ptr<LoaderState> state)
    : link_(std::move(link)), range_(std::move(range)), state_(std::move(state)) {
  check_configuration(state_->config, 0);
  position_.unit = range_->seeks() ? "rows" : range_->shards() ? "rank batches" : "batches";
  distribute();
}

AnyLoader::~AnyLoader() = default;

bool AnyLoader::dispatches() const {
  return state_->config.dispatch_batches && link_->world_size() > 1;
}

bool AnyLoader::asks_ranks() const { return !state_->training || link_->trains_together(); }

// Distributes over the current ranks.
void AnyLoader::distribute() {
  const DataLoaderConfiguration& config = state_->config;
  distributed_over_ = link_->world_size();
  bool& even = state_->even;
  even = config.even_batches;
  split_ = config.split_batches;
  if (config.non_blocking && !link_->device().is_cpu() && !side_) {
    side_.emplace(link_->device());
  }
  if (range_->shards()) {
    if (!range_->distributes(even, split_) && !dispatches() && (even || split_)) {
      throw InputError("accelerator::PreparedLoader",
                       std::string(even ? "even_batches" : "split_batches") +
                           " for a range with its own shard()",
                       "set_even_batches() and set_split_batches() of the range",
                       "add them to the range, or set dispatch_batches");
    }
    even = even || config.even_batches;
    split_ = split_ || config.split_batches;
    shard();
  }
  if (link_->world_size() == 1) {
    even = split_ = false;
  }
  state_->own_end =
      range_->shards() && !range_->seeks() && !dispatches() && link_->world_size() > 1;
  roll_call_ = state_->own_end ? link_->roll_call(*state_) : nullptr;
  calls_roll_ = roll_call_ && range_->size() < 0;
}

void AnyLoader::shard() {
  if (dispatches()) {
    range_->shard(0, 1); // rank 0 distributes
  } else {
    range_->shard(link_->rank(), link_->world_size());
  }
}

PassOptions AnyLoader::pass_options() const {
  PassOptions options;
  const bool itself = range_->shards() && !dispatches(); // it distributes its batches itself
  options.dispatch = dispatches();
  if (link_->world_size() > 1 && !itself) {
    options.rank = link_->rank();
    options.world_size = link_->world_size();
    options.split = split_;
    options.even = state_->even;
    options.compare = !range_->shards() && !options.dispatch && state_->config.compare_batches;
  }
  options.pin = side_.has_value();
  options.prefetch = state_->config.prefetch;
  options.own = range_->shards() ? 0 : link_->rank();
  return options;
}

void AnyLoader::begin() {
  state_->random.clear(); // after `break` the generators have advanced
  drop();
  state_->first_read = state_->read = state_->compared = 0;
  state_->range = range_name(range_->type(), state_->index);
  link_->begin(*state_);
  if (distributed_over_ != link_->world_size()) {
    distribute(); // ranks were lost
  }
  range_->set_epoch(position_.epoch++);
  link_->enter_loop(state_);
  position_.active = true;
  start_pass();
  position_.start = 0;
  look_ahead();
  if (calls_roll_) {
    look_ahead();
  }
  exists_ = agree_on_next();
  advance();
}

// Starts after the loaded position and the batches to skip.
void AnyLoader::start_pass() {
  PassOptions options = pass_options();
  const int64_t batches = std::exchange(skip_, 0) * (options.split ? 1 : options.world_size);
  if (range_->seeks()) {
    find_stand_in(position_.start + batches);
    if (!options.dispatch || link_->rank() == 0) {
      range_->seek(position_.start, batches);
    }
    position_.cursor = position_.start;
    pass_ = std::make_unique<LoaderPass>(*range_, *link_, options);
    return;
  }
  // The generator of the interrupted pass, or that of this epoch.
  options.random = std::exchange(position_.start_random, at::Tensor());
  const auto seed = link_->order_seed();
  if (!options.random.defined() && seed) {
    options.random = order_state(*seed, state_->index, position_.epoch - 1);
  }
  position_.random = options.random.defined() ? options.random : GeneratorState().tensor();
  position_.cursor = options.skip = position_.start + batches;
  if (roll_call_ && !calls_roll_ && asks_ranks()) {
    left_ = roll_call_->largest(range_->size() - options.skip);
  }
  pass_ = std::make_unique<LoaderPass>(*range_, *link_, options);
  if (!before_ && pass_->left_out()) {
    keep(pass_->left_out());
  }
}

// A pass that begins late may have no sample for this rank, and neither may a short one.
void AnyLoader::find_stand_in(int64_t left_out) {
  if (std::exchange(began_, true) || !state_->training || link_->world_size() == 1 ||
      (left_out == 0 && !range_->few_rows(link_->world_size()))) {
    return;
  }
  if (!read_first() && !dispatches()) { // another rank's batch
    range_->shard(0, 1);
    read_first();
    shard();
  }
}

bool AnyLoader::read_first() {
  PassOptions options = pass_options();
  options.prefetch = 0;
  if (!options.dispatch || link_->rank() == 0) {
    range_->seek(0, 0);
  }
  const auto item = LoaderPass(*range_, *link_, options).next();
  if (item && item->batch.has_rows()) {
    keep(item->batch);
  } else if (item && item->peer_batch) {
    keep(item->peer_batch);
  }
  return bool(before_);
}

void AnyLoader::keep(const AnyBatch& batch) {
  before_ = batch.without_indices(); // a copy
  before_.move_to(link_->device(), nullptr);
}

void AnyLoader::advance() {
  set_generator_states(std::exchange(state_->random, {}));
  current_ = {};
  if (!exists_) {
    drop();
    link_->end(*state_);
    position_.active = false;
    return;
  }
  LoaderItem item = std::move(ahead_.front());
  ahead_.pop_front();
  if (!item.batch) { // another rank has one
    item.position = position_.cursor;
    make_stand_in(item);
  }
  current_ = std::move(item.batch);
  if (side_) {
    current_.receive(*side_);
  }
  position_.cursor = item.position;
  --left_;
  look_ahead();
  exists_ = agree_on_next();
  state_->last = !exists_;
  state_->repeated = item.repeated;
  state_->stand_in = item.stand_in;
  state_->rows = current_.rows();
  if (state_->stand_in) {
    state_->repeated = state_->rows.value_or(0);
    state_->rows = 0;
    state_->random = generator_states({link_->device()});
  }
  state_->handed_out = true;
}

// Note [Roll call]
// Ranks must know before a batch whether it is the last: its backward reduces, and windows end with
// the data. For most ranges every rank can compute that, and ranges that distribute themselves may
// have a size(). The others answer one batch ahead, so that nobody waits: when batch k is handed out,
// the answer about batch k + 1 has arrived and that about batch k + 2 is on its way. So one batch more
// is kept in memory. Inside LocalSGD, where nothing is sent, a rank's pass ends with its own data. A
// pending answer is always taken.
bool AnyLoader::agree_on_next() {
  const bool here = bool(ahead_.front().batch);
  if (!calls_roll_) {
    return here || left_ > 0;
  }
  const bool asks = asks_ranks();
  if (asks && !roll_call_->pending()) {
    roll_call_->start(here);
  }
  const bool exists = roll_call_->pending() ? roll_call_->wait() : here;
  if (asks && exists) {
    roll_call_->start(bool(ahead_.back().batch));
  }
  return exists;
}

void AnyLoader::look_ahead() {
  LoaderItem item;
  if (!ended_) {
    item = fetch();
    ended_ = !item.batch;
  }
  ahead_.push_back(std::move(item));
}

void AnyLoader::drop() {
  if (roll_call_ && roll_call_->pending()) {
    roll_call_->wait();
  }
  current_ = {};
  ahead_.clear();
  pass_.reset();
  ended_ = exists_ = false;
  left_ = 0;
  state_->last = false;
  state_->rows.reset();
  state_->repeated = 0;
  state_->stand_in = false;
  state_->handed_out = false;
}

// This rank's next batch, on the device; none at the end.
LoaderItem AnyLoader::fetch() {
  for (;;) {
    std::optional<LoaderItem> item = pass_->next();
    if (!item) {
      return {};
    }
    state_->read = item->checksum;
    state_->first_read = state_->first_read == 0 ? item->checksum : state_->first_read;
    if (!state_->training || item->batch.has_rows()) {
      if (!item->batch) {
        throw_no_empty_batch();
      }
      item->batch.move_to(link_->device(), side_ ? &*side_ : nullptr);
      if (link_->world_size() > 1) {
        before_ = item->batch;
      }
      return std::move(*item);
    }
    if (!before_ && item->peer_batch) {
      keep(item->peer_batch);
    }
    if (before_ || (range_->shards() && !dispatches() && link_->world_size() > 1)) {
      make_stand_in(*item);
      return std::move(*item);
    } // else no rank has a sample in this global batch
  }
}

void AnyLoader::make_stand_in(LoaderItem& item) const {
  if (!before_) {
    const InputError error(
        "accelerator::PreparedLoader",
        "this rank has no sample to train on: rank=" + std::to_string(link_->rank()) + " of " +
            state_->range + ", world_size=" + std::to_string(link_->world_size()),
        "a sample for every rank from the range's shard()",
        "start fewer ranks, use more data, or set even_batches or "
        "dispatch_batches");
    link_->communicator().abort(error); // they wait for this rank
    throw error;
  }
  item.stand_in = state_->training;
  item.batch = state_->training ? before_.without_indices() : before_.without_rows();
  if (!item.batch) {
    throw_no_empty_batch();
  }
}

void AnyLoader::skip_first_batches(int64_t batches) {
  check_configuration(state_->config, batches);
  skip_ = batches;
}

void AnyLoader::set_epoch(uint64_t epoch) {
  if (position_.epoch != epoch) {
    position_.epoch = epoch;
    position_.start = 0;
    position_.start_random = at::Tensor();
  }
}

void AnyLoader::save_state(NamedTensors& tensors, nlohmann::json& values) const {
  const Stateful* range = range_->stateful();
  const uint64_t epoch = position_.active ? position_.epoch - 1 : position_.epoch;
  const int64_t cursor = position_.active ? position_.cursor : position_.start;
  values["unit"] = position_.unit;
  values["epoch"] = epoch;
  values["cursor"] = cursor;
  const at::Tensor& random = position_.active ? position_.random : position_.start_random;
  if (random.defined() && cursor > 0) {
    tensors["random"] = random;
  }
  if (range != nullptr) {
    NamedTensors none;
    nlohmann::json inner;
    range->save_state(none, inner);
    inner["epoch"] = epoch; // without the batch that is read ahead
    inner["cursor"] = cursor;
    values["range"] = std::move(inner);
  }
}

void AnyLoader::load_state(const NamedTensors& tensors, const nlohmann::json& values) {
  Stateful* range = range_->stateful();
  const auto unit = values.at("unit").get<std::string>();
  const auto cursor = values.at("cursor").get<int64_t>();
  if (unit != position_.unit && cursor > 0) {
    throw InputError(
        "accelerator::load_state", "the position in the data counts " + unit,
        std::string("a loader of the same kind, whose position counts ") + position_.unit);
  }
  if (range != nullptr && values.contains("range")) {
    range->load_state({}, values.at("range")); // throws before anything changed
  }
  const auto random = tensors.find("random");
  position_.active = false;
  position_.epoch = values.at("epoch").get<uint64_t>();
  position_.start = cursor;
  position_.cursor = 0;
  position_.start_random = random == tensors.end() ? at::Tensor() : random->second.clone();
  state_->random.clear(); // the generators are loaded, too
  drop(); // ends an open loop
  state_->open = false;
}

} // namespace hasten::detail
