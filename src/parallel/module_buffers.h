// A module's buffers over ranks: running statistics that are to be equal.
#pragma once

#include <torch/ordered_dict.h>

#include <string>
#include <vector>

#include "hasten/parallel/ddp.h"

namespace hasten::detail {

// There are some that torch writes in a forward, or, with `any_dtype`, any, and a
// policy that makes them equal. Equal on all ranks.
bool to_even_out(const FlatLayout::NamedParameters& buffers, BufferPolicy policy, bool any_dtype);

// Another list once one was written by torch's operations. [buffer]
std::vector<uint32_t> versions_of(const FlatLayout::NamedParameters& buffers);

// One message per dtype. Collective, blocking.
void even_out_buffers(Communicator& communicator, const FlatLayout::NamedParameters& buffers,
                      BufferPolicy policy, const DdpRanks& ranks);

// Defined tensors, each once, under its first name.
FlatLayout::NamedParameters unique_tensors(
    const torch::OrderedDict<std::string, at::Tensor>& named);

} // namespace hasten::detail
