#include "transfer.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "hasten/base/text.h"
#include "reduce_rows.h"
#include "stages.h"
#include "tensor_checks.h"

namespace hasten::detail {

using Kind = Collective::Kind;

// More bytes are reduced in two phases, each rank a slice, if there are more than two ranks.
constexpr size_t kTwoPhases = 32 << 10;
constexpr size_t kValueHead = sizeof(uint64_t);
// Of data that is read in place. What a rank has just reduced the others find in the last cache.
constexpr size_t kDirectChunk = size_t{1} << 20; // bytes

Transfer::Transfer(TransferArguments arguments, int rank, int world_size, SharedPlaces& places)
    : arguments_(std::move(arguments)),
      kind_(arguments_.what.kind),
      rank_(rank),
      world_size_(world_size),
      places_(places),
      text_hash_(XXH3_64bits(arguments_.text.data(), arguments_.text.size())) {
  arguments_.what.name = {}; // the caller's
  if (arguments_.values != nullptr) {
    way_ = Way::asked;
    const std::string& own = (*arguments_.values)[static_cast<size_t>(rank_)];
    const uint64_t size = own.size();
    value_.assign(reinterpret_cast<const char*>(&size), kValueHead).append(own);
    return;
  }
  find_rows();
  const bool scatters = kind_ == Kind::reduce_scatter;
  const bool may_be_direct = kind_ == Kind::all_reduce || kind_ == Kind::all_gather || scatters;
  const size_t rows = scatters ? static_cast<size_t>(world_size_) : 1;
  if (may_be_direct && count_ * from_size_ * rows >= kLeastShared) {
    way_ = Way::asked;
    openings_ = 1;
  } else {
    count_stages();
  }
}

void Transfer::find_rows() {
  const Collective& what = arguments_.what;
  std::vector<at::Tensor>&inputs = arguments_.inputs, &outputs = arguments_.outputs;
  if (inputs.empty() && outputs.empty()) {
    const auto rows = [](const at::Tensor& tensor, bool all) {
      return all ? tensor.detach().unbind() : std::vector<at::Tensor>{tensor};
    };
    if (gives(what, rank_)) {
      inputs = rows(kind_ <= Kind::broadcast ? what.output : what.input, to_each());
    }
    if (gets(what, rank_)) {
      outputs = rows(what.output, kind_ == Kind::all_gather || kind_ == Kind::gather ||
                                      kind_ == Kind::all_to_all);
    }
  }
  const at::Tensor& one = inputs.empty() ? outputs[0] : inputs[0];
  count_ = static_cast<size_t>(one.numel());
  if (kind_ == Kind::all_reduce || kind_ == Kind::reduce || kind_ == Kind::reduce_scatter) {
    from_ = one.scalar_type();
    to_ = (outputs.empty() ? inputs[0] : outputs[0]).scalar_type();
    from_size_ = c10::elementSize(from_);
    to_size_ = c10::elementSize(to_);
  } else { // moves bytes
    count_ *= one.element_size();
  }
  const auto begin = [](const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); };
  inputs_ = mapped(inputs, begin);
  outputs_ = mapped(outputs, begin);
}

std::optional<SharedPlace> Transfer::place() const {
  for (size_t i = 1; i < inputs_.size(); ++i) {
    if (inputs_[i] != inputs_[0] + i * count_ * from_size_) { // rows of several tensors
      return std::nullopt;
    }
  }
  return find_shared(inputs_[0]);
}

void Transfer::release() {
  arguments_.what = {};
  arguments_.inputs.clear();
  arguments_.outputs.clear();
}

