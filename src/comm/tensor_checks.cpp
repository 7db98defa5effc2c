#include "tensor_checks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <sstream>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/base/text.h"

namespace hasten::detail {

std::string_view reduce_op_name(ReduceOp op) {
  return op == ReduceOp::SUM   ? "sum"
         : op == ReduceOp::AVG ? "mean"
         : op == ReduceOp::MAX ? "max"
         : op == ReduceOp::MIN ? "min"
                               : "product";
}

std::string operation_label(std::string_view operation, std::string_view name) {
  std::string label(operation);
  label.append(" \"").append(name).append("\"");
  return label;
}

std::string tensor_text(const at::Tensor& tensor, size_t first) {
  std::ostringstream text;
  text << tensor.scalar_type() << ' ' << tensor.sizes().slice(first);
  return text.str();
}

/// Throws unless the tensor is defined, dense and contiguous.
static void check_tensor(std::string_view operation, const at::Tensor& tensor) {
  const std::string where = "comm::" + std::string(operation);
  if (!tensor.defined()) {
    throw InputError(where, "the tensor is undefined", "a tensor with data");
  }
  if (tensor.layout() != at::kStrided || tensor.is_meta()) {
    std::ostringstream text;
    text << "layout=" << tensor.layout() << ", device=" << tensor.device();
    throw InputError(where, text.str(), "a dense tensor with data");
  }
  if (!tensor.is_contiguous()) {
    std::ostringstream text;
    text << "the tensor is not contiguous: sizes=" << tensor.sizes()
         << ", strides=" << tensor.strides();
    throw InputError(where, text.str(), "contiguous data", "call .contiguous()");
  }
}

/// Like check_tensor, and `op` must support the dtype.
static void check_reducible(std::string_view operation, const at::Tensor& tensor, ReduceOp op) {
  check_tensor(operation, tensor);
  const at::ScalarType type = tensor.scalar_type();
  const bool floating =
      type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
  const bool integer =
      type == at::kLong || type == at::kInt || type == at::kChar || type == at::kByte;
  if (!floating && !(integer && op != ReduceOp::AVG)) {
    throw InputError(
        "comm::" + std::string(operation),
        "cannot take the " + std::string(reduce_op_name(op)) + " of dtype=" + c10::toString(type),
        "float, double, half or bfloat16; for all but AVG also int64, int32, int8 or uint8",
        "convert the tensor first");
  }
}

/// `all` must have the shape of `one` with a dimension 0 of world_size in front.
static void check_gathered(std::string_view operation, const at::Tensor& all, const at::Tensor& one,
                           int world_size) {
  check_tensor(operation, one);
  check_tensor(operation, all);
  std::vector<int64_t> sizes = one.sizes().vec();
  sizes.insert(sizes.begin(), world_size);
  if (all.sizes() != at::IntArrayRef(sizes) || all.scalar_type() != one.scalar_type()) {
    const bool scatter = operation == "scatter";
    std::ostringstream expected;
    expected << one.scalar_type() << ' ' << at::IntArrayRef(sizes);
    throw InputError("comm::" + std::string(operation),
                     std::string(scatter ? "input is " : "output is ") + tensor_text(all) +
                         (scatter ? " for an output " : " for an input ") + tensor_text(one),
                     expected.str());
  }
}

/// all_to_all and reduce_scatter.
static void check_exchanged(const Collective& what, int world_size) {
  const at::Tensor &input = what.input, &output = what.output;
  check_tensor(what.kind_name(), input);
  check_tensor(what.kind_name(), output);
  const bool reduces = what.kind == Collective::Kind::reduce_scatter;
  const bool fits =
      reduces
          ? output.numel() * world_size == input.numel() &&
                at::isFloatingType(input.scalar_type()) && at::isFloatingType(output.scalar_type())
          : output.sizes() == input.sizes() && output.scalar_type() == input.scalar_type();
  if (input.dim() == 0 || input.size(0) != world_size || !fits) {
    const std::string ranks = " one row for each of " + std::to_string(world_size) + " ranks";
    throw InputError(
        "comm::" + std::string(what.kind_name()),
        "output is " + tensor_text(output) + " for an input " + tensor_text(input),
        reduces ? "floating-point tensors: an input with" + ranks + ", an output of one row"
                : "two tensors of the same shape and dtype, with" + ranks);
  }
}

void check_rows(const at::Tensor& rows) {
  check_tensor("all_gather_rows", rows);
  if (rows.dim() == 0) {
    throw InputError("comm::all_gather_rows", "the tensor has no dimension",
                     "a tensor with a dimension 0", "call .unsqueeze(0)");
  }
}

void check_members(const std::vector<int>& ranks, int rank, int world_size) {
  if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end() && ranks.front() >= 0 &&
      ranks.back() < world_size &&
      std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end()) {
    return;
  }
  const auto list = mapped(ranks, [](int member) { return std::to_string(member); });
  throw InputError("comm::new_group", "ranks=" + joined(list),
                   "ascending ranks from 0 to " + std::to_string(world_size - 1) + ", this rank " +
                       std::to_string(rank) + " among them");
}

void check_root(std::string_view operation, int64_t root, int world_size) {
  if (root < 0 || root >= world_size) {
    throw InputError(
        "comm::" + std::string(operation),
        "no such rank: " + std::string(operation == "broadcast" ? "source=" : "root=") +
            std::to_string(root),
        "0 to " + std::to_string(world_size - 1));
  }
}

void check_collective(const Collective& what, int rank, int world_size) {
  using Kind = Collective::Kind;
  const std::string_view name = what.kind_name();
  switch (what.kind) {
    case Kind::all_reduce:
    case Kind::reduce:
      check_reducible(name, what.output, what.op);
      break;
    case Kind::broadcast:
      check_tensor(name, what.output);
      break;
    case Kind::all_gather:
      check_gathered(name, what.output, what.input, world_size);
      break;
    case Kind::all_to_all:
    case Kind::reduce_scatter:
      check_exchanged(what, world_size);
      break;
    case Kind::gather:
    case Kind::scatter:
      if (rank != what.root) {
        check_tensor(name, what.shared());
      } else {
        const at::Tensor& all = what.kind == Kind::gather ? what.output : what.input;
        check_gathered(name, all, what.shared(), world_size);
      }
  }
  check_root(name, what.root, world_size);
  if (what.input.defined() && what.output.defined() &&
      what.input.device() != what.output.device()) {
    throw InputError(
        "comm::" + std::string(name),
        "input is on " + what.input.device().str() + ", output on " + what.output.device().str(),
        "tensors of one device");
  }
}

bool gives(const Collective& what, int rank) {
  using Kind = Collective::Kind;
  return (what.kind != Kind::broadcast && what.kind != Kind::scatter) || rank == what.root;
}

bool gets(const Collective& what, int rank) {
  using Kind = Collective::Kind;
  return what.kind == Kind::broadcast
             ? rank != what.root
             : (what.kind != Kind::reduce && what.kind != Kind::gather) || rank == what.root;
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  // A dimension of size 1 may have any stride; view() would keep it.
  return tensor.detach().as_strided({tensor.numel()}, {1}).view(at::kByte);
}

} // namespace hasten::detail
