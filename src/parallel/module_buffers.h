// Synchronising a module's buffers (running statistics) over ranks.
#pragma once

#include <torch/ordered_dict.h>

#include <string>
#include <vector>

#include "hasten/parallel/ddp.h"

namespace hasten::detail {

// True if `policy` is not `off` and there are floating-point buffers, which torch writes in a
// forward; with `any_dtype` any buffers. Equal on all ranks.
bool to_even_out(const FlatLayout::NamedParameters& buffers, BroadcastBuffers policy,
                 bool any_dtype);

// Version counters [buffer]; they change when torch's operators write a buffer.
std::vector<uint32_t> versions_of(const FlatLayout::NamedParameters& buffers);

// One message per dtype. Collective, blocking.
void even_out_buffers(Communicator& communicator, const FlatLayout::NamedParameters& buffers,
                      BroadcastBuffers policy, const DdpRanks& ranks);

// The defined tensors, each once, under its first name.
FlatLayout::NamedParameters unique_tensors(
    const torch::OrderedDict<std::string, at::Tensor>& named);

// A parameter of the module that is none of `known`: code has put it in place of one of them.
// Empty: there is none.
std::string replaced_parameter(const torch::nn::Module& module,
                               const FlatLayout::NamedParameters& known);

} // namespace hasten::detail