void Transfer::count_stages() {
  const auto ranks = static_cast<size_t>(world_size_);
  const bool sums = kind_ == Kind::all_reduce;
  if (is_direct()) {
    chunk_ = sums ? kDirectChunk / from_size_ : count_;
  } else {
    const size_t widest = std::max(from_size_, to_size_);
    chunk_ = std::max<size_t>(Stages::kMaximum / widest / (to_each() ? ranks : 1), 1);
    two_phases_ = sums && world_size_ > 2 && count_ * from_size_ > kTwoPhases;
  }
  const auto chunks = static_cast<uint32_t>(std::max<size_t>((count_ + chunk_ - 1) / chunk_, 1));
  stages_ = openings_ + chunks * (two_phases_ ? 2 : 1) + (is_direct() && sums ? 1 : 0);
}

bool Transfer::to_each() const {
  return kind_ == Kind::scatter || kind_ == Kind::all_to_all || kind_ == Kind::reduce_scatter;
}

Transfer::Part Transfer::chunk(uint32_t step) const {
  const size_t first = (two_phases_ ? step / 2 : step) * chunk_;
  return {first, std::min(chunk_, count_ - first)};
}

Transfer::Part Transfer::slice(const Part& chunk, int rank) const {
  const auto ranks = static_cast<size_t>(world_size_);
  const size_t begin = chunk.count * static_cast<size_t>(rank) / ranks;
  const size_t end = chunk.count * static_cast<size_t>(rank + 1) / ranks;
  return {chunk.first + begin, end - begin};
}

size_t Transfer::bytes(uint32_t stage) const {
  if (arguments_.values != nullptr) {
    return std::min(value_.size() - value_begin(stage), Stages::kMaximum);
  }
  if (stage < openings_) {
    return stage == 0 ? sizeof(SharedPlaces::Opening) : 1;
  }
  if (is_direct()) {
    return 0;
  }
  const Part part = chunk(stage - openings_);
  if (follows(stage)) {
    return slice(part, rank_).count * to_size_;
  }
  const size_t ranks = to_each() ? static_cast<size_t>(world_size_) : 1;
  return gives(arguments_.what, rank_) ? part.count * from_size_ * ranks : 0;
}

size_t Transfer::most_bytes() const {
  const size_t rows = to_each() ? static_cast<size_t>(world_size_) : 1;
  return arguments_.values != nullptr ? Stages::kMaximum
                                      : (count_ * from_size_ * rows + 63) / 64 * 64;
}

/// `skip`: bytes of a payload before the part.
void Transfer::reduce(const Payloads& payloads, size_t skip, const Part& part, char* to) const {
  Payloads rows = payloads;
  for (const char*& row : rows) {
    row += skip;
  }
  const auto own = static_cast<size_t>(rank_);
  rows[own] = inputs_[to_each() ? own : 0] + part.first * from_size_;
  reduce_rows(arguments_.what.op, from_, rows, to_, to, part.count);
}

// If each rank reduces a slice of a chunk, the others read it when all have reduced theirs. So nobody
// reads and writes the same bytes of a tensor at once.
void Transfer::publish(uint32_t stage, char* to, const Payloads& before) {
  if (arguments_.values != nullptr) {
    value_.copy(to, Stages::kMaximum, value_begin(stage));
    return;
  }
  if (stage < openings_) {
    if (stage == 0) {
      places_.write(place(), to);
    } else {
      *to = places_.map() ? 1 : 0;
    }
    return;
  }
  if (closes(stage)) {
    return;
  }
  const Part part = chunk(stage - openings_);
  const Part own = slice(part, rank_);
  const size_t size = part.count * from_size_;
  if (is_direct()) {
    if (kind_ == Kind::all_reduce) {
      reduce(data_, own.first * from_size_, own, outputs_[0] + own.first * to_size_);
    } else {
      take(part, data_);
    }
    const size_t readers = kind_ == Kind::reduce_scatter ? data_.size() - 1 : 1;
    Stages::bytes_published += static_cast<int64_t>(size * readers);
    return;
  }
  if (follows(stage)) {
    reduce(before, (own.first - part.first) * from_size_, own, to);
    return;
  }
  if (!gives(arguments_.what, rank_) || part.count == 0) {
    return;
  }
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (!to_each() || std::cmp_not_equal(i, rank_)) { // it has its own
      std::memcpy(to + i * size, inputs_[i] + part.first * from_size_, size);
    }
  }
}

