// The dtypes of safetensors files, in the order by which the reference writer sorts.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string_view>

namespace hasten::detail {

struct SafetensorsDtype {
  std::string_view name;
  at::ScalarType dtype;
};

// Ascending, as in the reference's enumeration.
inline constexpr std::array<SafetensorsDtype, 19> kSafetensorsDtypes = {{
    {"BOOL", at::kBool},
    {"U8", at::kByte},
    {"I8", at::kChar},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E8M0", at::kFloat8_e8m0fnu},
    {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
    {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
    {"I16", at::kShort},
    {"U16", at::kUInt16},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"I32", at::kInt},
    {"U32", at::kUInt32},
    {"F32", at::kFloat},
    {"C64", at::kComplexFloat},
    {"F64", at::kDouble},
    {"I64", at::kLong},
    {"U64", at::kUInt64},
}};

/// Index in the table; the table's size if the dtype is not in it.
constexpr size_t safetensors_dtype_rank(at::ScalarType dtype) {
  size_t rank = 0;
  while (rank < kSafetensorsDtypes.size() && kSafetensorsDtypes[rank].dtype != dtype) {
    ++rank;
  }
  return rank;
}

} // namespace hasten::detail
