// The operations of a group that go through the store: small values, and the
// agreement on shapes.
#include <ATen/ATen.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "gloo_group.h"
#include "hasten/base/error.h"
#include "tensor_checks.h"

namespace hasten::detail {

using StoreBytes = std::vector<uint8_t>;

/// Runs in the store's thread: writes the own value, waits for all, reads them,
/// and deletes them if this rank is the last to have read.
std::vector<StoreBytes> exchange_bytes(
    c10d::Store& store,
    const std::atomic<bool>& cancelled,
    const std::string& prefix,
    int rank,
    int world_size,
    const StoreBytes& value) {
  std::vector<std::string> keys;
  for (int i = 0; i < world_size; ++i) {
    keys.push_back(prefix + "/" + std::to_string(i));
  }
  store.set(keys[static_cast<size_t>(rank)], value);
  StorePause pause;
  while (!store.check(keys)) {
    if (cancelled) {
      return {};
    }
    pause();
  }
  std::vector<StoreBytes> values = store.multiGet(keys);
  if (store.add(prefix, 1) == world_size && !cancelled) {
    keys.push_back(prefix);
    for (const std::string& key : keys) {
      store.deleteKey(key);
    }
  }
  return values;
}

std::vector<nlohmann::json> GlooGroup::exchange(
    const std::string& operation,
    uint64_t sequence,
    const char* kind,
    const nlohmann::json& value) {
  // CBOR, since JSON text has no NaN and no infinity.
  std::future<std::vector<StoreBytes>> future =
      core_->link->store().post<std::vector<StoreBytes>>(
          [prefix = std::string(kind) + "/" + core_->key + "/" +
                    std::to_string(sequence),
           rank = rank(),
           size = world_size(),
           bytes = nlohmann::json::to_cbor({operation, value})](
              c10d::Store& store, const std::atomic<bool>& cancelled) {
            return exchange_bytes(store, cancelled, prefix, rank, size, bytes);
          });
  bool arrived = false;
  try {
    arrived =
        await_future(future, CommClock::now() + core_->options.timeout, [&] {
          core_->poll(operation);
        });
  } catch (...) { // a failure or Ctrl-C: nobody will read the value
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
  for (const StoreBytes& bytes : all) {
    nlohmann::json pair = nlohmann::json::from_cbor(bytes);
    operations.push_back(pair[0]);
    values.push_back(std::move(pair[1]));
  }
  require_equal(operation, operations);
  return values;
}

void GlooGroup::require_equal(
    const std::string& operation, const std::vector<std::string>& texts) {
  const auto other =
      std::find_if(texts.begin(), texts.end(), [&](const std::string& text) {
        return text != texts[0];
      });
  if (other != texts.end()) {
    core_->fail(
        operation,
        "rank " +
            std::to_string(core_->link->launch_rank(
                core_->members[static_cast<size_t>(other - texts.begin())])) +
            " has " + *other + ", rank " +
            std::to_string(core_->link->launch_rank(core_->members[0])) +
            " has " + texts[0],
        "let all ranks do the same operations on tensors of one shape and "
        "dtype, in one order");
  }
}

void GlooGroup::check_equal(
    const std::string& operation,
    uint64_t sequence,
    const std::string& fingerprint) {
  if (!core_->options.check_shapes) {
    return;
  }
  std::vector<std::string> texts;
  for (nlohmann::json& value :
       exchange(operation, sequence, "check", fingerprint)) {
    texts.push_back(value);
  }
  require_equal(operation, texts);
}

std::vector<nlohmann::json> GlooGroup::gather_json(
    const nlohmann::json& value, std::string_view name) {
  const std::string operation = operation_label("gather_json", name);
  return exchange(operation, core_->enter(operation), "json", value);
}

nlohmann::json GlooGroup::broadcast_json(
    const nlohmann::json& value, std::string_view name) {
  const std::string operation = operation_label("broadcast_json", name);
  return exchange(
      operation,
      core_->enter(operation),
      "json",
      rank() == 0 ? value : nlohmann::json())[0];
}

at::Tensor GlooGroup::all_gather_rows(
    const at::Tensor& rows, std::string_view name) {
  check_rows(rows);
  const std::string operation = operation_label("all_gather_rows", name);
  std::vector<int64_t> counts; // [rank]
  std::vector<std::string> texts;
  const std::string row_text = "rows of " + rows_text(rows);
  for (const nlohmann::json& shape : exchange(
           operation,
           core_->enter(operation),
           "json",
           {rows.size(0), row_text})) {
    counts.push_back(shape[0]);
    texts.push_back(shape[1]);
  }
  require_equal(operation, texts);
  const int64_t longest = *std::max_element(counts.begin(), counts.end());
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
    parts.push_back(gathered[i].narrow(0, 0, counts[static_cast<size_t>(i)]));
  }
  return at::cat(parts);
}

} // namespace hasten::detail
