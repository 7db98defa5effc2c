// A group's operations on tensors. Each is checked on this rank, compared between ranks if it is
// new to the group, and passed to Gloo.
#include <ATen/ATen.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "gloo_group.h"
#include "hasten/comm/few_sizes.h"
#include "hasten/core/memory.h"
#include "tensor_checks.h"

namespace hasten::detail {

/// The failure in an exception of Gloo, which has no class for a time-out.
static OperationFailure gloo_failure(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    const std::string text = caught.what();
    const bool timed_out = text.find("Timed out") != std::string::npos;
    return {text, timed_out ? ErrorKind::timed_out : error_kind(caught)};
  } catch (...) {
    return {"unknown error"};
  }
}

Work GlooGroup::submit(std::string operation, const std::string& tensors, const Start& start,
                       std::function<void()> finish) {
  const uint64_t sequence = core_->enter_equal(operation, tensors);
  const c10::intrusive_ptr<c10d::Backend> gloo = core_->connections();
  auto state = std::make_shared<GroupCore::Started>(core_, std::move(operation), sequence,
                                                    std::move(finish));
  try {
    // c10d's own timed wait throws whenever its time ends.
    start(*gloo)->getFuture()->addCallback([state](c10::ivalue::Future& f) {
      state->complete(f.hasError() ? std::optional(gloo_failure(f.exception_ptr())) : std::nullopt);
    });
  } catch (...) {
    state->complete(gloo_failure(std::current_exception()));
  }
  return Work(std::move(state));
}

/// The operation's tensors in messages.
static std::string text_of(const Collective& what) {
  using Kind = Collective::Kind;
  const bool reduces = what.kind == Kind::all_reduce || what.kind == Kind::reduce;
  const bool to = what.kind == Kind::reduce || what.kind == Kind::gather;
  const bool from = what.kind == Kind::broadcast || what.kind == Kind::scatter;
  return (reduces ? std::string(reduce_op_name(what.op)) + " of " : "") +
         tensor_text(what.shared()) +
         (to     ? " to rank "
          : from ? " from rank "
                 : "") +
         (to || from ? std::to_string(what.root) : "");
}

Work GlooGroup::start_reduction(const Collective& what) {
  const at::Tensor target = what.output.detach();
  const bool to_all = what.kind == Collective::Kind::all_reduce;
  const bool keep = to_all || what.root == rank();
  const bool adds = what.op != ReduceOp::MAX && what.op != ReduceOp::MIN;
  const bool widen = adds && target.element_size() == 2;
  std::vector<at::Tensor> buffer{widen  ? target.to(at::kFloat)
                                 : keep ? target
                                        : target.clone()}; // Gloo's reduce writes to all ranks
  const double divisor = what.op == ReduceOp::AVG ? world_size() : 1;
  const c10d::ReduceOp op = what.op == ReduceOp::MAX       ? c10d::ReduceOp::MAX
                            : what.op == ReduceOp::MIN     ? c10d::ReduceOp::MIN
                            : what.op == ReduceOp::PRODUCT ? c10d::ReduceOp::PRODUCT
                                                           : c10d::ReduceOp::SUM;
  return submit(
      operation_label(what.kind_name(), what.name), text_of(what),
      [&](c10d::Backend& gloo) {
        return to_all ? gloo.allreduce(buffer, {.reduceOp = op})
                      : gloo.reduce(buffer, {.reduceOp = op, .rootRank = what.root});
      },
      [target, reduced = buffer[0], widen, divisor, keep] {
        if (keep && divisor != 1) {
          reduced.div_(divisor);
        }
        if (keep && widen) {
          target.copy_(reduced);
        }
      });
}

/// Gloo moves host memory only, so the tensors of another device go through copies there.
Work GlooGroup::start_staged(const Collective& what) {
  using Kind = Collective::Kind;
  const bool root = what.root == rank();
  const bool reduces = what.kind == Kind::all_reduce || what.kind == Kind::reduce;
  const bool reads = reduces || (what.kind == Kind::broadcast && root); // the output
  const bool writes = what.kind == Kind::broadcast                             ? !root
                      : what.kind == Kind::reduce || what.kind == Kind::gather ? root
                                                                               : true;
  Collective staged = what;
  staged.output = reads    ? what.output.detach().cpu()
                  : writes ? at::empty_like(what.output, at::kCPU)
                           : at::Tensor();
  staged.input = what.input.defined() && (root || what.kind != Kind::scatter)
                     ? what.input.detach().cpu()
                     : at::Tensor();
  return continued(start(staged),
                   [to = writes ? what.output.detach() : at::Tensor(), from = staged.output] {
                     if (to.defined()) {
                       to.copy_(from);
                     }
                   });
}

