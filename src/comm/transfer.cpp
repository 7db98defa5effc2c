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

Transfer::Transfer(TransferPlan plan, int rank, int world_size)
    : plan_(std::move(plan)),
      rank_(rank),
      world_size_(world_size),
      from_size_(c10::elementSize(plan_.from)),
      to_size_(c10::elementSize(plan_.to)),
      text_hash_(XXH3_64bits(plan_.text.data(), plan_.text.size())) {
  if (plan_.values != nullptr) {
    rounds_ = kUnknown;
    return;
  }
  const auto ranks = static_cast<size_t>(world_size);
  const size_t widest = std::max(from_size_, to_size_);
  chunk_ = std::max<size_t>(Rounds::kMaximum / widest / (to_each() ? ranks : 1), 1);
  two_phases_ =
      plan_.kind == Kind::all_reduce && world_size > 2 && plan_.count * from_size_ > kTwoPhases;
  rounds_ = static_cast<uint32_t>(std::max<size_t>((plan_.count + chunk_ - 1) / chunk_, 1)) *
            (two_phases_ ? 2 : 1);
}

bool Transfer::to_each() const {
  return plan_.kind == Kind::scatter || plan_.kind == Kind::all_to_all ||
         plan_.kind == Kind::reduce_scatter;
}

bool Transfer::gives(int rank) const {
  return (plan_.kind != Kind::broadcast && plan_.kind != Kind::scatter) || rank == plan_.root;
}

Transfer::Part Transfer::chunk(uint32_t round) const {
  const size_t first = (two_phases_ ? round / 2 : round) * chunk_;
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
  if (follows(round)) {
    return slice(chunk(round), rank_).count * to_size_;
  }
  const size_t ranks = to_each() ? static_cast<size_t>(world_size_) : 1;
  return gives(rank_) ? chunk(round).count * from_size_ * ranks : 0;
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
  const Part part = chunk(round);
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
  if (precedes(round) || plan_.outputs.empty()) {
    return;
  }
  const Part part = chunk(round);
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
