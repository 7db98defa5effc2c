// Adds, multiplies or compares the contributions of all ranks, in rank order.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <vector>

#include "hasten/comm/communicator.h"

namespace hasten::detail {

/// Whether reduce_rows() has the dtype: the real ones of at least 16 bits, and int8, uint8 and bool.
bool is_reducible(c10::ScalarType type);

/// output[i] = op over all ranks of rows[rank][i], in rank order. half and bfloat16 in fp32, rounded
/// once; where the dtypes differ, in the wider one. AVG divides the sum by the number of rows.
/// A maximum or minimum with a NaN is NaN. The sum of bools is whether any is true. `output` may
/// be one of the rows. The dtypes are equal, or both are floating-point.
void reduce_rows(ReduceOp op, c10::ScalarType from, const std::vector<const char*>& rows,
                 c10::ScalarType to, char* output, size_t count);

/// output[i] = row[i] / divisor, rounded once. The row is double if `to` is, else float, and `output`
/// may be the row.
void divide_row(const char* row, int divisor, c10::ScalarType to, char* output, size_t count);

} // namespace hasten::detail