Work GlooGroup::start(const Collective& what) {
  using Kind = Collective::Kind;
  check_collective(what, rank(), world_size());
  if (what.kind == Kind::reduce_scatter) {
    return reduce_scatter_by_all_to_all(what);
  }
  if (!what.shared().is_cpu()) {
    return start_staged(what);
  }
  if (what.kind == Kind::all_reduce || what.kind == Kind::reduce) {
    return start_reduction(what);
  }
  const auto start = [&](c10d::Backend& gloo) {
    std::vector<at::Tensor> own{bytes_of(what.shared())};
    std::vector<std::vector<at::Tensor>> rows; // of the root
    if (what.root == rank() && (what.kind == Kind::gather || what.kind == Kind::scatter)) {
      rows.push_back(rows_of(what.kind == Kind::gather ? what.output : what.input));
    }
    at::Tensor to;
    std::vector<int64_t> even;
    switch (what.kind) {
      case Kind::broadcast:
        return gloo.broadcast(own, {.rootRank = what.root});
      case Kind::gather: // Gloo fills one flat buffer and copies from it when its work ends
        return gloo.gather(rows, own, {.rootRank = what.root});
      case Kind::scatter:
        return gloo.scatter(own, rows, {.rootRank = what.root});
      case Kind::all_to_all:
        to = bytes_of(what.output);
        return gloo.alltoall_base(to, own[0], even, even, {});
      default:
        to = bytes_of(what.output);
        return gloo._allgather_base(to, own[0], {});
    }
  };
  return submit(operation_label(what.kind_name(), what.name), text_of(what), start);
}

void GlooGroup::barrier(std::string_view name) {
  std::vector<at::Tensor> token{at::ones({1}, at::kInt)};
  submit(operation_label("barrier", name), "", [&](c10d::Backend& gloo) {
    return gloo.allreduce(token, {});
  }).wait();
}

std::vector<nlohmann::json> GlooGroup::exchange(std::string_view operation, std::string_view name,
                                                const nlohmann::json& value) {
  const std::string label = operation_label(operation, name);
  return core_->exchange(label, core_->enter(label), value);
}

at::Tensor GlooGroup::all_gather_rows(const at::Tensor& rows, std::string_view name) {
  check_rows(rows);
  // The number of rows and a hash of their form in one small tensor, without the store.
  const std::string row_text = "rows of " + tensor_text(rows, 1);
  const auto form = static_cast<int64_t>(std::hash<std::string>{}(row_text));
  const at::Tensor own = at::tensor({rows.size(0), form}, at::kLong);
  const at::Tensor all = at::empty({world_size(), 2}, at::kLong);
  all_gather_async(all, own, std::string(name) + ", rows").wait();
  if (!all.select(1, 1).eq(form).all().item<bool>()) {
    const std::string operation = operation_label("all_gather_rows", name);
    core_->check_equal(operation, core_->enter(operation), row_text);
  }
  const at::Tensor counts = all.select(1, 0); // [rank]
  const int64_t longest = few_sizes(counts.max().item<int64_t>());
  at::Tensor padded = rows.detach();
  if (rows.size(0) < longest) {
    std::vector<int64_t> sizes = rows.sizes().vec();
    sizes[0] = longest;
    padded = at::zeros(sizes, rows.options());
    padded.narrow(0, 0, rows.size(0)).copy_(rows.detach());
  }
  std::vector<int64_t> sizes = padded.sizes().vec();
  sizes.insert(sizes.begin(), world_size());
  const at::Tensor gathered = at::empty(sizes, padded.options());
  all_gather_async(gathered, padded, name).wait();
  std::vector<at::Tensor> parts;
  for (int i = 0; i < world_size(); ++i) {
    parts.push_back(gathered[i].narrow(0, 0, counts[i].item<int64_t>()));
  }
  return at::cat(parts);
}

} // namespace hasten::detail
