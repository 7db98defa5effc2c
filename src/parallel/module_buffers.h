// A module's buffers over ranks: running statistics that are to be equal.
#pragma once

#include <torch/ordered_dict.h>

#include <string>

#include "hasten/parallel/ddp.h"

namespace hasten::detail {

// There are some that torch writes in a forward, and a policy that makes them equal.
// Equal on all ranks.
bool forward_writes(
    const FlatLayout::NamedParameters& buffers, BufferPolicy policy);

// One message per dtype. Collective, blocking.
void even_out_buffers(
    Communicator& communicator,
    const FlatLayout::NamedParameters& buffers,
    BufferPolicy policy,
    const DdpRanks& ranks);

// Defined tensors, each once, under its first name.
FlatLayout::NamedParameters unique_tensors(
    const torch::OrderedDict<std::string, at::Tensor>& named);

} // namespace hasten::detail
