// Compares lists of tensors over ranks before anything is sent, allocates deferred tensors, and
// broadcasts initial values.
#pragma once

#include <ATen/core/Tensor.h>

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "hasten/comm/communicator.h"
#include "hasten/flat/flat_layout.h"

namespace hasten::detail {

// Tensors of this many bytes or more are sent alone and in place. Smaller ones are sent together,
// because an operation costs about as much as copying this many bytes.
constexpr int64_t kTravelsAlone = 256 << 10;

// Shape and dtype; for a parameter also whether it is frozen.
std::string describe_tensor(const at::Tensor& tensor, bool parameter);

// The strides, if the tensor is not contiguous; otherwise empty. Dimensions of size 1 are ignored.
std::string describe_strides(const at::Tensor& tensor);

// `mine` is an array of [name, description]. If it differs between ranks, every rank throws an
// InputError of `where` that names the first entry that differs from rank 0's: "rank 1's model has
// …" for subject "model". Collective, blocking.
void require_equal_lists(Communicator& communicator, const nlohmann::json& mine, const char* where,
                         const std::string& subject, const char* expected, const char* fix);

// Allocates deferred tensors; `with_values` (on rank 0) also computes their values. Moves them.
void materialize_start(const FlatLayout::NamedParameters& tensors, bool with_values,
                       const std::optional<at::Device>& device = {});

// Broadcasts rank 0's values, blocking. Shapes and dtypes must be equal on all ranks; any dtype,
// contiguous or not. Small tensors are sent together; memory: a copy of those. `what` names all
// operations, so that the ranks compare each shape only once.
void broadcast_tensors(Communicator& communicator, const FlatLayout::NamedParameters& tensors,
                       const std::string& what);

// A replica on every rank: the same model everywhere, with rank 0's values. Collective.
void verify_and_broadcast(Communicator& communicator, const FlatLayout::NamedParameters& parameters,
                          const FlatLayout::NamedParameters& buffers);

} // namespace hasten::detail
