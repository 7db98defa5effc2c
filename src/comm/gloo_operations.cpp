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

static std::string to_rank(int root) { return " to rank " + std::to_string(root); }
static std::string from_rank(int root) { return " from rank " + std::to_string(root); }

Work GlooGroup::reduce_to(std::optional<int> root, std::string operation, const at::Tensor& tensor,
                          ReduceOp op) {
  const at::Tensor target = tensor.detach();
  const bool keep = root.value_or(rank()) == rank();
  const bool adds = op != ReduceOp::MAX && op != ReduceOp::MIN;
  const bool widen = adds && target.element_size() == 2;
  std::vector<at::Tensor> buffer{widen  ? target.to(at::kFloat)
                                 : keep ? target
                                        : target.clone()}; // Gloo's reduce writes to all ranks
  const double divisor = op == ReduceOp::AVG ? world_size() : 1;
  const c10d::ReduceOp gloo_op = op == ReduceOp::MAX       ? c10d::ReduceOp::MAX
                                 : op == ReduceOp::MIN     ? c10d::ReduceOp::MIN
                                 : op == ReduceOp::PRODUCT ? c10d::ReduceOp::PRODUCT
                                                           : c10d::ReduceOp::SUM;
  return submit(
      std::move(operation),
      std::string(reduce_op_name(op)) + " of " + tensor_text(tensor) + (root ? to_rank(*root) : ""),
      [&](c10d::Backend& gloo) {
        return root ? gloo.reduce(buffer, {.reduceOp = gloo_op, .rootRank = *root})
                    : gloo.allreduce(buffer, {.reduceOp = gloo_op});
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

Work GlooGroup::all_reduce_async(at::Tensor tensor, ReduceOp op, std::string_view name) {
  check_reducible("all_reduce", tensor, op);
  return reduce_to(std::nullopt, operation_label("all_reduce", name), tensor, op);
}

Work GlooGroup::reduce_async(at::Tensor tensor, int root, ReduceOp op, std::string_view name) {
  check_reducible("reduce", tensor, op);
  check_root("reduce", root, world_size());
  return reduce_to(root, operation_label("reduce", name), tensor, op);
}

Work GlooGroup::broadcast_async(at::Tensor tensor, int source, std::string_view name) {
  check_tensor("broadcast", tensor);
  check_root("broadcast", source, world_size());
  std::vector<at::Tensor> bytes{bytes_of(tensor)};
  return submit(operation_label("broadcast", name), tensor_text(tensor) + from_rank(source),
                [&](c10d::Backend& gloo) { return gloo.broadcast(bytes, {.rootRank = source}); });
}

Work GlooGroup::all_gather_async(at::Tensor output, at::Tensor input, std::string_view name) {
  check_gathered("all_gather", output, input, world_size());
  at::Tensor to = bytes_of(output);
  at::Tensor from = bytes_of(input);
  return submit(operation_label("all_gather", name), tensor_text(input),
                [&](c10d::Backend& gloo) { return gloo._allgather_base(to, from, {}); });
}

Work GlooGroup::gather_async(at::Tensor output, at::Tensor input, int root, std::string_view name) {
  check_rooted("gather", output, input, root, rank(), world_size());
  std::vector<at::Tensor> from{bytes_of(input)};
  std::vector<std::vector<at::Tensor>> to;
  if (rank() == root) {
    to.push_back(rows_of(output));
  }
  // Gloo fills one flat buffer and copies from it when its work ends.
  return submit(operation_label("gather", name), tensor_text(input) + to_rank(root),
                [&](c10d::Backend& gloo) { return gloo.gather(to, from, {.rootRank = root}); });
}

Work GlooGroup::scatter_async(at::Tensor output, at::Tensor input, int root,
                              std::string_view name) {
  check_rooted("scatter", input, output, root, rank(), world_size());
  std::vector<at::Tensor> to{bytes_of(output)};
  std::vector<std::vector<at::Tensor>> from;
  if (rank() == root) {
    from.push_back(rows_of(input));
  }
  return submit(operation_label("scatter", name), tensor_text(output) + from_rank(root),
                [&](c10d::Backend& gloo) { return gloo.scatter(to, from, {.rootRank = root}); });
}

Work GlooGroup::all_to_all_async(at::Tensor output, at::Tensor input, std::string_view name) {
  check_exchanged(output, input, world_size());
  at::Tensor to = bytes_of(output);
  at::Tensor from = bytes_of(input);
  std::vector<int64_t> even;
  return submit(operation_label("all_to_all", name), tensor_text(input),
                [&](c10d::Backend& gloo) { return gloo.alltoall_base(to, from, even, even, {}); });
}

void GlooGroup::barrier(std::string_view name) {
  std::vector<at::Tensor> token{at::ones({1}, at::kInt)};
  submit(operation_label("barrier", name), "", [&](c10d::Backend& gloo) {
    return gloo.allreduce(token, {});
  }).wait();
}

std::vector<nlohmann::json> GlooGroup::all_gather_object(const nlohmann::json& value,
                                                         std::string_view name) {
  const std::string operation = operation_label("all_gather_object", name);
  return core_->exchange(operation, core_->enter(operation), value);
}

nlohmann::json GlooGroup::broadcast_object(const nlohmann::json& value, std::string_view name) {
  const std::string operation = operation_label("broadcast_object", name);
  return core_->exchange(operation, core_->enter(operation),
                         rank() == 0 ? value : nlohmann::json())[0];
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
