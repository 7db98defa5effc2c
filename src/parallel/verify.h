// Comparing lists of tensors over ranks before anything is sent; memory for them, and
// their first values.
#pragma once

#include <ATen/core/Tensor.h>

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "hasten/comm/communicator.h"
#include "hasten/flat/flat_layout.h"

namespace hasten::detail {

// From here on a tensor is sent by itself, in place; smaller ones together: an operation
// of its own costs about as much as copying as many bytes. Bytes.
constexpr int64_t kTravelsAlone = 256 << 10;

// Shape and dtype; of a parameter, whether it is frozen.
std::string describe_tensor(const at::Tensor& tensor, bool parameter);

// How the elements lie, where that is not row by row; empty where it is. A
// dimension of size 1 has no say.
std::string describe_strides(const at::Tensor& tensor);

// `mine` is an array of [name, description]; the same on all ranks, or every rank
// throws an InputError of `where` that names the first entry that differs from
// rank 0's: "rank 1's model has …" for subject "model". Collective, blocking.
void require_equal_lists(Communicator& communicator, const nlohmann::json& mine, const char* where,
                         const std::string& subject, const char* expected, const char* fix);

// Deferred tensors get memory, and their values where those are what all ranks get.
void materialize_start(const FlatLayout::NamedParameters& tensors, bool with_values);

// Rank 0's values on every rank, blocking: the same shapes and dtypes everywhere, any
// dtype, contiguous or not. Small tensors travel together; memory: a copy of those.
// `what` is the operations' name, one for all, so that what is of one shape is
// compared over the ranks once.
void broadcast_tensors(Communicator& communicator, const FlatLayout::NamedParameters& tensors,
                       const std::string& what);

// A replica on every rank: the same model everywhere, with rank 0's values. Collective.
void verify_and_broadcast(Communicator& communicator, const FlatLayout::NamedParameters& parameters,
                          const FlatLayout::NamedParameters& buffers);

} // namespace hasten::detail
