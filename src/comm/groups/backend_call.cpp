#include "backend_call.h"

#include <ATen/ATen.h>

#include <utility>

#include "hasten/base/text.h"
#include "hasten/core/memory.h"
#include "shm/transfer_queue.h"
#include "tensor_checks.h"

namespace hasten::detail {

using Kind = Collective::Kind;

std::string collective_text(const Collective& what) {
  const bool reduces = what.kind == Kind::all_reduce || what.kind == Kind::reduce;
  const char* root = what.kind == Kind::reduce || what.kind == Kind::gather       ? " to rank "
                     : what.kind == Kind::broadcast || what.kind == Kind::scatter ? " from rank "
                                                                                  : nullptr;
  return (reduces ? std::string(reduce_op_name(what.op)) + " of " : "") +
         tensor_text(what.shared()) + (root != nullptr ? root + std::to_string(what.root) : "");
}

OperationFailure current_failure() {
  try {
    throw;
  } catch (const RanksDiffer& differ) {
    return {differ.what(), ErrorKind::other, true};
  } catch (const std::exception& caught) {
    const std::string text = caught.what(); // Gloo has no class for a time-out
    const bool timed_out = text.find("Timed out") != std::string::npos;
    return {text, timed_out ? ErrorKind::timed_out : error_kind(caught)};
  } catch (...) {
    return {"unknown error"};
  }
}

void complete(GroupCore::Started& state, const std::exception_ptr& error) {
  try {
    if (error) {
      std::rethrow_exception(error);
    }
    state.complete(std::nullopt);
  } catch (...) {
    state.complete(current_failure());
  }
}

c10d::ReduceOp::RedOpType c10d_op(ReduceOp op) {
  return op == ReduceOp::SUM   ? c10d::ReduceOp::SUM
         : op == ReduceOp::AVG ? c10d::ReduceOp::AVG
         : op == ReduceOp::MAX ? c10d::ReduceOp::MAX
         : op == ReduceOp::MIN ? c10d::ReduceOp::MIN
                               : c10d::ReduceOp::PRODUCT;
}

BackendCall::BackendCall(const Collective& what, int rank, int world_size, bool sums_narrow)
    : what_(what), root_(what.root == rank) {
  what_.name = {};
  if (what.kind == Kind::all_reduce || what.kind == Kind::reduce) {
    const at::Tensor target = what.output.detach();
    const bool keep = what.kind == Kind::all_reduce || root_;
    const bool adds = what.op != ReduceOp::MAX && what.op != ReduceOp::MIN;
    const bool wide = !sums_narrow && adds && target.element_size() == 2;
    // A reduce may write to all ranks, and may read a rank's tensor after the return.
    own_.push_back(wide ? target.to(at::kFloat) : keep ? target : target.clone());
    const bool divides = what.op == ReduceOp::AVG;
    what_.op = divides ? ReduceOp::SUM : what.op;
    if (keep && (divides || wide)) {
      finish = [target, reduced = own_[0], wide, divisor = divides ? world_size : 1] {
        if (divisor != 1) {
          reduced.div_(divisor);
        }
        if (wide) {
          target.copy_(reduced);
        }
      };
    }
    return;
  }
  own_.push_back(what.kind == Kind::reduce_scatter ? what.input.detach().view({-1})
                                                   : bytes_of(what.shared()));
  if (root_ && (what.kind == Kind::gather || what.kind == Kind::scatter)) {
    const at::Tensor& all = what.kind == Kind::gather ? what.output : what.input;
    rows_.push_back(mapped(all.unbind(), bytes_of));
  } else if (what.kind == Kind::reduce_scatter) {
    to_ = what.output.detach().view({-1});
  } else if (what.kind == Kind::all_gather || what.kind == Kind::all_to_all) {
    to_ = bytes_of(what.output);
  }
}

c10::intrusive_ptr<c10d::Work> BackendCall::start(c10d::Backend& backend) {
  std::vector<int64_t> even;
  switch (what_.kind) {
    case Kind::all_reduce:
      return backend.allreduce(own_, {.reduceOp = c10d_op(what_.op)});
    case Kind::reduce:
      return backend.reduce(own_, {.reduceOp = c10d_op(what_.op), .rootRank = what_.root});
    case Kind::broadcast:
      return backend.broadcast(own_, {.rootRank = what_.root});
    case Kind::gather: // Gloo fills one flat buffer and copies from it when its work ends
      return backend.gather(rows_, own_, {.rootRank = what_.root});
    case Kind::scatter:
      return backend.scatter(own_, rows_, {.rootRank = what_.root});
    case Kind::all_to_all:
      return backend.alltoall_base(to_, own_[0], even, even, {});
    case Kind::reduce_scatter:
      return backend._reduce_scatter_base(to_, own_[0], {});
    case Kind::all_gather:
      break;
  }
  return backend._allgather_base(to_, own_[0], {});
}

} // namespace hasten::detail
