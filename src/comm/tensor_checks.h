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

/// Throws InputError unless the tensor is defined, dense, contiguous and on the CPU.
void check_tensor(std::string_view operation, const at::Tensor& tensor);
/// Like check_tensor, and `op` must support the dtype.
void check_reducible(std::string_view operation, const at::Tensor& tensor, ReduceOp op);
/// `all` must have the shape of `one` with a dimension 0 of world_size in front.
void check_gathered(std::string_view operation, const at::Tensor& all, const at::Tensor& one,
                    int world_size);
/// For all_gather_rows: at least one dimension.
void check_rows(const at::Tensor& rows);
void check_exchanged(const at::Tensor& output, const at::Tensor& input, int world_size);
/// `output` must have as many elements as each rank's row of `input`.
void check_scattered(const at::Tensor& output, const at::Tensor& input, int world_size);
void check_root(std::string_view operation, int root, int world_size);
/// For gather and scatter: check_root, and on rank `root` check_gathered, elsewhere check_tensor.
void check_rooted(std::string_view operation, const at::Tensor& all, const at::Tensor& one,
                  int root, int rank, int world_size);
/// `ranks` must be ascending and include `rank`.
void check_members(const std::vector<int>& ranks, int rank, int world_size);

/// The bytes of a contiguous tensor, without a copy. Gloo can move any dtype this way.
at::Tensor bytes_of(const at::Tensor& tensor);
/// The bytes of each row of dimension 0.
std::vector<at::Tensor> rows_of(const at::Tensor& tensor);

} // namespace hasten::detail
