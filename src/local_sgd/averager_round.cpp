// A round: snapshot, reduce, vote, commit.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_set>

#include "averager_impl.h"
#include "hasten/base/error.h"
#include "hasten/core/side_stream.h"

namespace hasten {

namespace detail {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

} // namespace detail

// Tensors of the open round, or all.
void Averager::Impl::stage_in() {
  std::unordered_set<at::Device> sources;
  for (Entry& entry : entries) {
    if (entry.staging.defined() && (!round.open || takes_part(entry.fragment))) {
      entry.staging.copy_(entry.tensor, /*non_blocking=*/true);
      sources.insert(entry.tensor.device());
    }
  }
  for (const at::Device& device : sources) {
    detail::current_stream(device).synchronize();
  }
}

void Averager::Impl::stage_out() {
  for (Entry& entry : entries) {
    if (!takes_part(entry.fragment)) {
      continue;
    }
    if (entry.staging.defined()) {
      entry.tensor.copy_(entry.staging, /*non_blocking=*/true);
    } else {
      entry.tensor.unsafeGetTensorImpl()->bump_version(); // written by address
    }
  }
}

void Averager::Impl::begin(double weight, double learning_rate, int64_t fragment, bool later) {
  constexpr const char* where = "parallel::Averager";
  if (round.open) {
    throw InputError(where, "a synchronisation has started and is not finished",
                     "finish() before the next one");
  }
  if (!std::isfinite(weight) || weight < 0) {
    throw InputError(where, "weight=" + std::to_string(weight), "a finite number, 0 or above");
  }
  if (fragment != kAll && (fragment < 0 || fragment >= fragment_count)) {
    throw InputError(where, "fragment=" + std::to_string(fragment),
                     "below " + std::to_string(fragment_count));
  }
  if (later && !options.transactional) {
    throw InputError(where, "start() with transactional=false", "transactional=true");
  }
  check_tensors();
  settle_spread();
  at::NoGradGuard no_grad;
  const auto start = Clock::now();
  round = {};
  round.open = true;
  round.corrects = later;
  round.fragment = fragment;
  round.learning_rate = learning_rate;
  stage_in();
  round.ranks = communicator->world_size();
  const bool alone = round.ranks == 1;
  round.weight = alone ? 1 : weight;
  round.total = alone ? 1 : -1;
  if (!options.transactional && !alone) {
    const at::Tensor total = at::full({1}, weight, at::kDouble);
    communicator->all_reduce(total, ReduceOp::SUM, "weights of an average");
    round.total = total.item<double>();
  }
  const bool nothing = round.total == 0 || (alone && !has_anchor());
  for (size_t i = 0; i < all_slices.size() && !nothing; ++i) {
    if (takes_part(all_slices[i].fragment)) {
      load(all_slices[i]);
      launch(i);
    }
  }
  round.seconds += detail::seconds_since(start);
}

// Note [Snapshot]
// The buffer gets weight * x. With a hook it gets weight * (x - a), where a is the anchor, because
// compression loses less of small values.
void Averager::Impl::load(const Slice& slice) {
  const auto start = Clock::now();
  Group& group = groups[slice.group];
  if (round.corrects && !group.snapshot.defined()) {
    group.snapshot = at::empty_like(group.buffer);
  }
  for_pieces(slice, [&](const Entry& entry, char* data, int64_t offset, int64_t count) {
    if (slice.direct) {
      if (round.weight != 1) {
        detail::load_elements(data, entry.dtype, data, count, round.weight);
      }
      return;
    }
    const bool plain = !round.corrects && !options.comm_hook;
    char* buffer = address(group.buffer, offset);
    detail::load_elements(data, entry.dtype, buffer, count, plain ? round.weight : 1);
    if (round.corrects) {
      std::memcpy(address(group.snapshot, offset), buffer,
                  static_cast<size_t>(count * group.buffer.element_size()));
    }
  });
  if (!slice.direct && (round.corrects || options.comm_hook)) {
    at::Tensor range = range_of(group.buffer, slice);
    if (options.comm_hook) {
      range.sub_(range_of(group.anchor, slice));
    }
    if (round.weight != 1) {
      range.mul_(round.weight);
    }
  }
  round.copy_seconds += detail::seconds_since(start);
}

void Averager::Impl::launch(size_t index) {
  if (communicator->world_size() == 1) {
    return;
  }
  const Slice& slice = all_slices[index];
  Operation operation;
  operation.slice = index;
  const at::Tensor& first = entries[static_cast<size_t>(slice.pieces[0].tensor)].tensor;
  operation.range = slice.direct
                        ? first.as_strided({slice.count}, {1}, first.storage_offset() + slice.begin)
                        : range_of(groups[slice.group].buffer, slice);
  if (options.comm_hook) {
    GradientBucket bucket;
    bucket.index = static_cast<int64_t>(index);
    bucket.last = index + 1 == all_slices.size();
    bucket.buffer = operation.range;
    int64_t offset = 0;
    for (const Piece& piece : slice.pieces) {
      const Entry& entry = entries[static_cast<size_t>(piece.tensor)];
      bucket.gradients.push_back(
          {entry.name, operation.range.narrow(0, offset, piece.count).view(entry.sizes)});
      offset += piece.count;
    }
    operation.step = options.comm_hook->reduce(*communicator, bucket);
  } else if (drives()) {
    if (communicator->rank() == 0) {
      operation.gathered =
          at::empty({communicator->world_size(), slice.count}, operation.range.options());
    }
    operation.handle = communicator->gather_async(operation.gathered, operation.range, 0,
                                                  "average slice " + std::to_string(index));
  } else {
    operation.handle =
        communicator->all_reduce_async(operation.range, means() ? ReduceOp::AVG : ReduceOp::SUM,
                                       "average slice " + std::to_string(index));
  }
  round.operations.push_back(std::move(operation));
}

void Averager::Impl::await_data() {
  for (bool more = true; more;) { // hooks: calls each slice in turn
    more = false;
    for (Operation& operation : round.operations) {
      if (operation.step && !operation.step()) {
        operation.step = nullptr;
      }
      more = more || operation.step;
    }
  }
  for (Operation& operation : round.operations) {
    operation.handle.wait();
    if (operation.gathered.defined()) { // in rank order
      operation.range.copy_(operation.gathered[0]);
      for (int64_t rank = 1; rank < operation.gathered.size(0); ++rank) {
        operation.range.add_(operation.gathered[rank]);
      }
      operation.gathered = at::Tensor();
    }
  }
}

// Note [Driver]
// Rank 0 has the sum and, from the vote, the sum of weights. It computes the update and sends the
// parameters to all. A second vote makes sure that all have them.
void Averager::Impl::drive() {
  for (Group& group : groups) {
    if (options.outer) {
      group.anchor_before = group.anchor.clone();
    }
  }
  // Not round.operations, because a round loaded from a state has none.
  if (communicator->rank() == 0) {
    for (const Slice& slice : open_slices()) {
      range_of(groups[slice.group].buffer, slice).div_(round.total);
    }
    if (options.outer) {
      outer_steps();
    }
  }
  std::vector<Work> handles;
  round.whole = false;
  for (const Slice& slice : open_slices()) {
    const Group& group = groups[slice.group];
    at::Tensor parameters = range_of(group.buffer, slice);
    if (options.outer && communicator->rank() == 0) {
      parameters.copy_(range_of(group.anchor, slice));
    }
    handles.push_back(communicator->broadcast_async(parameters, 0, "parameters of the driver"));
  }
  for (Work& handle : handles) {
    handle.wait();
  }
  if (options.outer && communicator->rank() != 0) {
    for (const Slice& slice : open_slices()) {
      const Group& group = groups[slice.group];
      range_of(group.anchor, slice).copy_(range_of(group.buffer, slice));
    }
  }
  round.whole = true;
  vote();
}

// Note [Vote]
// A rank that votes has the complete sum. No rank commits before all have it: the vote is a sum
// over all ranks, which completes on no rank until every rank has contributed. If a peer dies
// before the vote, every rank keeps its own values. If it dies during the vote, each rank has
// either its own values or the mean, in all tensors. The vote also gives the sum of weights, and
// it detects ranks in different rounds: numbers are equal on all ranks if and only if the square
// of their sum equals the ranks times the sum of their squares (Cauchy, Schwarz). They are below
// 2^16, so the sums are exact in fp64 over a million ranks.
void Averager::Impl::vote() {
  if (communicator->world_size() == 1) {
    return;
  }
  const auto number = static_cast<double>(report.round % 65536);
  const auto part = static_cast<double>((round.fragment + 1) % 65536);
  ballot = at::tensor({round.weight, number, number * number, part, part * part}, at::kDouble);
  communicator->all_reduce(ballot, ReduceOp::SUM, "vote on an average");
  const double* sums = ballot.const_data_ptr<double>();
  const int ranks = communicator->world_size();
  if (sums[1] * sums[1] != ranks * sums[2] || sums[3] * sums[3] != ranks * sums[4]) {
    throw CommunicationError("parallel::Averager",
                             "ranks are in different synchronisations: this one in number " +
                                 std::to_string(report.round + 1),
                             "the same synchronisations on every rank",
                             "look for a branch around average() that depends on the rank");
  }
  round.total = sums[0];
}

void Averager::Impl::complete() {
  at::NoGradGuard no_grad;
  const auto start = Clock::now();
  if (options.transactional) {
    await_data();
    round.whole = true;
    vote();
    if (driven() && round.total > 0) {
      drive();
    }
    commit();
  } else {
    commit_direct();
  }
  round.seconds += detail::seconds_since(start);
  end_round();
}

void Averager::Impl::end_round() {
  report.bytes = bytes_of_round();
  report.seconds = round.seconds;
  report.copy_seconds = round.copy_seconds;
  ++report.round;
  last_total = round.total;
  dropped = false;
  round.open = false;
  round.operations.clear();
  for (Group& group : groups) {
    group.anchor_before = at::Tensor();
  }
}

void Averager::Impl::commit() {
  report.weight = round.total;
  const bool anchored = has_anchor() && !driven();
  // The driver has already divided.
  const double total = driven() && round.total > 0 ? 1 : round.total;
  if (total == 0 || (round.ranks == 1 && !anchored)) {
    send_spread({}, false); // nothing changes
    if (round.ranks == 1 && options.measure_spread) {
      report.spread = 0; // this rank is the mean
    }
    return;
  }
  const auto start = Clock::now();
  if (anchored) {
    step_outer();
  }
  if (round.corrects) { // training went on since start()
    stage_in();
  }
  detail::PassSums sums;
  // With an outer step only the driver had the mean, and has overwritten it.
  const bool measurable = options.measure_spread && !(driven() && options.outer);
  const bool measure = measurable && !anchored && !round.corrects;
  for (const Slice& slice : open_slices()) {
    Group& group = groups[slice.group];
    for_pieces(slice, [&](const Entry& entry, char* data, int64_t offset, int64_t count) {
      char* mean = address(anchored ? group.anchor : group.buffer, offset);
      if (round.corrects) {
        if (!anchored) {
          detail::divide_elements(mean, group.dtype, count, total);
        }
        if (measurable && !anchored) {
          sums +=
              detail::measure_elements(address(group.snapshot, offset), group.dtype, mean, count);
        }
        if (options.alpha) {
          detail::mix_elements(data, entry.dtype, mean, *options.alpha, count);
        } else {
          detail::correct_elements(data, entry.dtype, mean, address(group.snapshot, offset), count);
        }
        return;
      }
      sums += detail::store_elements(data, entry.dtype, mean, count, anchored ? 1 : total, measure);
    });
  }
  stage_out();
  round.copy_seconds += detail::seconds_since(start);
  if (!anchored) {
    send_spread(sums, measurable);
  }
}

// Computes the new anchor from the mean by the outer step; with a hook the mean is the old anchor
// plus the mean change. The spread is that of the ranks' values before the outer step.
void Averager::Impl::step_outer() {
  detail::PassSums sums;
  for (const Slice& slice : open_slices()) {
    Group& group = groups[slice.group];
    at::Tensor mean = range_of(group.buffer, slice);
    mean.div_(round.total);
    if (options.comm_hook) {
      mean.add_(range_of(group.anchor, slice));
    }
    if (options.measure_spread) {
      for_pieces(slice, [&](const Entry& entry, char* data, int64_t offset, int64_t count) {
        sums += detail::measure_elements(round.corrects ? address(group.snapshot, offset) : data,
                                         round.corrects ? group.dtype : entry.dtype,
                                         address(group.buffer, offset), count);
      });
    }
    if (!options.outer) {
      range_of(group.anchor, slice).copy_(mean);
    }
  }
  if (options.outer) {
    outer_steps();
  }
  send_spread(sums, options.measure_spread);
}

// One piece for each fragment and group, in every round.
void Averager::Impl::outer_steps() {
  for (size_t g = 0; g < groups.size(); ++g) {
    for (int64_t f = 0; f < fragment_count; ++f) {
      int64_t from = -1;
      int64_t to = 0;
      for (const Slice& slice : open_slices()) {
        if (slice.group == g && slice.fragment == f) {
          from = from < 0 ? slice.begin : from;
          to = slice.begin + slice.count;
        }
      }
      if (from >= 0) {
        options.outer->step(f * std::ssize(groups) + static_cast<int64_t>(g),
                            groups[g].anchor.narrow(0, from, to - from),
                            groups[g].buffer.narrow(0, from, to - from), round.learning_rate);
      }
    }
  }
}

// In place: each slice is final as soon as it has arrived. If a peer dies, partial sums remain.
void Averager::Impl::commit_direct() {
  report.weight = round.total;
  report.spread = report.norm = std::numeric_limits<double>::quiet_NaN();
  const double divisor = means() ? 1 : round.total;
  for (Operation& operation : round.operations) {
    operation.handle.wait();
    const Slice& slice = all_slices[operation.slice];
    if (slice.direct && divisor == 1) {
      continue; // it has the mean
    }
    const auto start = Clock::now();
    for_pieces(slice, [&](const Entry& entry, char* data, int64_t offset, int64_t count) {
      if (slice.direct) {
        detail::divide_elements(data, entry.dtype, count, divisor);
      } else {
        detail::store_elements(data, entry.dtype, address(groups[slice.group].buffer, offset),
                               count, divisor, false);
      }
    });
    round.copy_seconds += detail::seconds_since(start);
  }
  stage_out();
}

// Does not wait: report() reads the result. All have voted, so the round counts on every rank, also
// if a peer is lost here: report() and the next round throw that.
void Averager::Impl::send_spread(const detail::PassSums& sums, bool measured) {
  report.spread = report.norm = std::numeric_limits<double>::quiet_NaN();
  if (!measured || recovering) {
    return;
  }
  report.norm = std::sqrt(sums.norm);
  report.spread = 0;
  spread = at::full({1}, sums.difference, at::kDouble);
  if (communicator->world_size() == 1) {
    return;
  }
  try {
    spread_handle = communicator->all_reduce_async(spread, ReduceOp::SUM, "spread of an average");
  } catch (const CommunicationError&) {
    spread_error = std::current_exception();
  }
}

void Averager::Impl::settle_spread() {
  if (!spread.defined()) {
    return;
  }
  if (spread_error) {
    std::rethrow_exception(spread_error);
  }
  spread_handle.wait();
  report.spread = std::sqrt(spread.item<double>() / communicator->world_size());
  forget_spread();
}

void Averager::Impl::forget_spread() {
  spread = at::Tensor();
  spread_handle = {};
  spread_error = nullptr;
}

int64_t Averager::Impl::bytes_of_round() const {
  const double n = round.ranks;
  double bytes = 0;
  for (const Slice& slice : open_slices()) {
    const at::ScalarType dtype = groups[slice.group].dtype;
    bytes +=
        static_cast<double>(slice.count) * (options.comm_hook && dtype == at::kFloat
                                                ? options.comm_hook->bytes_per_number()
                                                : static_cast<double>(c10::elementSize(dtype)));
  }
  if (drives()) { // rank 0 sends to all, the others to rank 0
    return static_cast<int64_t>(n == 1 ? 0 : communicator->rank() == 0 ? (n - 1) * bytes : bytes);
  }
  return static_cast<int64_t>(2 * (n - 1) / n * bytes);
}

// Note [Recovery]
// If a vote succeeded on one rank, every rank had entered it, each with the complete sum. So if
// one of the remaining ranks has committed, the others need only the sum of weights, which that
// rank sends. If none has committed, none can have gone beyond the vote, and all drop the round.
// Two ranks are never more than one vote apart.
RoundOutcome Averager::Impl::recover(std::shared_ptr<Communicator> remaining) {
  constexpr const char* where = "parallel::Averager";
  if (!options.transactional) {
    throw InputError(where, "recover() with transactional=false",
                     "transactional=true, because the interrupted round has left partial sums");
  }
  communicator = remaining ? std::move(remaining) : communicator;
  const auto all = communicator->all_gather_object(
      {{"rounds", report.round}, {"total", last_total}, {"unsettled", round.open || dropped}},
      "progress of an average");
  int64_t most = report.round;
  double total = 0;
  for (const auto& rank : all) {
    if (rank.at("rounds") >= most) {
      most = rank.at("rounds");
      total = rank.at("total");
    }
  }
  bool drop = false;
  for (const auto& rank : all) {
    drop = drop || (rank.at("rounds") == most && rank.at("unsettled"));
  }
  forget_spread();
  report.spread = std::numeric_limits<double>::quiet_NaN();
  RoundOutcome outcome = RoundOutcome::none;
  if (report.round < most) {
    if (!round.open || !round.whole || report.round + 1 < most || total < 0) {
      throw CommunicationError(where,
                               "this rank has done " + std::to_string(report.round) +
                                   " synchronisations, another one " + std::to_string(most),
                               "ranks in the same synchronisation",
                               "call recover() on all remaining ranks");
    }
    at::NoGradGuard no_grad;
    round.total = total;
    recovering = true;
    commit();
    recovering = false;
    end_round();
    outcome = RoundOutcome::committed;
  } else if (drop) {
    drop_round();
    outcome = RoundOutcome::dropped;
  }
  // An earlier operation may still write into the old buffers.
  make_buffers();
  if (options.comm_hook) {
    options.comm_hook->reset();
  }
  return outcome;
}

void Averager::Impl::drop_round() {
  at::NoGradGuard no_grad;
  round = {};
  dropped = true;
  bool stepped = false;
  for (Group& group : groups) {
    if (group.anchor_before.defined()) {
      group.anchor.copy_(group.anchor_before);
      group.anchor_before = at::Tensor();
      stepped = true;
    }
  }
  if (stepped) { // its momentum has already changed
    options.outer->load_state({}, nlohmann::json::object());
  }
}

} // namespace hasten
