// A group's operations on tensors. Each is checked on this rank, compared between ranks if it is
// new to the group, and passed to Gloo.
#include <ATen/ATen.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "gloo_group.h"
#include "hasten/comm/few_sizes.h"
#include "tensor_checks.h"

namespace hasten::detail {

Work GlooGroup::reduce_with(
    std::string operation, const at::Tensor& tensor, ReduceOp op, std::string tensors, bool keep,
    const std::function<c10::intrusive_ptr<c10d::Work>(
        c10d::Backend&, std::vector<at::Tensor>& buffer, c10d::ReduceOp op)>& start) {
  const uint64_t sequence =
      core_->enter_equal(operation, std::string(reduce_op_name(op)) + " of " + tensors);
  const at::Tensor target = tensor.detach();
  const bool adds = op != ReduceOp::MAX && op != ReduceOp::MIN;
  const bool widen = adds && target.element_size() == 2;
  std::vector<at::Tensor> buffer{widen  ? target.to(at::kFloat)
                                 : keep ? target
                                        : target.clone()}; // Gloo's reduce writes to all ranks
  const double divisor = op == ReduceOp::AVG ? world_size() : 1;
  const auto gloo_op = op == ReduceOp::MAX       ? c10d::ReduceOp::MAX
                       : op == ReduceOp::MIN     ? c10d::ReduceOp::MIN
                       : op == ReduceOp::PRODUCT ? c10d::ReduceOp::PRODUCT
                                                 : c10d::ReduceOp::SUM;
  return submit(
      std::move(operation), sequence,
      [&](c10d::Backend& gloo) { return start(gloo, buffer, gloo_op); },
      [target, buffer, widen, divisor, keep] {
        at::Tensor reduced = buffer[0];
        if (keep && divisor != 1) {
          reduced.div_(divisor);
        }
        if (keep && widen) {
          at::Tensor(target).copy_(reduced);
        }
      });
}

Work GlooGroup::all_reduce_async(at::Tensor tensor, ReduceOp op, std::string_view name) {
  check_reducible("all_reduce", tensor, op);
  return reduce_with(operation_label("all_reduce", name), tensor, op, tensor_text(tensor), true,
                     [](c10d::Backend& gloo, std::vector<at::Tensor>& buffer, c10d::ReduceOp how) {
                       c10d::AllreduceOptions options;
                       options.reduceOp = std::move(how);
                       return gloo.allreduce(buffer, options);
                     });
}

Work GlooGroup::reduce_async(at::Tensor tensor, int root, ReduceOp op, std::string_view name) {
  check_reducible("reduce", tensor, op);
  check_root("reduce", root, world_size());
  return reduce_with(
      operation_label("reduce", name), tensor, op,
      tensor_text(tensor) + " to rank " + std::to_string(root), rank() == root,
      [root](c10d::Backend& gloo, std::vector<at::Tensor>& buffer, c10d::ReduceOp how) {
        c10d::ReduceOptions options;
        options.reduceOp = std::move(how);
        options.rootRank = root;
        return gloo.reduce(buffer, options);
      });
}

Work GlooGroup::broadcast_async(at::Tensor tensor, int source, std::string_view name) {
  check_tensor("broadcast", tensor);
  check_root("broadcast", source, world_size());
  std::string operation = operation_label("broadcast", name);
  const uint64_t sequence =
      core_->enter_equal(operation, tensor_text(tensor) + " from rank " + std::to_string(source));
  std::vector<at::Tensor> bytes{bytes_of(tensor)};
  return submit(std::move(operation), sequence, [&](c10d::Backend& gloo) {
    c10d::BroadcastOptions options;
    options.rootRank = source;
    return gloo.broadcast(bytes, options);
  });
}

Work GlooGroup::exchange_rows(
    std::string operation, const at::Tensor& output, const at::Tensor& input,
    c10::intrusive_ptr<c10d::Work> (*start)(c10d::Backend&, at::Tensor& to, at::Tensor& from)) {
  const uint64_t sequence = core_->enter_equal(operation, tensor_text(input));
  at::Tensor to = bytes_of(output);
  at::Tensor from = bytes_of(input);
  return submit(std::move(operation), sequence,
                [&](c10d::Backend& gloo) { return start(gloo, to, from); });
}

Work GlooGroup::all_gather_async(at::Tensor output, at::Tensor input, std::string_view name) {
  check_gathered("all_gather", output, input, world_size());
  return exchange_rows(operation_label("all_gather", name), output, input,
                       [](c10d::Backend& gloo, at::Tensor& to, at::Tensor& from) {
                         return gloo._allgather_base(to, from, {});
                       });
}

Work GlooGroup::gather_async(at::Tensor output, at::Tensor input, int root, std::string_view name) {
  check_root("gather", root, world_size());
  if (rank() == root) {
    check_gathered("gather", output, input, world_size());
  } else {
    check_tensor("gather", input);
  }
  std::string operation = operation_label("gather", name);
  const uint64_t sequence =
      core_->enter_equal(operation, tensor_text(input) + " to rank " + std::to_string(root));
  std::vector<at::Tensor> from{bytes_of(input)};
  std::vector<std::vector<at::Tensor>> to;
  if (rank() == root) {
    to.push_back(rows_of(output));
  }
  return submit(std::move(operation), sequence, [&](c10d::Backend& gloo) {
    c10d::GatherOptions options;
    options.rootRank = root;
    return gloo.gather(to, from, options); // into one flat buffer, copied when the work ends
  });
}

Work GlooGroup::scatter_async(at::Tensor output, at::Tensor input, int root,
                              std::string_view name) {
  check_root("scatter", root, world_size());
  if (rank() == root) {
    check_gathered("scatter", input, output, world_size());
  } else {
    check_tensor("scatter", output);
  }
  std::string operation = operation_label("scatter", name);
  const uint64_t sequence =
      core_->enter_equal(operation, tensor_text(output) + " from rank " + std::to_string(root));
  std::vector<at::Tensor> to{bytes_of(output)};
  std::vector<std::vector<at::Tensor>> from;
  if (rank() == root) {
    from.push_back(rows_of(input));
  }
  return submit(std::move(operation), sequence, [&](c10d::Backend& gloo) {
    c10d::ScatterOptions options;
    options.rootRank = root;
    return gloo.scatter(to, from, options);
  });
}

Work GlooGroup::all_to_all_async(at::Tensor output, at::Tensor input, std::string_view name) {
  check_exchanged(output, input, world_size());
  return exchange_rows(operation_label("all_to_all", name), output, input,
                       [](c10d::Backend& gloo, at::Tensor& to, at::Tensor& from) {
                         std::vector<int64_t> even;
                         return gloo.alltoall_base(to, from, even, even, {});
                       });
}

void GlooGroup::barrier(std::string_view name) {
  std::string operation = operation_label("barrier", name);
  const uint64_t sequence = core_->enter_equal(operation, "");
  std::vector<at::Tensor> token{at::ones({1}, at::kInt)};
  submit(std::move(operation), sequence, [&](c10d::Backend& gloo) {
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
  const std::string row_text = "rows of " + rows_text(rows);
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
