// What a tensor must be to take part in a collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <vector>

#include "hasten/comm/communicator.h"

namespace hasten::detail {

std::string_view reduce_op_name(ReduceOp op);

/// The operation as messages call it: all_reduce "ddp bucket 3".
std::string operation_label(std::string_view operation, std::string_view name);

/// "Float [3, 4]".
std::string tensor_text(const at::Tensor& tensor);
/// The same without dim 0.
std::string rows_text(const at::Tensor& tensor);

/// Throws InputError unless the tensor is defined, dense, contiguous and on the
/// CPU.
void check_tensor(std::string_view operation, const at::Tensor& tensor);
/// The same, and a dtype that `op` can reduce.
void check_reducible(std::string_view operation, const at::Tensor& tensor, ReduceOp op);
/// `all` has a row like `one` for each rank.
void check_gathered(std::string_view operation, const at::Tensor& all, const at::Tensor& one,
                    int world_size);
/// all_gather_rows' own: at least one dimension.
void check_rows(const at::Tensor& rows);
void check_exchanged(const at::Tensor& output, const at::Tensor& input, int world_size);
/// `output` is the sum of `input`'s rows of one rank.
void check_scattered(const at::Tensor& output, const at::Tensor& input, int world_size);
void check_root(std::string_view operation, int root, int world_size);
/// Ascending ranks of a group, `rank` among them.
void check_members(const std::vector<int>& ranks, int rank, int world_size);

/// The bytes of a contiguous tensor, without a copy: Gloo moves any dtype so.
at::Tensor bytes_of(const at::Tensor& tensor);
/// Those of each row.
std::vector<at::Tensor> rows_of(const at::Tensor& tensor);

} // namespace hasten::detail
