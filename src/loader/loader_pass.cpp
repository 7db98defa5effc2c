#include "loader_pass.h"

#include <algorithm>
#include <exception>

#include "dispatch.h"
#include "hasten/base/error.h"

namespace hasten::detail {

RangeRandom::RangeRandom(at::Tensor& state)
    : state_(state),
      scope_(state.defined() ? GeneratorStates{GeneratorState(at::kCPU, state)}
                             : GeneratorStates()) {}

RangeRandom::~RangeRandom() {
  if (state_.defined()) {
    state_ = GeneratorState().tensor();
  }
}

std::optional<LoaderPass::GlobalBatch> LoaderPass::distribute() {
  std::vector<LoaderItem> taken = take_items();
  if (taken.empty()) {
    return std::nullopt;
  }
  ++global_batches_;
  GlobalBatch global_batch;
  if (options_.dispatch || options_.even) {
    next_item_ = read_range();
    global_batch.last = !next_item_.batch;
  }
  if (options_.split || (global_batch.last && is_short(taken))) {
    cut(taken, global_batch);
    return global_batch;
  }
  add_parts(global_batch, taken, [&](int64_t rank) {
    return rank < std::ssize(taken) ? taken[static_cast<size_t>(rank)] : LoaderItem{.batch = form_};
  });
  return global_batch;
}

// Once: the first batch with samples, for ranks that have none in its global batch.
AnyBatch LoaderPass::take_peer_batch(const std::vector<LoaderItem>& taken) {
  for (size_t i = 0; !peer_batch_taken_ && i < taken.size(); ++i) {
    if (taken[i].batch.has_rows()) {
      peer_batch_taken_ = true;
      return taken[i].batch;
    }
  }
  return {};
}

// Adds what `make` returns for each rank, or for this one.
void LoaderPass::add_parts(GlobalBatch& global_batch, const std::vector<LoaderItem>& taken,
                           const std::function<LoaderItem(int64_t rank)>& make) {
  const AnyBatch peer_batch = take_peer_batch(taken);
  for (int64_t rank = 0; rank < options_.world_size; ++rank) {
    if (options_.dispatch || rank == options_.rank) {
      LoaderItem& part = global_batch.parts.emplace_back(make(rank));
      part.position = taken.back().position;
      part.checksum = taken.back().checksum;
      part.peer_batch = part.batch.has_rows() ? AnyBatch() : peer_batch;
    }
  }
}

std::vector<LoaderItem> LoaderPass::take_items() {
  std::vector<LoaderItem> taken;
  const int wanted = options_.split ? 1 : options_.world_size;
  const bool keep_all = options_.dispatch || options_.even || options_.split;
  while (static_cast<int>(taken.size()) < wanted) {
    LoaderItem item = next_item_.batch ? std::exchange(next_item_, {}) : read_range();
    if (!item.batch) {
      break;
    }
    if (global_batches_ == 0 && taken.empty() && options_.world_size > 1) {
      form_ = item.batch.without_rows();
    }
    if (options_.even && global_batches_ == 0) {
      first_.push_back(item.batch.packed());
    }
    if (!keep_all && peer_batch_taken_ && static_cast<int>(taken.size()) != options_.rank) {
      item.batch = {}; // another rank's
    }
    taken.push_back(std::move(item));
  }
  return taken;
}

// True if the global batch has less for some rank than the first one had.
bool LoaderPass::is_short(const std::vector<LoaderItem>& taken) const {
  if (!options_.even) {
    return false;
  }
  int64_t rows = 0;
  for (const LoaderItem& item : taken) {
    rows += item.batch.rows().value_or(0);
  }
  return static_cast<int>(taken.size()) < options_.world_size ||
         rows < even_rows(first_, false, options_.world_size, false);
}

// Splits the batches into blocks, one for each rank; fills them up if the tail is to be even.
void LoaderPass::cut(const std::vector<LoaderItem>& taken, GlobalBatch& global_batch) {
  std::vector<PackedBatch> batches;
  for (const LoaderItem& item : taken) {
    batches.push_back(item.batch.packed());
  }
  PackedBatch joined = batches.size() == 1 ? batches.front() : packed_concat(batches);
  const int64_t real = joined.rows;
  const int64_t world = options_.world_size;
  if (options_.even) {
    const int64_t full =
        even_rows(first_, options_.split, world, global_batch.last && global_batches_ == 1);
    if (global_batch.last) {
      joined = packed_filled(std::move(joined), first_, full);
    }
  }
  add_parts(global_batch, taken, [&](int64_t rank) {
    const int64_t each = joined.rows / world, more = joined.rows % world;
    const int64_t begin = rank * each + std::min(rank, more);
    const int64_t count = each + (rank < more ? 1 : 0);
    return LoaderItem{.batch = taken.front().batch.with(packed_rows(joined, begin, count)),
                      .repeated = count - std::clamp<int64_t>(real - begin, 0, count)};
  });
}

LoaderPass::LoaderPass(AnyRange& range, const LoaderLink& link, const PassOptions& options)
    : range_(range),
      link_(link),
      options_(options),
      random_(options.random),
      sum_(options.compare ? 1 : 0) {
  if (options.dispatch && options.rank != 0) {
    return;
  }
  {
    const RangeRandom random(random_);
    range.begin();
  }
  for (int64_t i = 0; i < options.skip; ++i) {
    LoaderItem item = read_range();
    if (!item.batch) {
      break;
    }
    if (i == options.own && !options.split && !options.dispatch) {
      left_out_ = std::move(item.batch);
    }
  }
  if (options.prefetch > 0) { // then random values come from torch's generator, which threads share
    random_.reset();
  }
}

LoaderPass::~LoaderPass() {
  ahead_.reset(); // its thread reads
  range_.end();
}

// Reads a batch when it is called, never before.
LoaderItem LoaderPass::read_range() {
  const RangeRandom random(random_);
  LoaderItem item{.batch = range_.read()};
  if (item.batch) {
    ++reads_;
    item.repeated = range_.repeated();
    item.position = range_.cursor() < 0 ? reads_ : range_.cursor();
    if (sum_ != 0) {
      item.checksum = sum_ = item.batch.checksum(sum_) | 1;
    }
  }
  return item;
}

std::optional<LoaderItem> LoaderPass::next() {
  if (options_.dispatch) {
    return dispatched();
  }
  std::optional<GlobalBatch> global_batch = read();
  return global_batch ? std::optional(std::move(global_batch->parts.front())) : std::nullopt;
}

std::optional<LoaderPass::GlobalBatch> LoaderPass::read() {
  if (options_.prefetch > 0 && !ahead_) {
    ahead_.emplace([this] { return make(); }, options_.prefetch);
  }
  return ahead_ ? ahead_->next() : make();
}

std::optional<LoaderPass::GlobalBatch> LoaderPass::make() {
  std::optional<GlobalBatch> global_batch = distribute();
  if (global_batch && options_.pin) {
    for (LoaderItem& part : global_batch->parts) {
      part.batch.pin();
    }
  }
  return global_batch;
}

std::optional<LoaderItem> LoaderPass::dispatched() {
  if (std::exchange(ended_, true)) {
    return std::nullopt;
  }
  std::optional<LoaderItem> mine;
  DispatchedBatch sent;
  if (options_.rank == 0) {
    std::exception_ptr error;
    try {
      mine = pack_global_batch(sent);
    } catch (...) {
      error = std::current_exception();
      describe_failure(sent, error);
    }
    dispatch(link_.communicator(), &sent);
    if (error) {
      std::rethrow_exception(error);
    }
  } else {
    sent = dispatch(link_.communicator(), nullptr);
    if (const AnyBatch form = range_.form(); !sent.parts.empty()) {
      mine = LoaderItem{.batch = form.with(std::move(sent.parts.front())),
                        .repeated = sent.repeated.front(),
                        .position = sent.position};
      if (sent.parts.size() > 1) {
        mine->peer_batch = form.with(std::move(sent.parts.back()));
      }
      if (options_.pin) {
        mine->batch.pin();
      }
    }
  }
  ended_ = sent.last;
  return mine;
}

std::optional<LoaderItem> LoaderPass::pack_global_batch(DispatchedBatch& sent) {
  if (!range_.form()) {
    throw InputError("accelerator::PreparedLoader",
                     "dispatch_batches, and the type of the batches has no default constructor",
                     "a type with a default constructor, which the other ranks need",
                     "set dispatch_batches=false, or use a struct of Tensors");
  }
  std::optional<GlobalBatch> global_batch = read();
  sent.last = !global_batch || global_batch->last;
  if (!global_batch) {
    return std::nullopt;
  }
  for (const LoaderItem& part : global_batch->parts) {
    if (!part.batch) {
      throw_no_tensor_inside();
    }
    sent.parts.push_back(part.batch.packed());
    sent.repeated.push_back(part.repeated);
  }
  const auto has_peer_batch = [](const LoaderItem& part) { return bool(part.peer_batch); };
  if (const auto part = std::ranges::find_if(global_batch->parts, has_peer_batch);
      part != global_batch->parts.end()) {
    sent.parts.push_back(part->peer_batch.packed());
    sent.repeated.push_back(0);
  }
  sent.position = global_batch->parts.front().position;
  return std::move(global_batch->parts.front());
}

} // namespace hasten::detail
