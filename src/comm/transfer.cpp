#include "transfer.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "reduce_rows.h"
#include "rounds.h"

namespace hasten::detail {

using Kind = Collective::Kind;

// More bytes are reduced in two phases, each rank a slice, if there are more than two ranks.
constexpr size_t kTwoPhases = 32 << 10;
constexpr size_t kValueHead = sizeof(uint64_t);
// Of data that is read in place. What a rank has just reduced the others find in the last cache.
constexpr size_t kDirectChunk = size_t{1} << 20; // bytes

Transfer::Transfer(TransferPlan plan, int rank, int world_size)
    : plan_(std::move(plan)),
      rank_(rank),
      world_size_(world_size),
      from_size_(c10::elementSize(plan_.from)),
      to_size_(c10::elementSize(plan_.to)),
      text_hash_(XXH3_64bits(plan_.text.data(), plan_.text.size())) {
  if (plan_.values != nullptr || plan_.places != nullptr) {
    open_ = true;
    openings_ = plan_.values == nullptr ? 1 : 0;
    return;
  }
  count_rounds();
}

void Transfer::count_rounds() {
  const auto ranks = static_cast<size_t>(world_size_);
  const size_t widest = std::max(from_size_, to_size_);
  chunk_ = std::max<size_t>(Rounds::kMaximum / widest / (to_each() ? ranks : 1), 1);
  two_phases_ = !direct_ && plan_.kind == Kind::all_reduce && world_size_ > 2 &&
                plan_.count * from_size_ > kTwoPhases;
  if (direct_) {
    chunk_ = plan_.kind == Kind::all_reduce ? kDirectChunk / from_size_ : plan_.count;
  }
  const auto chunks =
      static_cast<uint32_t>(std::max<size_t>((plan_.count + chunk_ - 1) / chunk_, 1));
  closes_ = direct_ && plan_.kind == Kind::all_reduce; // others end with the round of their reads
  rounds_ = openings_ + chunks * (two_phases_ ? 2 : 1) + (closes_ ? 1 : 0);
  open_ = false;
}

bool Transfer::to_each() const {
  return plan_.kind == Kind::scatter || plan_.kind == Kind::all_to_all ||
         plan_.kind == Kind::reduce_scatter;
}

bool Transfer::gives(int rank) const {
  return (plan_.kind != Kind::broadcast && plan_.kind != Kind::scatter) || rank == plan_.root;
}

Transfer::Part Transfer::chunk(uint32_t step) const {
  const size_t first = (two_phases_ ? step / 2 : step) * chunk_;
  return {first, std::min(chunk_, plan_.count - first)};
}

Transfer::Part Transfer::slice(const Part& chunk, int rank) const {
  const auto ranks = static_cast<size_t>(world_size_);
  const size_t begin = chunk.count * static_cast<size_t>(rank) / ranks;
  const size_t end = chunk.count * static_cast<size_t>(rank + 1) / ranks;
  return {chunk.first + begin, end - begin};
}

size_t Transfer::bytes(uint32_t round) const {
  if (plan_.values != nullptr) {
    return (round == 0 ? kValueHead : 0) + value_end(round) - value_begin(round);
  }
  if (round < openings_) {
    return round == 0 ? sizeof(SharedPlaces::Opening) : 1;
  }
  if (direct_) {
    return 0;
  }
  const Part part = chunk(round - openings_);
  if (follows(round)) {
    return slice(part, rank_).count * to_size_;
  }
  const size_t ranks = to_each() ? static_cast<size_t>(world_size_) : 1;
  return gives(rank_) ? part.count * from_size_ * ranks : 0;
}

/// `skip`: bytes of a payload before the part.
void Transfer::reduce(const Payloads& payloads, size_t skip, const Part& part, char* to) const {
  Payloads rows = payloads;
  for (const char*& row : rows) {
    row += skip;
  }
  const auto own = static_cast<size_t>(rank_);
  rows[own] = plan_.inputs[to_each() ? own : 0] + part.first * from_size_;
  reduce_rows(plan_.op, plan_.from, rows, plan_.to, to, part.count);
}

void Transfer::publish(uint32_t round, char* to, const Payloads& before) {
  if (plan_.values != nullptr) {
    publish_values(round, to);
    return;
  }
  if (round < openings_) {
    if (round == 0) {
      plan_.places->write(plan_.place, to);
    } else {
      *to = could_map_ ? 1 : 0;
    }
    return;
  }
  if (direct_) {
    publish_direct(round - openings_);
    return;
  }
  const Part part = chunk(round - openings_);
  if (follows(round)) {
    const Part own = slice(part, rank_);
    reduce(before, (own.first - part.first) * from_size_, own, to);
    return;
  }
  if (!gives(rank_) || part.count == 0) {
    return;
  }
  const size_t size = part.count * from_size_;
  for (size_t i = 0; i < plan_.inputs.size(); ++i) {
    if (!to_each() || std::cmp_not_equal(i, rank_)) { // it has its own
      std::memcpy(to + i * size, plan_.inputs[i] + part.first * from_size_, size);
    }
  }
}

void Transfer::consume(uint32_t round, const Payloads& payloads) {
  if (plan_.values != nullptr) {
    consume_values(round, payloads);
    return;
  }
  if (round < openings_) {
    read_openings(round, payloads);
    return;
  }
  if (direct_) {
    consume_direct(round - openings_);
    return;
  }
  if (precedes(round) || plan_.outputs.empty()) {
    return;
  }
  const Part part = chunk(round - openings_);
  if (part.count == 0) { // an empty tensor has no address
    return;
  }
  const auto own = static_cast<size_t>(rank_);
  const size_t size = part.count * from_size_;
  const auto output = [&](size_t i) { return plan_.outputs[i] + part.first * to_size_; };
  const auto put = [&](size_t i, const char* from) {
    if (output(i) != from) { // a rank's input may be its row of the output
      std::memmove(output(i), from, size);
    }
  };
  switch (plan_.kind) {
    case Kind::all_reduce:
    case Kind::reduce:
      if (!two_phases_) {
        reduce(payloads, 0, part, output(0));
        return;
      }
      for (int i = 0; i < world_size_; ++i) {
        const Part piece = slice(part, i);
        std::memcpy(plan_.outputs[0] + piece.first * to_size_, payloads[static_cast<size_t>(i)],
                    piece.count * to_size_);
      }
      return;
    case Kind::reduce_scatter:
      reduce(payloads, own * size, part, output(0));
      return;
    case Kind::broadcast:
      if (rank_ != plan_.root) {
        put(0, payloads[static_cast<size_t>(plan_.root)]);
      }
      return;
    case Kind::scatter:
      put(0, rank_ == plan_.root ? plan_.inputs[own] + part.first * from_size_
                                 : payloads[static_cast<size_t>(plan_.root)] + own * size);
      return;
    case Kind::all_gather:
    case Kind::gather:
    case Kind::all_to_all:
      for (size_t i = 0; i < payloads.size(); ++i) {
        put(i, i == own ? plan_.inputs[to_each() ? i : 0] + part.first * from_size_
                        : payloads[i] + (to_each() ? own * size : 0));
      }
  }
}

void Transfer::read_openings(uint32_t round, const Payloads& payloads) {
  using Way = SharedPlaces::Way;
  const Way way = round == 0 ? plan_.places->read(payloads) : plan_.places->settle(payloads);
  if (way == Way::asked) {
    could_map_ = plan_.places->map();
    rounds_ = ++openings_;
    return;
  }
  direct_ = way == Way::direct;
  if (direct_) {
    data_ = plan_.places->data();
    data_[static_cast<size_t>(rank_)] = plan_.inputs[0];
  }
  count_rounds();
}

// The tensor of an all_reduce: each rank writes its slice of a chunk, which the others read when all
// have reduced theirs. So nobody reads and writes the same bytes at once.
void Transfer::publish_direct(uint32_t step) {
  const auto own = static_cast<size_t>(rank_);
  const Part part = chunk(step);
  if (closes_) {
    if (!closes(step + openings_)) {
      const Part piece = slice(part, rank_);
      reduce(data_, piece.first * from_size_, piece, plan_.outputs[0] + piece.first * to_size_);
      Rounds::count_bytes(part.count * from_size_);
    }
  } else if (plan_.kind == Kind::reduce_scatter) {
    reduce(data_, own * part.count * from_size_, part, plan_.outputs[0]);
    Rounds::count_bytes(part.count * from_size_ * (data_.size() - 1));
  } else {
    for (size_t i = 0; i < data_.size(); ++i) {
      const char* const from = i == own ? plan_.inputs[0] : data_[i];
      if (plan_.outputs[i] != from) {
        std::memcpy(plan_.outputs[i], from, part.count * from_size_);
      }
    }
    Rounds::count_bytes(part.count * from_size_);
  }
}

void Transfer::consume_direct(uint32_t step) {
  if (!closes_ || closes(step + openings_)) {
    return;
  }
  const Part part = chunk(step);
  for (int i = 0; i < world_size_; ++i) {
    const Part piece = slice(part, i);
    if (i != rank_) {
      std::memcpy(plan_.outputs[0] + piece.first * to_size_,
                  data_[static_cast<size_t>(i)] + piece.first * from_size_, piece.count * to_size_);
    }
  }
}

/// The first round has the number of bytes, too.
size_t Transfer::value_begin(uint32_t round) const {
  return round == 0 ? 0 : std::min(own_value().size(), round * Rounds::kMaximum - kValueHead);
}

size_t Transfer::value_end(uint32_t round) const {
  return std::min(own_value().size(), (round + 1) * Rounds::kMaximum - kValueHead);
}

void Transfer::publish_values(uint32_t round, char* to) const {
  if (round == 0) {
    const uint64_t size = own_value().size();
    std::memcpy(to, &size, kValueHead);
    to += kValueHead;
  }
  const size_t begin = value_begin(round);
  std::memcpy(to, own_value().data() + begin, value_end(round) - begin);
}

void Transfer::consume_values(uint32_t round, const Payloads& payloads) {
  if (round == 0) {
    size_t longest = 0;
    for (const char* payload : payloads) {
      uint64_t size = 0;
      std::memcpy(&size, payload, kValueHead);
      sizes_.push_back(size);
      longest = std::max<size_t>(longest, size);
    }
    open_ = false;
    rounds_ = static_cast<uint32_t>(
        std::max<size_t>((longest + kValueHead + Rounds::kMaximum - 1) / Rounds::kMaximum, 1));
  }
  for (size_t i = 0; i < payloads.size(); ++i) {
    if (std::cmp_equal(i, rank_)) {
      continue; // it has its own
    }
    std::string& value = (*plan_.values)[i];
    const size_t room = Rounds::kMaximum - (round == 0 ? kValueHead : 0);
    value.append(payloads[i] + (round == 0 ? kValueHead : 0),
                 std::min(room, sizes_[i] - value.size()));
  }
}

} // namespace hasten::detail
