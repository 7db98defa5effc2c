// Shards of tensors in a state's files.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "state_load.h"
#include "state_parts.h"

namespace hasten::detail {

// The shard that this rank holds of a parameter: rows [first, first + count) of dimension 0.
struct HeldRows {
  std::vector<int64_t> sizes{}; // of the whole tensor
  int64_t first = 0;
  int64_t count = 0;
};
// By the names of parameter_names(), every name of a tied one.
using HeldRowsByName = std::map<std::string, HeldRows>;

// Rows of the whole tensor. A 0-d tensor counts as one row.
at::Tensor rows_of_whole(const at::Tensor& whole, const HeldRows& held);

// Moves this rank's shards of parameters, and of tensors with their shape (moments), from
// parts.shared to parts.own, and records in parts.shared_values which rank has which rows.
// `models`: the shards of the models' parameters, by name. `ranks`: how many hold a replica
// together, the first ones; `writes`: this is one of them. Local.
void split_shards(StateParts& parts, const NamedTensors& models, const HeldRowsByName& held,
                  int ranks, bool writes);

// Puts into load.shared_tensors the rows that this rank holds now of every tensor that belongs to a
// parameter, from the file of any rank that has them, or from a whole tensor. Local. Throws
// InputError naming the file that is missing or has unexpected rows.
void join_shards(StateLoad& load, const HeldRowsByName& held);

} // namespace hasten::detail
