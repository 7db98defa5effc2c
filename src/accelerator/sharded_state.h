// Tensors of which each rank holds rows, in a state's files.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "accelerator_state.h"
#include "state_load.h"

namespace hasten {
class DataParallel;
class FullyShard;
} // namespace hasten

namespace hasten::detail {

// What this rank holds of a parameter: rows [first, first + count) of dim 0.
struct HeldRows {
  std::vector<int64_t> sizes{}; // of the whole
  int64_t first = 0;
  int64_t count = 0;
};
// By the names of parameter_names(), every name of a tied one.
using HeldRowsByName = std::map<std::string, HeldRows>;

// Of the whole tensor. A 0-d tensor is one row.
at::Tensor rows_of_whole(const at::Tensor& whole, const HeldRows& held);

// Moves what is this rank's part of a parameter, or like one (a moment), from
// parts.shared into parts.own, and notes in parts.shared_values which rank has which
// rows. `models`: the shards of the models' parameters, by name. `ranks`: that hold a
// copy together, the first ones; `writes`: this is one of them. Local.
void split_shards(StateParts& parts, const NamedTensors& models, const HeldRowsByName& held,
                  int ranks, bool writes);

// Gives load.shared_tensors the rows that this rank holds now of every tensor that is
// like a parameter, from whichever rank's file has them, or from a whole one. Local.
// Throws InputError naming the file that is missing or has other rows than it should.
void join_shards(StateLoad& load, const HeldRowsByName& held);

} // namespace hasten::detail
