// A group's operations on tensors. Each is checked on this rank, compared between ranks if it is
// new to the group, and passed to Gloo.
#include <ATen/ATen.h>
#include <xxhash.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "gloo_group.h"
#include "hasten/base/error.h"
#include "hasten/comm/few_sizes.h"
#include "tensor_checks.h"

namespace hasten::detail {

// How many operations a group remembers. Fully sharded models have hundreds for each rank of the
// world. 40 bytes each.
constexpr size_t kKnownOperations = 1 << 20;

uint64_t GlooGroup::enter_equal(const std::string& operation, const std::string& tensors) {
  const uint64_t sequence = core_->enter(operation, tensors);
  bool compare = core_->options.check_shapes == ShapeCheck::always;
  if (core_->options.check_shapes == ShapeCheck::first) {
    // All ranks have done the same operations so far, so they agree on what is new.
    const std::string what = operation + " " + tensors;
    compare = core_->known.insert(XXH3_64bits(what.data(), what.size())).second;
    if (core_->known.size() > kKnownOperations) {
      core_->known.clear();
    }
  }
  if (compare) {
    check_equal(operation, sequence, tensors);
  }
  return sequence;
}

Work GlooGroup::reduce_with(
    std::string operation, const at::Tensor& tensor, ReduceOp op, std::string tensors, bool keep,
    const std::function<c10::intrusive_ptr<c10d::Work>(
        c10d::ProcessGroupGloo&, std::vector<at::Tensor>& buffer, c10d::ReduceOp op)>& start) {
  const uint64_t sequence =
      enter_equal(operation, std::string(reduce_op_name(op)) + " of " + tensors);
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
      [&](c10d::ProcessGroupGloo& gloo) { return start(gloo, buffer, gloo_op); },
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
  return reduce_with(
      operation_label("all_reduce", name), tensor, op, tensor_text(tensor), true,
      [](c10d::ProcessGroupGloo& gloo, std::vector<at::Tensor>& buffer, c10d::ReduceOp how) {
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
      [root](c10d::ProcessGroupGloo& gloo, std::vector<at::Tensor>& buffer, c10d::ReduceOp how) {
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
      enter_equal(operation, tensor_text(tensor) + " from rank " + std::to_string(source));
  std::vector<at::Tensor> bytes{bytes_of(tensor)};
  return submit(
      std::move(operation), sequence,
      [&](c10d::ProcessGroupGloo& gloo) {
        c10d::BroadcastOptions options;
        options.rootRank = source;
        return gloo.broadcast(bytes, options);
      },
      nullptr);
}

Work GlooGroup::exchange_rows(std::string operation, const at::Tensor& output,
                              const at::Tensor& input,
                              c10::intrusive_ptr<c10d::Work> (*start)(c10d::ProcessGroupGloo&,
                                                                      at::Tensor& to,
                                                                      at::Tensor& from)) {
  const uint64_t sequence = enter_equal(operation, tensor_text(input));
  at::Tensor to = bytes_of(output);
  at::Tensor from = bytes_of(input);
  return submit(
      std::move(operation), sequence,
      [&](c10d::ProcessGroupGloo& gloo) { return start(gloo, to, from); }, nullptr);
}

Work GlooGroup::all_gather_async(at::Tensor output, at::Tensor input, std::string_view name) {
  check_gathered("all_gather", output, input, world_size());
  return exchange_rows(operation_label("all_gather", name), output, input,
                       [](c10d::ProcessGroupGloo& gloo, at::Tensor& to, at::Tensor& from) {
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
      enter_equal(operation, tensor_text(input) + " to rank " + std::to_string(root));
  std::vector<at::Tensor> from{bytes_of(input)};
  std::vector<std::vector<at::Tensor>> to;
  if (rank() == root) {
    to.push_back(rows_of(output));
  }
  return submit(
      std::move(operation), sequence,
      [&](c10d::ProcessGroupGloo& gloo) {
        c10d::GatherOptions options;
        options.rootRank = root;
        return gloo.gather(to, from, options);
      },
      // Gloo fills one flat buffer and copies from it when its work ends.
      nullptr);
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
      enter_equal(operation, tensor_text(output) + " from rank " + std::to_string(root));
  std::vector<at::Tensor> to{bytes_of(output)};
  std::vector<std::vector<at::Tensor>> from;
  if (rank() == root) {
    from.push_back(rows_of(input));
  }
  return submit(
      std::move(operation), sequence,
      [&](c10d::ProcessGroupGloo& gloo) {
        c10d::ScatterOptions options;
        options.rootRank = root;
        return gloo.scatter(to, from, options);
      },
      nullptr);
}

Work GlooGroup::all_to_all_async(at::Tensor output, at::Tensor input, std::string_view name) {
  check_exchanged(output, input, world_size());
  return exchange_rows(operation_label("all_to_all", name), output, input,
                       [](c10d::ProcessGroupGloo& gloo, at::Tensor& to, at::Tensor& from) {
                         std::vector<int64_t> even;
                         return gloo.alltoall_base(to, from, even, even, {});
                       });
}

void GlooGroup::barrier(std::string_view name) {
  std::string operation = operation_label("barrier", name);
  const uint64_t sequence = enter_equal(operation, "");
  std::vector<at::Tensor> token{at::ones({1}, at::kInt)};
  submit(
      std::move(operation), sequence,
      [&](c10d::ProcessGroupGloo& gloo) { return gloo.allreduce(token, {}); }, nullptr)
      .wait();
}

// Operations that go through the store: small values, and the agreement on shapes.

using StoreBytes = std::vector<uint8_t>;

/// Writes this rank's value, waits for all values, reads them, and deletes them if this rank is the
/// last to read. Runs in the store's thread.
class ByteExchange {
 public:
  ByteExchange(std::string prefix, int rank, int world_size, StoreBytes value)
      : prefix_(std::move(prefix)), rank_(static_cast<size_t>(rank)), value_(std::move(value)) {
    for (int i = 0; i < world_size; ++i) {
      keys_.push_back(prefix_ + "/" + std::to_string(i));
    }
  }

  /// nullopt while a value is missing; an empty list if cancelled.
  std::optional<std::vector<StoreBytes>> attempt(c10d::Store& store,
                                                 const std::atomic<bool>& cancelled) {
    if (!written_) {
      store.set(keys_[rank_], value_);
      written_ = true;
    }
    if (!store.check(keys_)) {
      return cancelled ? std::optional(std::vector<StoreBytes>()) : std::nullopt;
    }
    std::vector<StoreBytes> values = store.multiGet(keys_);
    if (store.add(prefix_, 1) == std::ssize(keys_) && !cancelled) {
      keys_.push_back(prefix_);
      for (const std::string& key : keys_) {
        store.deleteKey(key);
      }
    }
    return values;
  }

 private:
  const std::string prefix_;
  const size_t rank_;
  const StoreBytes value_;
  std::vector<std::string> keys_; // [rank]
  bool written_ = false;
};

std::vector<nlohmann::json> GlooGroup::exchange(const std::string& operation, uint64_t sequence,
                                                const nlohmann::json& value) {
  uint64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(core_->progress->mutex);
    number = ++core_->progress->exchanges;
  }
  // CBOR, since JSON text has no NaN and no infinity.
  const auto bytes = std::make_shared<ByteExchange>(
      "values/" + core_->key + "/" + std::to_string(number), rank(), world_size(),
      nlohmann::json::to_cbor({operation, sequence, value}));
  std::future<std::vector<StoreBytes>> future =
      core_->link->store().post_until<std::vector<StoreBytes>>(
          [bytes](c10d::Store& store, const std::atomic<bool>& cancelled) {
            return bytes->attempt(store, cancelled);
          });
  bool arrived = false;
  try {
    arrived = await_future(future, CommClock::now() + core_->options.timeout,
                           [&] { core_->poll_together(operation, sequence); });
  } catch (...) { // a failure or Ctrl-C: no rank will read the value
    core_->link->store().cancel();
    throw;
  }
  if (!arrived) {
    core_->link->store().cancel();
    core_->diagnose(operation, sequence, "", true);
  }
  std::vector<StoreBytes> all;
  try {
    all = future.get();
  } catch (const std::exception& error) {
    core_->diagnose(operation, sequence, error.what(), false);
  }
  if (all.empty()) { // cancelled: the world failed while this call waited
    core_->diagnose(operation, sequence, "cancelled", false);
  }
  std::vector<nlohmann::json> values;
  std::vector<std::string> operations;
  std::vector<std::string> numbered; // several operations may have one name
  for (const StoreBytes& bytes : all) {
    nlohmann::json sent = nlohmann::json::from_cbor(bytes);
    operations.push_back(sent[0]);
    numbered.push_back(operations.back() + " as its operation " + sent[1].dump());
    values.push_back(std::move(sent[2]));
  }
  require_equal(operation, operations);
  require_equal(operation, numbered);
  return values;
}

void GlooGroup::require_equal(const std::string& operation, const std::vector<std::string>& texts) {
  const auto other = std::find_if(texts.begin(), texts.end(),
                                  [&](const std::string& text) { return text != texts[0]; });
  if (other != texts.end()) {
    core_->fail(operation,
                "rank " +
                    std::to_string(core_->link->launch_rank(
                        core_->members[static_cast<size_t>(other - texts.begin())])) +
                    " has " + *other + ", rank " +
                    std::to_string(core_->link->launch_rank(core_->members[0])) + " has " +
                    texts[0],
                kSameOperations);
  }
}

void GlooGroup::check_equal(const std::string& operation, uint64_t sequence,
                            const std::string& tensors) {
  std::vector<std::string> texts;
  for (nlohmann::json& value : exchange(operation, sequence, tensors)) {
    texts.push_back(value);
  }
  require_equal(operation, texts);
}

std::vector<nlohmann::json> GlooGroup::all_gather_object(const nlohmann::json& value,
                                                         std::string_view name) {
  const std::string operation = operation_label("all_gather_object", name);
  return exchange(operation, core_->enter(operation), value);
}

nlohmann::json GlooGroup::broadcast_object(const nlohmann::json& value, std::string_view name) {
  const std::string operation = operation_label("broadcast_object", name);
  return exchange(operation, core_->enter(operation), rank() == 0 ? value : nlohmann::json())[0];
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
    check_equal(operation, core_->enter(operation), row_text);
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