void Transfer::consume(uint32_t stage, const Payloads& payloads) {
  if (arguments_.values != nullptr) {
    consume_values(stage, payloads);
  } else if (stage < openings_) {
    read_openings(stage, payloads);
  } else if (!is_direct()) {
    if (!precedes(stage)) {
      take(chunk(stage - openings_), payloads);
    }
  } else if (kind_ == Kind::all_reduce && !closes(stage)) {
    take(chunk(stage - openings_), data_);
  }
}

void Transfer::take(const Part& part, const Payloads& payloads) {
  if (outputs_.empty() || part.count == 0) { // an empty tensor has no address
    return;
  }
  const auto own = static_cast<size_t>(rank_);
  const auto root = static_cast<size_t>(arguments_.what.root);
  const size_t size = part.count * from_size_;
  const auto output = [&](size_t i) { return outputs_[i] + part.first * to_size_; };
  const auto put = [](char* to, const char* from, size_t bytes) {
    if (to != from) { // a rank's input may be its row of the output
      std::memmove(to, from, bytes);
    }
  };
  switch (kind_) {
    case Kind::all_reduce:
    case Kind::reduce:
      if (!two_phases_ && !is_direct()) {
        reduce(payloads, 0, part, output(0));
        return;
      }
      for (size_t i = 0; i < payloads.size(); ++i) {
        const Part piece = slice(part, static_cast<int>(i));
        put(outputs_[0] + piece.first * to_size_,
            payloads[i] + (is_direct() ? piece.first * from_size_ : 0), piece.count * to_size_);
      }
      return;
    case Kind::reduce_scatter:
      reduce(payloads, own * size, part, output(0));
      return;
    case Kind::broadcast:
      if (own != root) {
        put(output(0), payloads[root], size);
      }
      return;
    case Kind::scatter:
      put(output(0),
          own == root ? inputs_[own] + part.first * from_size_ : payloads[root] + own * size, size);
      return;
    case Kind::all_gather:
    case Kind::gather:
    case Kind::all_to_all:
      for (size_t i = 0; i < payloads.size(); ++i) {
        put(output(i),
            i == own ? inputs_[to_each() ? i : 0] + part.first * from_size_
                     : payloads[i] + (to_each() ? own * size : 0),
            size);
      }
  }
}

void Transfer::read_openings(uint32_t stage, const Payloads& payloads) {
  way_ = stage == 0 ? places_.read(payloads) : places_.settle(payloads);
  if (way_ == Way::asked) {
    stages_ = ++openings_;
    return;
  }
  if (is_direct()) {
    data_ = places_.data();
    data_[static_cast<size_t>(rank_)] = inputs_[0];
  }
  count_stages();
}

size_t Transfer::value_begin(uint32_t stage) const {
  return std::min(value_.size(), stage * Stages::kMaximum);
}

void Transfer::consume_values(uint32_t stage, const Payloads& payloads) {
  const size_t head = stage == 0 ? kValueHead : 0;
  if (stage == 0) {
    size_t longest = 0;
    for (const char* payload : payloads) {
      uint64_t size = 0;
      std::memcpy(&size, payload, kValueHead);
      sizes_.push_back(size);
      longest = std::max<size_t>(longest, size);
    }
    way_ = Way::copied;
    stages_ =
        static_cast<uint32_t>((longest + kValueHead + Stages::kMaximum - 1) / Stages::kMaximum);
  }
  for (size_t i = 0; i < payloads.size(); ++i) {
    if (std::cmp_not_equal(i, rank_)) { // it has its own
      std::string& value = (*arguments_.values)[i];
      value.append(payloads[i] + head, std::min(Stages::kMaximum - head, sizes_[i] - value.size()));
    }
  }
}

} // namespace hasten::detail
