// Checks the arguments of collectives.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <vector>

#include "hasten/comm/communicator.h"

namespace hasten::detail {

std::string_view reduce_op_name(ReduceOp op);

/// The operation's name in messages: all_reduce "ddp bucket 3".
std::string operation_label(std::string_view operation, std::string_view name);

/// "Float [3, 4]". `first`: the first dimension in the text.
std::string tensor_text(const at::Tensor& tensor, size_t first = 0);

/// Throws InputError if a tensor or rank of `what` is not possible in a group of `world_size`.
void check_collective(const Collective& what, int rank, int world_size);
/// `root` must be a rank of a group of `world_size`.
void check_root(std::string_view operation, int64_t root, int world_size);
/// Whether the rank gives data to the others or itself, and whether it has a result.
bool gives(const Collective& what, int rank);
bool gets(const Collective& what, int rank);
/// For all_gather_rows: at least one dimension.
void check_rows(const at::Tensor& rows);
/// `ranks` must be ascending and include `rank`.
void check_members(const std::vector<int>& ranks, int rank, int world_size);

/// The bytes of a contiguous tensor, without a copy. Gloo can move any dtype this way.
at::Tensor bytes_of(const at::Tensor& tensor);

} // namespace hasten::detail
